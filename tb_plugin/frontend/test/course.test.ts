import assert from "node:assert/strict";
import { test } from "node:test";
import { courseOf, courseText, isLow } from "../src/model/course";
import { groupIssues } from "../src/model/groups";
import type { Block, Series } from "../src/model/series";
import { fixOf, type Issue } from "../src/model/verdict";
import { MISSING_BITS } from "../src/schema";
import { seriesAt } from "./series";

const ISSUE: Issue = {
  issue_type: "DEAD",
  severity: "HIGH",
  layer: "a",
  step: 1,
  value: 0.95,
  threshold: 0.9,
  message: "m",
  advice: "a",
  layers: ["a"],
  healed_step: null,
  seen: 1,
  state: "open",
  metrics: [],
};

function block(values: readonly (number | null)[]): Block {
  const floats = Float32Array.from(values, (value) => value ?? 0);
  const bits = new Uint32Array(floats.buffer);
  values.forEach((value, i) => value === null && (bits[i] = MISSING_BITS));
  return { values: floats, bits };
}

function series(blocks: Readonly<Record<string, readonly (number | null)[]>>): Series {
  const columns = Object.values(blocks)[0]?.length ?? 0;
  const steps = Array.from({ length: columns }, (_, i) => 10 * (i + 1));
  return seriesAt(steps, Object.fromEntries(Object.entries(blocks).map(([name, values]) => [name, block(values)])));
}

test("the worst lies on the side of the threshold on which the issue was found", () => {
  const found = series({ min: [4, 1, 3], extreme: [5, 2, 3] });
  assert.equal(isLow({ ...ISSUE, value: 1e-6, threshold: 1e-4 }), true);
  assert.deepEqual(courseOf(found, true), { now: 3, worst: 1, worstSteps: [20, 20] });
  assert.deepEqual(courseOf(series({ max: [4, 9, 3] }), false), { now: 3, worst: 9, worstSteps: [20, 20] });
});

test("NaN is worse than every number, and where nothing arrives at last, that is how it is now", () => {
  assert.deepEqual(courseOf(series({ max: [4, NaN, null, 9] }), false), { now: 9, worst: NaN, worstSteps: [20, 20] });
  const found = courseOf(series({ max: [4, NaN, 9, null] }), false);
  assert.deepEqual(found, { now: null, worst: NaN, worstSteps: [20, 20] });
  assert.equal(found && courseText(found, "gain", "1"), "gain: now nothing arrived, worst NaN at step 20");
  assert.equal(courseOf(series({ max: [null, null] }), false), null);
});

test("three significant digits; a share is a percentage, nats the factor that they stand for", () => {
  const at = { now: 0.5, worst: 0.94567, worstSteps: [1200, 1249] } as const;
  assert.equal(
    courseText(at, "dead units", "share"),
    "dead units: now 50.0 %, worst 94.6 % at steps 1\u202f200\u20131\u202f249",
  );
  assert.match(courseText({ ...at, now: Math.log(1e-6) }, "gain", "nats"), /now \u00d71.00e\u22126/);
});

test("a consequence is read with its cause, and is a group of its own where the cause is not there", () => {
  const cause: Issue = { ...ISSUE, issue_type: "NOT_TRAINING", layer: "a", layers: ["a"], step: 3 };
  const effect: Issue = {
    ...ISSUE,
    issue_type: "STAGNATION",
    layer: "a.w",
    layers: ["a.w"],
    explained_by: ["NOT_TRAINING", "a", 3],
  };
  const [group, ...others] = groupIssues([effect, cause]);
  assert.deepEqual([group?.head, group?.also, others.length], [cause, [effect], 0]);
  assert.deepEqual(
    groupIssues([effect]).map(({ head }) => head),
    [effect],
  );
  assert.equal(fixOf([effect, { ...cause, advice: "train it" }]), "train it");
  assert.equal(groupIssues([{ ...effect, severity: "CRITICAL" }, cause])[0]?.head.severity, "CRITICAL");
});

test("issues of one cause are one group, in the order of the worst", () => {
  const many = Array.from({ length: 300 }, (_, i): Issue => ({ ...ISSUE, layer: `l${i}`, layers: [`l${i}`] }));
  const groups = groupIssues([
    { ...ISSUE, issue_type: "EXPLODING" },
    ...many,
    { ...ISSUE, layer: "", layers: [""] },
    { ...ISSUE, cause: "elsewhere" },
  ]);
  assert.deepEqual(
    groups.map(({ head, rest }) => [head.issue_type, head.layer, rest.length]),
    [
      ["EXPLODING", "a", 0],
      ["DEAD", "l0", 299],
      ["DEAD", "", 0],
      ["DEAD", "a", 0],
    ],
  );
  assert.equal(groups[1]?.layers.length, 300);
});
