import assert from "node:assert/strict";
import { test } from "node:test";
import { colourOf, colourScale, css, isDiverging, word } from "../src/model/colour";
import { paintHeat, rowTop, siteAt } from "../src/model/heat";
import type { Block, Series } from "../src/model/series";
import { MISSING_BITS, NAN_BITS, type MetricSpec } from "../src/schema";

const GAIN: MetricSpec = {
  name: "block.gain", title: "gain", unit: "1", kind: "block", formula: "", source: "", cost: "c",
  low: 0, high: null, scale: "log", marks: [0.5, 2], headline: false,
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

test("a bounded metric uses its bounds, an unbounded one its own range without outliers", () => {
  assert.deepEqual([colourScale(SHARE, numbers([0.1]), false).low, colourScale(SHARE, numbers([0.1]), false).high], [0, 1]);
  const values = [...Array.from({ length: 999 }, (_, i) => 1 + i / 1000), 1e30];
  assert.ok(colourScale(NORM, numbers(values), false).high < 3);
});

test("a constant or empty metric still has a range", () => {
  for (const values of [[3, 3, 3], [NaN], []]) {
    const scale = colourScale(NORM, numbers(values), false);
    assert.ok(scale.high > scale.low);
  }
});

test("the first site lies at the bottom, and rows of pixels find their site again", () => {
  assert.deepEqual([rowTop(0, 4, 40), rowTop(3, 4, 40)], [30, 0]);
  assert.deepEqual([siteAt(35, 4, 40), siteAt(5, 4, 40), siteAt(-9, 4, 40), siteAt(99, 4, 40)], [0, 3, 3, 0]);
});

test("value, missing, NaN and no column yet are painted differently", () => {
  const one = 0x3f800000;
  const block = blockOf([one, MISSING_BITS, NAN_BITS]);
  const series: Series = {
    run: "", metric: "", sites: ["a"], columns: 3, width: 1, most: 1,
    first: Float64Array.from([2, 3, 4]), last: Float64Array.from([2, 3, 4]), wall: new Float64Array(3),
    blocks: new Map([["extreme", block]]),
  };
  const pixels = new Uint32Array(4 * 12);
  const colours = { missing: word(1, 2, 3), empty: word(4, 5, 6) };
  paintHeat(pixels, 4, 12, series, block, [1, 5], colourScale(GAIN, block, false), colours);
  assert.equal(pixels[0], colours.empty);
  assert.equal(pixels[1], word(255, 255, 255));
  assert.equal(pixels[2], colours.missing);
  const hatch = new Set(Array.from({ length: 12 }, (_, y) => pixels[4 * y + 3]));
  assert.equal(hatch.size, 2);
});
