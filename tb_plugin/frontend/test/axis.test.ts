import assert from "node:assert/strict";
import { test } from "node:test";
import { axisValues, stepToX, xToStep } from "../src/model/axis";
import type { Series } from "../src/model/series";
import { smooth } from "../src/model/smooth";
import { gesture, panBy, zoomBy } from "../src/model/zoom";

const WALL = Float64Array.from([1000, 1010, 1005, 1030]);
const FIRST = Float64Array.from([1, 11, 21, 31]);
const SERIES = { first: FIRST, wall: WALL } as unknown as Series;

test("time since the start never falls, even where the clock was set back", () => {
  assert.deepEqual([...axisValues(SERIES, "relative", 990)], [10, 20, 20, 40]);
  assert.deepEqual([...axisValues(SERIES, "wall", 990)], [1000, 1010, 1010, 1030]);
  assert.equal(axisValues(SERIES, "step", 990), FIRST);
});

test("steps and times translate into each other, also between columns and past the ends", () => {
  const xs = Float64Array.from([10, 20, 30, 50]);
  assert.equal(stepToX(FIRST, xs, 26), 40);
  assert.equal(xToStep(FIRST, xs, 40), 26);
  assert.deepEqual([stepToX(FIRST, xs, -5), stepToX(FIRST, xs, 99)], [10, 50]);
  assert.equal(stepToX(Float64Array.from([3]), Float64Array.from([7]), 9), 7);
});

test("smoothing is TensorBoard's: the first value stays, gaps stay, a constant stays", () => {
  assert.deepEqual(smooth([1, 3], 0.5), [1, (0.5 * 0.5 * 1 + 0.5 * 3) / 0.75]);
  assert.deepEqual(smooth([2, null, undefined, 2], 0.9), [2, null, undefined, 2]);
  assert.deepEqual(smooth([1, null, 3], 0.5), [1, null, 7 / 3]);
  assert.deepEqual(smooth([5, 1], 0), [5, 1]);
});

test("a zoom keeps the step under the pointer where it is and never leaves the run", () => {
  assert.deepEqual(zoomBy([0, 100], 50, 0.5, [0, 100]), [25, 75]);
  assert.deepEqual(zoomBy([0, 100], 0, 0.5, [0, 100]), [0, 50]);
  assert.deepEqual(zoomBy([40, 60], 60, 2, [0, 70]), [20, 60]);
  assert.equal(zoomBy([25, 75], 50, 2, [0, 100]), null);
  assert.deepEqual(zoomBy([10, 14], 12, 0.1, [0, 100]), [10, 14]);
  assert.deepEqual(panBy([40, 60], 5, [0, 100]), [80, 100]);
});

test("keys move, zoom and pick, and others are left to the page", () => {
  assert.deepEqual(gesture("ArrowRight", true), { kind: "pan", by: 0.5 });
  assert.deepEqual(gesture("ArrowUp", false), { kind: "row", by: 1 });
  assert.equal(gesture("Tab", false), null);
});
