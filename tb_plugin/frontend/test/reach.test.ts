import assert from "node:assert/strict";
import { test } from "node:test";
import { columnsOf, readAt, rowsOf, stepsRead, type Group, type Moment } from "../src/model/health";
import { columnsBetween, holdsUntil } from "../src/model/reach";
import type { RunMetric } from "../src/api";
import { seriesAt } from "./series";

/** The columns shown by each step from 0 to 300, null where nothing was read. */
function shown(steps: readonly number[]): (number | null)[] {
  const series = seriesAt(steps);
  return Array.from({ length: 300 }, (_, step) => {
    const [from, to] = columnsBetween(series, step, step + 1);
    return from > to || to < 0 ? null : to;
  });
}

test("a reading stands until the next one, and a pixel of many columns takes them all", () => {
  const series = seriesAt([2, 4, 8]);
  const spans = [
    [0, 1],
    [2, 3],
    [5, 6],
    [3, 9],
    [0, 20],
  ].map(([begin = 0, end = 0]) => columnsBetween(series, begin, end));
  assert.deepEqual(spans, [
    [0, -1],
    [0, 0],
    [1, 1],
    [0, 2],
    [0, 2],
  ]);
});

test("a reading that nothing followed for longer than usual is not painted on", () => {
  // Read at every step until step 4, and never again.
  const rare = shown([1, 2, 3, 4]);
  assert.deepEqual([rare[0], rare[4], rare[5], rare[6], rare[299]], [null, 3, 3, null, null]);
  // A pause amid regular readings is none of them.
  const pause = shown([10, 20, 30, 200, 210, 220]);
  assert.deepEqual([pause[29], pause[49], pause[50], pause[199], pause[200]], [1, 2, null, null, 3]);
  // What was read once holds at its step.
  assert.deepEqual([shown([7])[7], shown([7])[8]], [0, null]);
});

test("readings that become rarer, or denser, for good leave no hole", () => {
  for (const every of [1, 4, 32]) {
    for (const later of [1, 4, 32]) {
      const steps = [0, 1, 2, 3, 4].map((i) => 1 + i * every);
      const last = steps.at(-1) ?? 0;
      steps.push(...[1, 2, 3, 4].map((i) => last + i * later));
      const found = shown(steps).slice(1, (steps.at(-1) ?? 0) + later);
      assert.ok(!found.includes(null), `every ${every}, then every ${later}`);
    }
  }
});

test("whatever the schedule, every reading is seen, and none longer than twice the distances around it", () => {
  let state = 3;
  const next = (): number => (state = (state * 1664525 + 1013904223) % 4294967296) / 4294967296;
  for (let trial = 0; trial < 200; trial++) {
    const steps = [1];
    while (next() > 0.05) steps.push((steps.at(-1) ?? 0) + 1 + Math.floor(next() ** 4 * 60));
    const until = holdsUntil(seriesAt(steps));
    const places = shown(steps.filter((step) => step < 300));
    steps.forEach((step, i) => {
      if (step < 300) assert.equal(places[step], i);
      const around = [-2, -1, 1, 2].map((by) => (steps[i + by + 1] ?? NaN) - (steps[i + by] ?? NaN));
      const most = Math.max(1, ...around.filter(Number.isFinite).map((distance) => 2 * distance));
      assert.ok((until[i] ?? 0) - step <= most || steps.length === 2);
    });
  }
});

test("a table says when its numbers were read, and which columns were read at other steps", () => {
  const metric = (name: string): RunMetric =>
    ({ name, title: name, kind: "block", marks: [], unit: "1" }) as unknown as RunMetric;
  const held = ["block.gradient_norm", "block.gain", "parameter.update_ratio"].map(metric);
  const group: Group = { key: "block", label: "Blocks", kind: "block", metrics: held.slice(0, 2) };
  const moment: Moment = {
    step: 200,
    metrics: {
      "block.gradient_norm": { step: 176, sites: ["h.0"], values: [1] },
      "block.gain": { step: 176, sites: ["h.0"], values: [1] },
      "parameter.update_ratio": { step: 4, sites: ["h.0.weight"], values: [1] },
    },
  };
  const rows = rowsOf(group, moment, [], columnsOf(group, held));
  assert.equal(readAt(group, moment), 176);
  assert.deepEqual(
    ["gradient", "gain", "update", "none"].map((key) => stepsRead(key, rows, moment)),
    [[176], [176], [4], []],
  );
});
