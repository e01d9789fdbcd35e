import assert from "node:assert/strict";
import { test } from "node:test";
import { fixOf, metricFor, sentence, since, where, type Issue } from "../src/model/verdict";

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

test("the fix is that of the worst problem; a healed one and a note need none", () => {
  assert.equal(fixOf([]), "");
  assert.equal(fixOf([{ ...ISSUE, state: "healed", healed_step: 9 }]), "");
  assert.equal(fixOf([{ ...ISSUE, severity: "INFO" }]), "");
  assert.equal(fixOf([{ ...ISSUE, severity: "INFO", advice: "n" }, ISSUE]), "a");
  assert.equal(fixOf([{ ...ISSUE, state: "ended" }]), "a");
});

test("the words of the report begin with a capital letter", () => {
  assert.deepEqual(["healthy", "1 problem", ""].map(sentence), ["Healthy", "1 problem", ""]);
});

test("what was not read before the first step is said", () => {
  assert.equal(since(ISSUE), "since step 1 240");
  assert.equal(since({ ...ISSUE, before: 1 }), "since step 1 240, or up to 1 step before");
  assert.equal(since({ ...ISSUE, before: 22 }), "since step 1 240, or up to 22 steps before");
});

test("several layers are counted, not listed", () => {
  assert.equal(where({ ...ISSUE, layers: ["h.7", "h.8", "h.9"] }), "h.7 (+2 more)");
});

test("an issue is shown by the metric that proves it, if the run holds it", () => {
  const dead: Issue = { ...ISSUE, issue_type: "DEAD" };
  assert.equal(metricFor(dead, ["activation.dead_share", "block.gain"], "block.gain"), "activation.dead_share");
  assert.equal(metricFor(dead, ["block.gain"], "block.gain"), "block.gain");
});
