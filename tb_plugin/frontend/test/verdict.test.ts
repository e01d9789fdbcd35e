import assert from "node:assert/strict";
import { test } from "node:test";
import { metricFor, verdict, where, type Issue } from "../src/model/verdict";

const ISSUE: Issue = {
  issue_type: "EXPLODING",
  severity: "CRITICAL",
  layer: "h.7",
  step: 1240,
  value: 38,
  threshold: 2,
  message: "m",
  advice: "a",
  layers: ["h.7"],
  healed_step: null,
  seen: 1240,
  state: "open",
  metrics: [],
};

test("without an open problem the verdict is healthy and says as of which step", () => {
  assert.equal(verdict([], 10).headline, "Healthy");
  assert.match(
    verdict([{ ...ISSUE, state: "healed", healed_step: 9 }], 10).detail,
    /step 10\. 1 earlier problem has healed/,
  );
  const healed: Issue = { ...ISSUE, state: "healed", healed_step: 9 };
  const other: Issue = { ...healed, layer: "h.8", explained_by: ["EXPLODING", "h.7", 1240] };
  assert.match(verdict([healed, other], 10).detail, /1 earlier problem has healed/);
});

test("what was lost stands in the headline, and is no good news", () => {
  const healthy = verdict([], 10, 1200);
  assert.equal(healthy.headline, "Healthy in the recorded steps, 1\u202f200 steps lost");
  assert.equal(healthy.tone, "warn");
  assert.equal(verdict([ISSUE], 10, 1).headline, "1 problem, 1 step lost");
});

test("a run without steps is not called healthy", () => {
  assert.equal(verdict([], null).tone, "none");
});

test("the worst is named first with its layer and its step", () => {
  const said = verdict([ISSUE, { ...ISSUE, layer: "", layers: [""], severity: "LOW" }], 2000);
  assert.equal(said.headline, "2 problems");
  assert.match(said.detail, /^EXPLODING in h\.7 since step 1\u202f240 .* in whole model/);
  assert.equal(said.tone, "bad");
});

test("notes are no problems, and mild problems are a warning", () => {
  assert.equal(verdict([{ ...ISSUE, severity: "INFO" }], 5).tone, "good");
  assert.equal(verdict([{ ...ISSUE, severity: "LOW" }], 5).tone, "warn");
});

test("several layers are counted, not listed", () => {
  assert.equal(where({ ...ISSUE, layers: ["h.7", "h.8", "h.9"] }), "h.7 (+2 more)");
});

test("an issue is shown by the metric that proves it, if the run holds it", () => {
  const dead: Issue = { ...ISSUE, issue_type: "DEAD" };
  assert.equal(metricFor(dead, ["activation.dead_share", "block.gain"], "block.gain"), "activation.dead_share");
  assert.equal(metricFor(dead, ["block.gain"], "block.gain"), "block.gain");
});

test("a run that was not closed is healthy only as far as it was recorded, and one without steps says why", () => {
  assert.equal(verdict([], 123, 0, 0, "running").headline, "Healthy");
  assert.deepEqual(verdict([], 123, 0, 0, "silent"), {
    tone: "warn",
    headline: "Healthy in the recorded steps",
    detail: "No open problem at step 123; not closed: steps after 123 are unknown.",
    fix: "",
  });
  assert.match(verdict([ISSUE], 123, 0, 1, "silent").detail, /not closed: steps after 123 are unknown$/);
  const [running, closed, silent] = (["running", "closed", "silent"] as const).map((state) =>
    verdict([], null, 0, 0, state),
  );
  assert.equal(running?.headline, "No steps yet");
  assert.deepEqual(
    [closed?.headline, closed?.detail],
    ["No step was recorded", "The run was closed before its first step."],
  );
  assert.match(silent?.detail ?? "", /was not closed/);
});
