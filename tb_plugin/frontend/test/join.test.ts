import assert from "node:assert/strict";
import { test } from "node:test";
import { lineFigure } from "../src/model/figure";
import { joinSteps, spread } from "../src/model/join";

test("two runs share one axis, and each keeps its own values", () => {
  const joined = joinSteps(Float64Array.from([1, 5, 9]), Float64Array.from([5, 10]));
  assert.deepEqual([...joined.steps], [1, 5, 9, 10]);
  assert.deepEqual(spread([0.1, null, 0.9], joined.own), [0.1, null, 0.9, undefined]);
  assert.deepEqual(spread(["a", "b"], joined.other), [undefined, "a", undefined, "b"]);
});

test("a step of the other run does not break a line, a missing number does", () => {
  const curves = [{ label: "", colour: "red", values: [1, undefined, 2, null, 3] }];
  const axes = { name: "t", xLabel: "step", yLabel: "y", xTicks: [], marks: [], log: false };
  const text = lineFigure({ ...axes, xs: [0, 1, 2, 3, 4], curves, range: [0, 4] }, "sans");
  const path = text.match(/d="(M[^"]*)" fill="none" stroke="red"/)?.[1] ?? "";
  assert.equal(path.replace(/[\d. ]/g, ""), "MLM");
});
