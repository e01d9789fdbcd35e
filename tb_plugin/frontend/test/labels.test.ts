import assert from "node:assert/strict";
import { test } from "node:test";
import { nameRuns, runLabel } from "../src/model/labels";
import { columnsOf, rowsOf, type Group, type Moment } from "../src/model/health";
import type { RunMetric, RunSummary } from "../src/api";
import type { Issue } from "../src/model/verdict";

function run(name: string, more: Partial<RunSummary> = {}): RunSummary {
  return { run: name, version: "1", first: 1, last: 9, started: 1_732_143_600, updated: 0, too_new: 0, ...more };
}

test("runs of one folder are called by what tells them apart: model, size, else when they began", () => {
  nameRuns([
    run("gan", { model: "Generator", parameters: 288 }),
    run("gan [1-0]", { model: "Discriminator", parameters: 288 }),
    run("sizes/.", { model: "Net", parameters: 288 }),
    run("sizes/. [1-0]", { model: "Net", parameters: 361 }),
    run("again", { model: "Net", parameters: 288 }),
    run("again [1-0]", { model: "Net", parameters: 288, started: 1_732_143_700 }),
    run("alone [1-0]", { model: "Net" }),
  ]);
  assert.deepEqual(["gan", "gan [1-0]"].map(runLabel), ["gan: Generator", "gan: Discriminator"]);
  assert.deepEqual(["sizes/.", "sizes/. [1-0]"].map(runLabel), ["sizes: 288 parameters", "sizes: 361 parameters"]);
  const [first, second] = ["again", "again [1-0]"].map(runLabel);
  assert.match(first ?? "", /^again: began /);
  assert.notEqual(first, second);
  assert.deepEqual(["alone [1-0]", ".", "other"].map(runLabel), ["alone", "(root)", "other"]);
});

test("an accused layer is among the rows that a table opens on, at its place, with what was read of it", () => {
  const held = ["block.gradient_norm", "activation.dead_share"].map(
    (name) => ({ name, title: name, kind: "block", marks: [], unit: "1" }) as unknown as RunMetric,
  );
  const group: Group = { key: "block", label: "Blocks", kind: "block", metrics: held.slice(0, 1) };
  const moment: Moment = {
    step: 9,
    metrics: {
      "block.gradient_norm": { step: 9, sites: ["0", "3", "4"], values: [1, 1, 1] },
      "activation.dead_share": { step: 9, sites: ["3.1"], values: [1] },
    },
  };
  const accused = (layers: readonly string[], severity = "HIGH"): Issue =>
    ({
      issue_type: "DEAD",
      severity,
      layers,
      layer: layers[0],
      step: 5,
      seen: 9,
      healed_step: null,
      state: "open",
    }) as unknown as Issue;
  const names = (issues: readonly Issue[]): readonly string[] =>
    rowsOf(group, moment, issues, columnsOf(group, held)).map(({ site }) => site);
  assert.deepEqual(names([]), ["0", "3", "4"]);
  assert.deepEqual(names([accused(["3.1"])]), ["0", "3", "3.1", "4"]);
  assert.deepEqual(names([accused(["3.1.weight", "4", "head", ""])]), ["head", "0", "3", "3.1.weight", "4"]);
  assert.deepEqual(names([accused(["3.1"], "INFO")]), ["0", "3", "4"]);
  const chosen = rowsOf(group, moment, [accused(["3.1"])], columnsOf(group, held), false);
  assert.deepEqual(
    chosen.map(({ site }) => site),
    ["0", "3", "4"],
  );
  const row = rowsOf(group, moment, [accused(["3.1"])], columnsOf(group, held)).find(({ site }) => site === "3.1");
  assert.equal(row?.issue?.issue_type, "DEAD");
  assert.equal(row?.cells["dead"]?.value, 1);
});
