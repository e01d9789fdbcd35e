import assert from "node:assert/strict";
import { test } from "node:test";
import { firstSite, heatColumns, heatPixels, ridgeline, type Histogram } from "../src/model/ridge";

const NARROW: Histogram = { step: 10, edges: [0, 1, 2], counts: [1, 3], nonfinite: 0 };
const WIDE: Histogram = { step: 20, edges: [-2, 2], counts: [5], nonfinite: 2 };
const BROKEN: Histogram = { step: 30, edges: [0, 1], counts: [0], nonfinite: 9 };

test("ridges share one axis, stand below each other and reach their own peak", () => {
  const { low, high, ridges } = ridgeline([NARROW, WIDE], 100, 10, 30);
  assert.deepEqual([low, high], [-2, 2]);
  assert.deepEqual(
    ridges.map(({ step, baseline, entries }) => [step, baseline, entries]),
    [
      [10, 30, 4],
      [20, 40, 5],
    ],
  );
  assert.equal(ridges[0]?.path, "M50.0 30L50.0 20.0H75.0L75.0 0.0H100.0V30");
});

test("bins of different width are compared by density", () => {
  const uneven: Histogram = { step: 1, edges: [0, 1, 4], counts: [3, 3], nonfinite: 0 };
  assert.equal(ridgeline([uneven], 40, 1, 30).ridges[0]?.path, "M0.0 30L0.0 0.0H10.0L10.0 20.0H40.0V30");
});

test("a histogram of nothing but NaN has no outline, and its count stays", () => {
  const { low, high, ridges } = ridgeline([BROKEN], 100, 10, 30);
  assert.deepEqual([low, high, ridges[0]?.path, ridges[0]?.nonfinite], [0, 1, "", 9]);
});

test("the first site is one that is pinned, or lies inside one that is", () => {
  assert.equal(firstSite(["h.0.w", "h.1.w"], ["head", "h.1"]), "h.1.w");
  assert.equal(firstSite(["h.0.w"], []), "h.0.w");
  assert.equal(firstSite([], ["a"]), "");
});

test("as a heat map each column is scaled to its own peak, and values rise upwards", () => {
  const { low, high, columns } = heatColumns([{ step: 1, edges: [0, 1, 2], counts: [10, 5], nonfinite: 2 }], 100);
  assert.deepEqual([low, high], [0, 2]);
  assert.deepEqual(columns, [
    {
      step: 1,
      nonfinite: 2,
      bins: [
        { top: 50, height: 50, share: 1 },
        { top: 0, height: 50, share: 0.5 },
      ],
    },
  ]);
});

test("every bin with entries is at least one pixel, however many bins and however few rows", () => {
  for (const bins of [1, 7, 64, 1000]) {
    for (const rows of [1, 8, 64]) {
      for (const filled of [0, bins >> 1, bins - 1]) {
        const counts = Array.from({ length: bins }, (_, bin) => (bin === filled ? 1 : bin === 0 ? 1e9 : 0));
        const one = { step: 1, edges: Array.from({ length: bins + 1 }, (_, edge) => edge), counts, nonfinite: 0 };
        const { shares, broken } = heatPixels([one, { ...one, nonfinite: 3 }], rows);
        assert.deepEqual(broken, [false, true]);
        const row = Math.min(rows - 1, Math.floor(((bins - 1 - filled) / bins) * rows + 1e-6));
        for (const column of [0, 1]) assert.ok((shares[column * rows + row] ?? 0) > 0, `${bins} ${rows} ${filled}`);
        assert.equal(Math.max(...shares), 255);
      }
    }
  }
});
