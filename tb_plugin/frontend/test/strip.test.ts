import assert from "node:assert/strict";
import { test } from "node:test";
import { holdsAt, inOrder, layOut, neighbour } from "../src/model/strip";
import type { Issue } from "../src/model/verdict";

const ISSUE: Issue = {
  issue_type: "EXPLODING",
  severity: "HIGH",
  layer: "a",
  step: 10,
  value: 38,
  threshold: 2,
  message: "m",
  advice: "a",
  layers: ["a"],
  healed_step: null,
  seen: 90,
  state: "open",
  metrics: [],
};
const HEALED: Issue = { ...ISSUE, layer: "b", step: 20, healed_step: 40, state: "healed" };
const ENDED: Issue = { ...ISSUE, layer: "c", step: 60, seen: 70, state: "ended" };

test("a bar reaches from the first step to the healing, the last word, or the end", () => {
  const { bars, lanes, hidden } = layOut([ISSUE, HEALED, ENDED], 100, 1, 9);
  assert.deepEqual(
    bars.map(({ from, to, lane }) => [from, to, lane]),
    [
      [10, 100, 0],
      [20, 40, 1],
      [60, 70, 1],
    ],
  );
  assert.deepEqual([lanes, hidden], [2, 0]);
});

test("what finds no lane is counted, never dropped silently", () => {
  const { bars, hidden } = layOut([ISSUE, { ...ISSUE, layer: "x" }, { ...ISSUE, layer: "y" }], 100, 1, 2);
  assert.deepEqual([bars.length, hidden], [2, 1]);
});

test("the chosen issue has a bar, whatever has to give way", () => {
  const all = ["a", "x", "y", "z"].map((layer) => ({ ...ISSUE, layer }));
  for (const chosen of all) {
    const { bars, lanes, hidden } = layOut(all, 100, 1, 2, chosen);
    assert.ok(bars.some(({ issue }) => issue === chosen));
    assert.deepEqual([bars.length, lanes, hidden], [2, 2, 2]);
    assert.equal(new Set(bars.map(({ lane }) => lane)).size, 2);
  }
});

test("a short bar keeps room for its name", () => {
  const short: Issue = { ...HEALED, step: 10, healed_step: 11 };
  assert.equal(layOut([short, { ...HEALED, step: 15 }], 100, 20, 9).lanes, 2);
  assert.equal(layOut([short, { ...HEALED, step: 30 }], 100, 20, 9).lanes, 1);
});

test("the graver of two that begin together comes first", () => {
  const low: Issue = { ...ISSUE, severity: "LOW" };
  assert.deepEqual(inOrder([HEALED, low, ISSUE]), [ISSUE, low, HEALED]);
});

test("an issue holds from its step until it heals or was last seen", () => {
  assert.deepEqual(
    [9, 10, 999].map((step) => holdsAt(ISSUE, step)),
    [false, true, true],
  );
  assert.deepEqual(
    [39, 40].map((step) => holdsAt(HEALED, step)),
    [true, false],
  );
  assert.deepEqual(
    [70, 71].map((step) => holdsAt(ENDED, step)),
    [true, false],
  );
});

test("stepping goes from the chosen issue, or from the step when none is chosen", () => {
  const ordered = [ISSUE, HEALED, ENDED];
  assert.equal(neighbour(ordered, ISSUE, 10, 1), HEALED);
  assert.equal(neighbour(ordered, ISSUE, 10, -1), null);
  assert.equal(neighbour(ordered, null, 50, 1), ENDED);
  assert.equal(neighbour(ordered, null, 50, -1), HEALED);
  assert.equal(neighbour(ordered, null, 60, 1), null);
});
