import assert from "node:assert/strict";
import { test } from "node:test";
import { colourOf, colourScale, css, isDiverging, word } from "../src/model/colour";
import {
  depthOf,
  labelsOf,
  handlesOf,
  rowOfSites,
  rowsBetween,
  rowTop,
  zoomRows,
  type RowRange,
} from "../src/model/depth";
import { paintHeat, shownCell } from "../src/model/heat";
import { mapNote } from "../src/model/note";
import { branchesOf, rowsOf, UNFOLDED } from "../src/model/tree";
import type { Block, Series } from "../src/model/series";
import { MISSING_BITS, NAN_BITS, type MetricSpec } from "../src/schema";
import { seriesAt } from "./series";

const GAIN: MetricSpec = {
  name: "block.gain",
  title: "gain",
  unit: "1",
  kind: "block",
  formula: "",
  source: "",
  cost: "c",
  low: 0,
  high: null,
  scale: "log",
  marks: [0.5, 2],
  headline: false,
};
const SHARE: MetricSpec = { ...GAIN, name: "share", unit: "share", high: 1, scale: "linear", marks: [0.9] };
const NORM: MetricSpec = { ...GAIN, name: "norm", marks: [] };

function blockOf(words: readonly number[]): Block {
  const bits = Uint32Array.from(words);
  return { bits, values: new Float32Array(bits.buffer) };
}

function numbers(values: readonly number[]): Block {
  const floats = Float32Array.from(values);
  return { values: floats, bits: new Uint32Array(floats.buffer) };
}

test("gains diverge from 1 with the same colours in every run; shares and norms do not", () => {
  assert.deepEqual([GAIN, SHARE, NORM].map(isDiverging), [true, false, false]);
  const scale = colourScale(GAIN, numbers([1]), false);
  assert.deepEqual([scale.low, scale.high], [0.125, 8]);
  assert.equal(scale.position(1), 0.5);
  assert.deepEqual([scale.position(0), scale.position(1e9)], [0, 1]);
});

test("a gain of 1 is white, less is blue, more is red", () => {
  const scale = colourScale(GAIN, numbers([1]), false);
  const [red, , blue] = [0.2, 1, 5].map((gain) => css(colourOf(scale, gain)).match(/\d+/g)?.map(Number) ?? []);
  assert.ok((red?.[2] ?? 0) > (red?.[0] ?? 0));
  assert.ok((blue?.[0] ?? 0) > (blue?.[2] ?? 0));
  assert.ok(Math.min(...(css(colourOf(scale, 1)).match(/\d+/g) ?? []).map(Number)) > 245);
});

test("in the dark a gain of 1 is dark, and what deviates is lighter on both sides", () => {
  const scale = colourScale(GAIN, numbers([1]), true);
  const light = (gain: number): number => Math.max(...(css(colourOf(scale, gain)).match(/\d+/g) ?? []).map(Number));
  assert.ok(light(1) < 80);
  for (const side of [
    [1, 0.7, 0.4, 0.125],
    [1, 1.4, 2.5, 8],
  ])
    assert.ok(side.every((gain, i) => i === 0 || light(gain) > light(side[i - 1] ?? 0)));
});

test("a bounded metric uses its bounds, an unbounded one its own range without outliers", () => {
  assert.deepEqual(
    [colourScale(SHARE, numbers([0.1]), false).low, colourScale(SHARE, numbers([0.1]), false).high],
    [0, 1],
  );
  const values = [...Array.from({ length: 999 }, (_, i) => 1 + i / 1000), 1e30];
  assert.ok(colourScale(NORM, numbers(values), false).high < 3);
});

test("a constant or empty metric still has a range", () => {
  for (const values of [[3, 3, 3], [NaN], []]) {
    const scale = colourScale(NORM, numbers(values), false);
    assert.ok(scale.high > scale.low);
  }
});

function rowsOfSites(names: readonly string[], range: RowRange | null = null) {
  return depthOf(rowsOf(branchesOf(names), UNFOLDED), range);
}

test("the first row lies at the bottom, and pixels find their rows again", () => {
  const depth = rowsOfSites(["a", "b", "c", "d"]);
  assert.deepEqual([rowTop(depth, 0, 40), rowTop(depth, 3, 40)], [30, 0]);
  assert.deepEqual(
    [rowsBetween(depth, 35, 36, 40), rowsBetween(depth, 0, 1, 40), rowsBetween(depth, 0, 40, 40)],
    [
      [0, 1],
      [3, 4],
      [0, 4],
    ],
  );
});

test("value, missing, NaN and no column yet are painted differently", () => {
  const one = 0x3f800000;
  const block = blockOf([one, MISSING_BITS, NAN_BITS]);
  const series = seriesAt([2, 3, 4], { extreme: block });
  const pixels = new Uint32Array(4 * 12);
  const colours = { missing: word(1, 2, 3), empty: word(4, 5, 6) };
  paintHeat(
    pixels,
    4,
    12,
    { series, block, range: [1, 5], depth: rowsOfSites(["a"]), scale: colourScale(GAIN, block, false) },
    colours,
  );
  assert.equal(pixels[0], colours.empty);
  assert.equal(pixels[1], word(255, 255, 255));
  assert.equal(pixels[2], colours.missing);
  const hatch = new Set(Array.from({ length: 12 }, (_, y) => pixels[4 * y + 3]));
  assert.equal(hatch.size, 2);
});

function runOf(
  names: readonly string[],
  columns: number,
  quiet: number,
  loud: readonly [number, number, number],
): { series: Series; block: Block } {
  const values = new Float32Array(names.length * columns).fill(quiet);
  values[loud[0] * columns + loud[1]] = loud[2];
  const block = { values, bits: new Uint32Array(values.buffer) };
  const steps = Array.from({ length: columns }, (_, i) => i + 1);
  const series = seriesAt(steps, { extreme: block }, { sites: names });
  return { series, block };
}

/** A generator of numbers in [0, 1) that gives the same ones each time. */
function random(seed: number): () => number {
  let state = seed;
  return () => (state = (state * 1664525 + 1013904223) % 4294967296) / 4294967296;
}

const NAMES = {
  flat: (i: number): string => `layer${i}`,
  nested: (i: number): string => `model.h.${Math.floor(i / 12)}.part${Math.floor((i % 12) / 4)}.w${i % 4}`,
};

test("of 10 to 10 000 rows one reading that deviates is seen in its colour at every zoom", () => {
  const next = random(7);
  const colours = { missing: word(1, 2, 3), empty: word(4, 5, 6) };
  for (const rows of [10, 37, 408, 409, 1000, 2917, 10_000]) {
    for (const [kind, name] of Object.entries(NAMES)) {
      for (const spec of [GAIN, NORM]) {
        for (const value of [8, 1 / 8]) {
          const names = Array.from({ length: rows }, (_, i) => name(i));
          const columns = 40 + Math.floor(next() * 300);
          const [site, column] = [Math.floor(next() * rows), Math.floor(next() * columns)];
          const { series, block } = runOf(names, columns, 1, [site, column, value]);
          const scale = colourScale(spec, block, false);
          const [width, height] = [60 + Math.floor(next() * 200), 168 + Math.floor(next() * 300)];
          let depth = rowsOfSites(names);
          let range: readonly [number, number] = [1, columns + 1];
          const wanted = colourOf(scale, value);
          for (let zoom = 0; zoom < 6; zoom++) {
            const pixels = new Uint32Array(width * height);
            paintHeat(pixels, width, height, { series, block, range, depth, scale }, colours);
            assert.ok(
              pixels.includes(wanted),
              `${rows} ${kind} rows, zoom ${zoom}, site ${site} of ${depth.low} to ${depth.high}, ${spec.name} ${value}`,
            );
            depth = depthOf(depth.rows, zoomRows(depth, site + 0.5, 0.3) ?? null);
            const half = Math.max(1, (range[1] - range[0]) * 0.3);
            range = [Math.max(1, column + 1 - half * next()), column + 2 + half * next()];
          }
        }
      }
    }
  }
});

test("a folded branch shows its reading furthest out, and pointing at it finds the layer", () => {
  const names = Array.from({ length: 48 }, (_, i) => NAMES.nested(i));
  const { series, block } = runOf(names, 20, 1, [17, 4, 8]);
  const scale = colourScale(GAIN, block, false);
  const depth = depthOf(rowsOf(branchesOf(names), { level: 2, turned: [] }), null);
  assert.deepEqual(
    depth.rows.map(({ from, to }) => [from, to]),
    [
      [0, 12],
      [12, 24],
      [24, 36],
      [36, 48],
    ],
  );
  const pixels = new Uint32Array(20 * 40);
  paintHeat(pixels, 20, 40, { series, block, range: [1, 21], depth, scale }, { missing: 0, empty: 0 });
  assert.equal(pixels[25 * 20 + 4], colourOf(scale, 8));
  assert.deepEqual(shownCell({ series, block, depth, scale }, [1, 2], [4, 4]), {
    site: 17,
    column: 4,
    kind: "value",
    value: 8,
  });
});

test("what is left out is said: rows per pixel, folded rows, and that only some rows are in view", () => {
  const names = Array.from({ length: 1000 }, (_, i) => NAMES.nested(i));
  const { series } = runOf(names, 20, 1, [0, 0, 1]);
  const drawn = { range: [1, 21] as const, width: 400, height: 300, neutral: "1" };
  assert.equal(mapNote(series, rowsOfSites(names), drawn), "4 rows per pixel: the one furthest from 1 shown");
  assert.equal(
    mapNote(series, rowsOfSites(names, [10, 20]), drawn),
    "every reading shown; rows 11\u201320 of 1\u202f000",
  );
  assert.match(
    mapNote(series, depthOf(rowsOf(branchesOf(names), { level: 2, turned: [] }), null), drawn),
    /^folded rows show/,
  );
});

test("labels never lie on each other, name branches where rows are too thin, and always name what they must", () => {
  for (const rows of [3, 20, 292, 3000]) {
    const names = Array.from({ length: rows }, (_, i) => NAMES.nested(i));
    const branches = branchesOf(names);
    const depth = depthOf(rowsOf(branches, UNFOLDED), null);
    const rowOf = rowOfSites(depth.rows, rows);
    const labels = [...labelsOf(depth, branches, rowOf, new Set([2]), 400, 14)].sort((a, b) => a.y - b.y);
    assert.ok(labels.some(({ row, forced }) => row === 2 && forced));
    labels.forEach((label, i) => assert.ok(i === 0 || label.y - (labels[i - 1]?.y ?? 0) >= 14));
    assert.equal(
      labels.some((label) => label.rows > 1),
      rows > 20,
    );
    const handles = [...handlesOf(depth, branches, rowOf, UNFOLDED, 400)].sort((a, b) => a.top - b.top);
    handles.forEach((handle, i) =>
      assert.ok(
        handle.height >= 24 &&
          (i === 0 || handle.top >= (handles[i - 1]?.top ?? 0) + (handles[i - 1]?.height ?? 0) - 0.5),
      ),
    );
  }
});
