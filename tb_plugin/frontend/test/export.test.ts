import assert from "node:assert/strict";
import { test } from "node:test";
import { csv, fileName, lineSvg, mapSvg, seriesRows, type Theme } from "../src/model/export";
import type { Series } from "../src/model/series";
import { MISSING_BITS } from "../src/schema";

const THEME: Theme = { text: "#111", ground: "#fff", line: "#eee" };
const HOSTILE = '<img src=x onerror="1">&\'';

test("csv quotes what has to be quoted, and no layer's name becomes a formula", () => {
  assert.equal(
    csv([
      ["a,b", 'say "x"', 1.5, null],
      ["=1+1", -2, NaN, Infinity],
    ]),
    '"a,b","say ""x""",1.5,\r\n\'=1+1,-2,NaN,Infinity\r\n',
  );
});

test("a series becomes one line per site and column, missing empty", () => {
  const floats = Float32Array.from([1, 0, NaN, 0.5]);
  const bits = new Uint32Array(floats.buffer);
  bits[1] = MISSING_BITS;
  const steps = Float64Array.from([1, 2]);
  const series: Series = {
    run: "r",
    metric: "m",
    sites: ["a", "b"],
    columns: 2,
    width: 1,
    most: 1,
    first: steps,
    last: steps,
    wall: steps,
    blocks: new Map([["extreme", { values: floats, bits }]]),
  };
  assert.deepEqual(seriesRows(series), [
    ["site", "first_step", "last_step", "wall_time", "extreme"],
    ["a", 1, 1, 1, 1],
    ["a", 2, 2, 2, null],
    ["b", 1, 1, 1, NaN],
    ["b", 2, 2, 2, 0.5],
  ]);
});

test("file names hold nothing but letters, digits, dots and dashes", () => {
  assert.equal(fileName("../a b/<x>", "block.gain"), "..-a-b-x-_block.gain");
});

test("names in pictures are text", () => {
  const map = mapSvg({
    title: HOSTILE,
    caption: HOSTILE,
    names: [{ text: HOSTILE, y: 3 }],
    image: "data:image/png;base64,AA==",
    width: 100,
    height: 20,
    range: [0, 10],
    theme: THEME,
    ramp: { colours: ["red"], low: "0", high: "<" },
  });
  const lines = lineSvg({
    title: HOSTILE,
    axis: "step",
    tick: String,
    xs: [1, 2],
    curves: [{ label: HOSTILE, colour: "red", values: [1, 2] }],
    log: false,
    range: [0, 3],
    theme: THEME,
  });
  for (const text of [map, lines]) {
    assert.ok(!text.includes("<img"));
    assert.match(text, /&lt;img src=x onerror=&quot;1&quot;&gt;&amp;/);
  }
});

test("lines break where there is no number, on either axis", () => {
  const picture = { title: "t", axis: "step", tick: String, xs: [0, 1, 2, 3], range: [0, 3] as const, theme: THEME };
  const path = (log: boolean): string =>
    lineSvg({ ...picture, log, curves: [{ label: "", colour: "red", values: [1, 10, null, 100] }] }).match(
      /d="(M[^"]*L[^"]*)"/,
    )?.[1] ?? "";
  assert.equal(path(true), "M70 244L280 139M700 34");
  assert.equal(path(false).split("M").length, 3);
});

test("nothing to draw is still a picture", () => {
  assert.match(
    lineSvg({ title: "t", axis: "step", tick: String, xs: [], curves: [], log: true, range: [0, 1], theme: THEME }),
    /^<svg .*<\/svg>$/,
  );
});
