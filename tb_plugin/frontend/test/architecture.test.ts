import assert from "node:assert/strict";
import { test } from "node:test";
import { inModelOrder, partsOf, placesIn, placesOf, saidOf, type Module } from "../src/model/architecture";
import { against, axesOf, type Multiple } from "../src/model/multiples";
import { arrangeRuns, columnsOf, type OverviewRun } from "../src/model/overview";

function moduleOf(name: string, parent: number | null, order: number | null, line = 1): Module {
  return {
    name,
    kind: "K",
    parent,
    order,
    calls: 1,
    parameters: 0,
    trainable: 0,
    file: "net.py",
    line,
    block: false,
    shared: null,
  };
}

test("parts stand in the order of their calls; a list that is never called stands where its first layer does", () => {
  const modules = [
    moduleOf("", null, 3),
    moduleOf("head", 0, 2),
    moduleOf("blocks", 0, null),
    moduleOf("blocks.1", 2, 1),
    moduleOf("blocks.0", 2, 0),
    moduleOf("unused", 0, null),
  ];
  const [root] = partsOf(modules);
  assert.deepEqual(
    root?.inner.map(({ label, called }) => [label, called]),
    [
      ["blocks", true],
      ["head", true],
      ["unused", false],
    ],
  );
  assert.deepEqual(
    root?.inner[0]?.inner.map(({ label }) => label),
    ["0", "1"],
  );
});

test("a parameter is called and defined where its module is", () => {
  const head = { ...moduleOf("head", 0, 1, 7), call_file: "train.py", call_line: 40 };
  const modules = [moduleOf("", null, 0), head];
  assert.deepEqual(saidOf(placesIn(modules, "head.weight")), ["called at train.py:40", "class at net.py:7"]);
  assert.deepEqual(saidOf(placesIn(modules, "tail")), []);
  const library = { ...moduleOf("", null, 0), file: "/home/me/.venv/lib/site-packages/torch/nn/linear.py", line: 53 };
  assert.deepEqual(placesOf(library), { called: "", defined: "torch/nn/linear.py:53" });
});

function run(name: string, last: number, more: Partial<OverviewRun> = {}): OverviewRun {
  return {
    run: name,
    version: "",
    first: 1,
    last: 10,
    started: 0,
    updated: 0,
    too_new: 0,
    issues: { open: 0, healed: 0, ended: 0 },
    verdict: null,
    said: { tone: "good", headline: "healthy", detail: "no open problem in 10 records" },
    loss: { first: 2, last },
    trend: [],
    hyperparameters: {},
    ...more,
  };
}

test("runs sort by any column, those without a value last; words filter over name, verdict and hyperparameters", () => {
  const sick = run("b10", 3, {
    verdict: { issue_type: "DEAD", severity: "HIGH", layer: "x", step: 1 },
    hyperparameters: { lr: 0.1 },
  });
  const runs = [run("b9", 1, { hyperparameters: { lr: 0.2 } }), sick, run("a", NaN, { loss: null })];
  const names = (key: string, falling: boolean, filter = ""): string[] =>
    arrangeRuns(runs, key, falling, filter).map((item) => item.run);
  assert.deepEqual(names("run", false), ["a", "b9", "b10"]);
  assert.deepEqual(names("last", true), ["b10", "b9", "a"]);
  assert.deepEqual(names("verdict", true)[0], "b10");
  const stuck = run("c", 2, { said: { tone: "warn", headline: "the loss hardly fell", detail: "" } });
  const ordered = arrangeRuns([run("a", 1), stuck, sick], "verdict", true, "").map((item) => item.run);
  assert.deepEqual(ordered, ["b10", "c", "a"]);
  assert.deepEqual(arrangeRuns([run("a", 1), stuck], "run", false, "hardly"), [stuck]);
  assert.deepEqual([names("run", false, "dead lr=0.1"), names("run", false, "healthy lr")], [["b10"], ["b9"]]);
});

test("only hyperparameters that tell runs apart are columns", () => {
  const runs = [
    run("a", 1, { hyperparameters: { lr: 0.1, seed: 1 } }),
    run("b", 1, { hyperparameters: { lr: 0.2, seed: 1 } }),
  ];
  assert.deepEqual(
    columnsOf(runs)
      .filter(({ key }) => key.startsWith("hp:"))
      .map(({ title, numeric }) => [title, numeric]),
    [["lr", true]],
  );
});

test("a run is measured by another at the same steps, and all share axes", () => {
  const own: Multiple = { run: "a", steps: [1, 2, 3], values: [4, null, 8] };
  const other: Multiple = { run: "b", steps: [1, 3], values: [2, 2] };
  assert.deepEqual(against(own, other, false).values, [2, null, 6]);
  assert.deepEqual(against(own, other, true).values, [2, null, 4]);
  assert.deepEqual(axesOf([own, other], false), { steps: [1, 3], low: 2, high: 8 });
});

test("parameters stand in the order of the model, what is not in it last and as it came", () => {
  const modules = ["", "emb", "blocks", "blocks.2", "blocks.10", "head"].map((name) => moduleOf(name, null, null));
  const names = ["z", "blocks.10.weight", "blocks.2.weight", "a", "emb.weight", "head"];
  const ordered = ["emb.weight", "blocks.2.weight", "blocks.10.weight", "head", "z", "a"];
  assert.deepEqual(inModelOrder(modules, names, String), ordered);
  assert.deepEqual(inModelOrder([], names, String), names);
});
