import assert from "node:assert/strict";
import { test } from "node:test";
import {
  arrange,
  columnsOf,
  groupsOf,
  momentFrom,
  rowsOf,
  sparkline,
  verdictOf,
  wantedMetrics,
  type Group,
  type Moment,
} from "../src/model/health";
import type { Issue } from "../src/model/verdict";
import type { Series } from "../src/model/series";
import type { RunMetric } from "../src/api";

const ISSUE: Issue = {
  issue_type: "DEAD",
  severity: "HIGH",
  layer: "h.1.act",
  step: 5,
  value: 1,
  threshold: 0.9,
  message: "m",
  advice: "a",
  layers: ["h.1.act"],
  healed_step: null,
  seen: 9,
  state: "open",
  metrics: [],
};
const MOMENT: Moment = {
  step: 7,
  metrics: {
    "block.gain": { step: 7, sites: ["h.0", "h.1", "h.10"], values: [1, "NaN", null] },
    "block.gradient_norm": { step: 7, sites: ["h.0", "h.1", "h.10"], values: [0.5, 0, 3] },
    "activation.dead_share": { step: 5, sites: ["h.1.act"], values: [0.94] },
    "parameter.update_ratio": { step: 7, sites: ["h.0.w", "h.0.b", "h.10.w"], values: [0.001, 0.002, "Infinity"] },
  },
};
const metric = (name: string, kind: string, marks: readonly number[] = []): RunMetric =>
  ({ name, kind, marks, title: name, unit: "1" }) as unknown as RunMetric;
const HELD = [
  metric("block.gain", "block"),
  metric("block.gradient_norm", "block"),
  metric("activation.dead_share", "module"),
  metric("parameter.update_ratio", "parameter"),
];
const [BLOCKS] = groupsOf(HELD) as [Group];
const COLUMNS = columnsOf(BLOCKS, HELD);
// The accused layer has a row beside those of the blocks.
const ROWS = rowsOf(BLOCKS, MOMENT, [ISSUE], COLUMNS).filter(({ site }) => site !== ISSUE.layer);

test("a row shows what was written, missing apart from zero and from NaN", () => {
  assert.deepEqual(
    ROWS.map(({ cells }) => cells.gain?.value),
    [1, NaN, undefined],
  );
  assert.deepEqual(
    ROWS.map(({ cells }) => cells.gradient?.value),
    [0.5, 0, 3],
  );
});

test("a block shows the greatest of what lies inside, and says of how many", () => {
  const update = ROWS[0]?.cells.update;
  assert.deepEqual([update?.value, update?.site, update?.among], [0.002, "h.0.b", 2]);
  assert.deepEqual([ROWS[1]?.cells.update, ROWS[2]?.cells.update?.value], [null, Infinity]);
});

test("h.1 does not contain h.10", () => {
  assert.equal(ROWS[1]?.cells.dead?.value, 0.94);
  assert.equal(ROWS[2]?.cells.dead, null);
});

test("the verdict is that of the step shown, and of the layers inside", () => {
  assert.deepEqual(
    ROWS.map(({ issue }) => issue?.issue_type),
    [undefined, "DEAD", undefined],
  );
  assert.equal(rowsOf(BLOCKS, { ...MOMENT, step: 4 }, [ISSUE], COLUMNS)[1]?.issue, null);
});

test("rows sort by any column; what is missing comes last either way", () => {
  const names = (falling: boolean): string[] => arrange(ROWS, "gain", falling, "").map(({ site }) => site);
  assert.deepEqual(names(true), ["h.1", "h.0", "h.10"]);
  assert.deepEqual(names(false), ["h.0", "h.1", "h.10"]);
  assert.equal(arrange(ROWS, "verdict", true, "")[0]?.site, "h.1");
});

test("the filter looks at names and verdicts", () => {
  assert.deepEqual(
    arrange(ROWS, "site", false, " H.1 ").map(({ site }) => site),
    ["h.1", "h.10"],
  );
  assert.deepEqual(
    arrange(ROWS, "site", false, "dead").map(({ site }) => site),
    ["h.1"],
  );
  assert.deepEqual(arrange(ROWS, "site", false, "nothing"), []);
});

test("only metrics that the run holds are asked for", () => {
  const held = [metric("block.gain", "block"), metric("loss", "run")];
  assert.deepEqual(wantedMetrics(groupsOf(held)[0] as Group, held), ["block.gain"]);
});

test("layers that nobody foresaw have rows and columns of their own, thresholds first", () => {
  const held = [
    ...HELD,
    metric("new.a", "head"),
    metric("new.b", "head", [0.5]),
    metric("loss", "run"),
    metric("new.c", "module"),
  ];
  const groups = groupsOf(held);
  assert.deepEqual(
    groups.map(({ key }) => key),
    ["block", "parameter", "module/activation", "module/new", "head/new"],
  );
  assert.deepEqual(groups.map(({ label }) => label).slice(-2), ["Modules: new", "Attention heads: new"]);
  const [last, before] = [groups.at(-1) as Group, groups.at(-2) as Group];
  assert.deepEqual(
    columnsOf(last, held).map(({ key }) => key),
    ["new.b", "new.a"],
  );
  assert.deepEqual(
    columnsOf(before, held).map(({ key }) => key),
    ["gradient", "gain", "update", "dead", "new.c"],
  );
  assert.deepEqual(
    columnsOf(BLOCKS, held).map(({ key }) => key),
    ["gradient", "gain", "update", "dead"],
  );
});

test("a group shows every site that one of its metrics was read at", () => {
  const held = [metric("new.a", "head"), metric("new.b", "head")];
  const read = (sites: readonly string[]): Moment["metrics"][string] => ({
    step: 1,
    sites,
    values: sites.map(() => 1),
  });
  const moment: Moment = { step: 1, metrics: { "new.a": read(["x"]), "new.b": read(["x", "y"]) } };
  const group = groupsOf(held)[0] as Group;
  assert.deepEqual(
    rowsOf(group, moment, [], columnsOf(group, held)).map(({ site }) => site),
    ["x", "y"],
  );
});

test("a trend leaves gaps where there is no number, and is flat for a constant", () => {
  assert.deepEqual(sparkline([1, NaN, 1], false, 10, 8), [[0, 4], null, [10, 4]]);
  assert.deepEqual(sparkline([0, 1, 100], true, 10, 10), [null, [5, 9], [10, 1]]);
  assert.deepEqual(sparkline([], false, 10, 10), []);
});

test("without a server the kept columns answer, and say how many steps they stand for", () => {
  const floats = Float32Array.from([1, NaN, -Infinity, 4]);
  const first = Float64Array.from([10, 20]);
  const series: Series = {
    run: "r",
    metric: "block.gain",
    sites: ["a", "b"],
    columns: 2,
    width: 10,
    most: 9,
    first,
    last: first,
    wall: first,
    blocks: new Map([["extreme", { values: floats, bits: new Uint32Array(floats.buffer) }]]),
  };
  assert.deepEqual(momentFrom([series], 15), {
    step: 15,
    coarse: 10,
    metrics: { "block.gain": { step: 10, sites: ["a", "b"], values: [1, "-Infinity"] } },
  });
  assert.deepEqual(momentFrom([series], 5).metrics["block.gain"]?.values, [null, null]);
  assert.deepEqual(momentFrom([series], 20).metrics["block.gain"]?.values, ["NaN", 4]);
});

test("ok stands only where the numbers are fine: within their thresholds, and where enough of the gradient arrives", () => {
  const metrics = {
    "block.gradient_norm": { step: 7, sites: ["h.0", "h.1", "h.2"], values: [1e-6, 0.9, 1] },
    "block.gain": { step: 7, sites: ["h.0", "h.1", "h.2"], values: [1, 0.2, 1] },
  };
  const judged = (issues: readonly Issue[]): readonly string[] =>
    rowsOf(BLOCKS, { step: 7, metrics }, issues, columnsOf(BLOCKS, HELD)).map(verdictOf);
  assert.deepEqual(judged([]), ["ok", "outside", "ok"]);
  const fading: Issue = { ...ISSUE, issue_type: "VANISHING", layer: "", layers: [""], value: 1e-6, threshold: 1e-4 };
  assert.deepEqual(judged([fading]), ["outside", "outside", "ok"]);
  // While it holds for one layer, another at which less arrives is not called fine.
  metrics["block.gradient_norm"].values = [0.5, 0.9, 1];
  assert.deepEqual(judged([fading]), ["ok", "outside", "ok"]);
  assert.deepEqual(judged([{ ...fading, layers: ["h.1"] }]), ["outside", "VANISHING", "ok"]);
  assert.deepEqual(
    rowsOf(BLOCKS, { step: 7, metrics: { "block.gradient_norm": metrics["block.gradient_norm"] } }, [], []).map(
      verdictOf,
    ),
    ["no issue", "no issue", "no issue"],
  );
});

test("a row whose number is NaN or infinite is not ok, whatever its other numbers are", () => {
  for (const broken of ["NaN", "Infinity", "-Infinity"] as const) {
    const metrics = {
      "block.gradient_norm": { step: 7, sites: ["h.0"], values: [broken] },
      "block.gain": { step: 7, sites: ["h.0"], values: [1] },
    };
    const rows = rowsOf(BLOCKS, { step: 7, metrics }, [], columnsOf(BLOCKS, HELD));
    assert.deepEqual([rows.map(verdictOf), rows[0]?.off], [["outside"], "gradient"]);
  }
});
