import assert from "node:assert/strict";
import { test } from "node:test";
import type { RunMetric } from "../src/api";
import { colourScale } from "../src/model/colour";
import { alone, difference } from "../src/model/difference";
import { cellKind, type Series } from "../src/model/series";
import { MISSING_BITS } from "../src/schema";
import { seriesAt } from "./series";

const SPEC = {
  name: "block.gain",
  title: "gain",
  unit: "1",
  kind: "block",
  scale: "log",
  low: 0,
  high: null,
  marks: [0.5, 2],
} as unknown as RunMetric;

function series(sites: readonly string[], steps: readonly number[], values: readonly number[], width = 1): Series {
  const floats = Float32Array.from(values);
  const extreme = { values: floats, bits: new Uint32Array(floats.buffer) };
  return seriesAt(steps, { extreme }, { run: "r", metric: "block.gain", sites, width });
}

function shown(found: ReturnType<typeof difference>): readonly (number | string)[] {
  const block = found?.series.blocks.get("extreme");
  return Array.from(block?.bits ?? [], (bits, i) =>
    cellKind(bits) === "value" ? (block?.values[i] ?? NaN) : cellKind(bits),
  );
}

test("a metric on a log scale is compared by ratio, at common steps and common layers", () => {
  const found = difference(
    series(["a", "b"], [1, 2, 3], [1, 2, 3, 4, 5, 6]),
    series(["b", "c"], [1, 2], [2, 10, 0, 0]),
    SPEC,
  );
  assert.deepEqual(found?.series.sites, ["b"]);
  assert.deepEqual(shown(found), [2, 0.5, "missing"]);
  assert.deepEqual(found?.spec.marks, [0.5, 2]);
});

test("a share is compared by difference, with colours around 0", () => {
  const share = { ...SPEC, scale: "linear", unit: "share", high: 1, marks: [0.9] } as RunMetric;
  const found = difference(series(["a"], [1, 2], [0.75, 0.25]), series(["a"], [1, 2], [0.25, 0.5]), share);
  assert.deepEqual(shown(found), [0.5, -0.25]);
  assert.ok(found !== null);
  const block = found.series.blocks.get("extreme");
  assert.ok(block !== undefined);
  const scale = colourScale(found.spec, block, false);
  assert.ok(scale.diverging);
  assert.equal(scale.position(0), 0.5);
  assert.equal(scale.low, -scale.high);
});

test("missing, NaN and infinity stay what they are", () => {
  const own = series(["a"], [1, 2, 3], [1, NaN, Infinity]);
  const other = series(["a"], [1, 2, 3], [1, 1, 1]);
  const bits = other.blocks.get("extreme")?.bits;
  if (bits !== undefined) bits[0] = MISSING_BITS;
  assert.deepEqual(shown(difference(own, other, SPEC)), ["missing", "nan", "inf"]);
});

test("columns of other widths meet where their steps do", () => {
  const found = difference(series(["a"], [10, 12, 30], [1, 1, 1]), series(["a"], [8, 12], [2, 4], 4), SPEC);
  assert.deepEqual(shown(found), [0.5, 0.25, "missing"]);
});

test("runs that were read at other steps are compared by what their maps show", () => {
  const found = difference(
    series(["a"], [10, 20, 25, 31, 45], [1, 1, 1, 1, 1]),
    series(["a"], [9, 19, 30], [1, 2, 4]),
    SPEC,
  );
  assert.deepEqual(shown(found), [1, 0.5, 0.5, 0.25, "missing"]);
});

test("models without a common layer have no difference", () => {
  assert.equal(difference(series(["a"], [1], [1]), series(["b"], [1], [1]), SPEC), null);
});

test("layers of either run without one of the same name are counted", () => {
  const [own, other] = [series(["a", "b"], [1], [1, 2]), series(["b", "c", "d"], [1], [1, 2, 3])];
  assert.equal(alone(own, other, 1), ", without a partner: 1 of 2 layers here, 2 of 3 there");
  assert.equal(alone(own, own, 2), "");
});
