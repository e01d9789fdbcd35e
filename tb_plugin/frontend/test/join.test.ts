import assert from "node:assert/strict";
import { test } from "node:test";
import { lineSvg } from "../src/model/export";
import { joinSteps, spread } from "../src/model/join";

test("two runs share one axis, and each keeps its own values", () => {
  const joined = joinSteps(Float64Array.from([1, 5, 9]), Float64Array.from([5, 10]));
  assert.deepEqual([...joined.steps], [1, 5, 9, 10]);
  assert.deepEqual(spread([0.1, null, 0.9], joined.own), [0.1, null, 0.9, undefined]);
  assert.deepEqual(spread(["a", "b"], joined.other), [undefined, "a", undefined, "b"]);
});

test("a step of the other run does not break a line, a missing number does", () => {
  const theme = { text: "#111", ground: "#fff", line: "#eee" };
  const curve = { label: "", colour: "red", values: [1, undefined, 2, null, 3] };
  const path =
    lineSvg({
      title: "t",
      axis: "step",
      tick: String,
      xs: [0, 1, 2, 3, 4],
      curves: [curve],
      log: false,
      range: [0, 4],
      theme,
    }).match(/d="(M[^"]*L[^"]*)"/)?.[1] ?? "";
  assert.equal(path.replace(/[\d. ]/g, ""), "MLM");
});
