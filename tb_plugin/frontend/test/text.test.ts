import assert from "node:assert/strict";
import { test } from "node:test";
import {
  formatCount,
  formatDuration,
  formatNumber,
  formatStep,
  linearTicks,
  shorten,
  unitText,
} from "../src/model/format";
import { parseHash, toStorage } from "../src/model/url";

test("numbers keep six digits, small and large ones an exponent, and all four kinds have a name", () => {
  assert.deepEqual(
    [0.125, 38.2, 1234567, 1e-9, 0].map((n) => formatNumber(n)),
    ["0.125", "38.2", "1.235e6", "1e\u22129", "0"],
  );
  assert.deepEqual(
    [NaN, Infinity, -Infinity, -0.5].map((n) => formatNumber(n)),
    ["NaN", "\u221e", "\u2212\u221e", "\u22120.5"],
  );
});

test("steps, counts and durations are grouped for reading", () => {
  assert.equal(formatStep(1234567), "1\u202f234\u202f567");
  assert.equal(formatCount(124_439_808), "124\u202fM");
  assert.deepEqual([5, 960, 7260, 90000].map(formatDuration), [
    "5\u202fs",
    "16\u202fmin",
    "2\u202fh 1\u202fmin",
    "1\u202fd 1\u202fh",
  ]);
});

test("a long name keeps both ends and never splits a character", () => {
  assert.equal(shorten("transformer.h.10.attn.weight", 12), "tran\u2026.weight".slice(0, 4) + "\u2026.weight");
  assert.equal(shorten("\u{1F525}".repeat(9), 5), `\u{1F525}\u2026${"\u{1F525}".repeat(3)}`);
  assert.equal(shorten("short", 12), "short");
});

test("a unit follows a number only where it is one that people say", () => {
  assert.deepEqual((["s", "share", "1", "gradient"] as const).map(unitText), ["s", "share", "", ""]);
});

test("ticks are round and lie inside", () => {
  assert.deepEqual(linearTicks(1, 2401, 5), [500, 1000, 1500, 2000]);
  assert.deepEqual(linearTicks(0, 1, 4), [0, 0.5, 1]);
  assert.deepEqual(linearTicks(3, 3, 4), [3]);
});

test("what is stored in the address comes back, hostile names included", () => {
  const state = {
    run: "a b&c=#",
    zoom: [3, 90] as const,
    other: "d&e",
    mode: "difference" as const,
    metric: "block.gain",
    step: 12,
    pins: ['<img src="x">', "n,m&p=1", ""],
    reduce: "min" as const,
    phase: "eval & test",
    axis: "wall" as const,
    smooth: 0.6,
    charts: ["loss", "a.b"],
    log: { loss: true },
  };
  const hash = toStorage(state)
    .map(([key, value]) => `${key}=${encodeURIComponent(value)}`)
    .join("&");
  assert.deepEqual(parseHash(`#gradflow&${hash}`), state);
});

test("no chart at all is a choice that the address keeps, the usual charts are none", () => {
  const stored = (state: object): string => new Map(toStorage(state)).get("p.gradflow.charts") ?? "?";
  assert.equal(stored({}), "");
  assert.equal(stored({ charts: [] }), "[]");
  assert.deepEqual(parseHash("#p.gradflow.charts=%5B%5D"), { charts: [] });
});

test("an address of somebody else, or a broken one, is no state", () => {
  assert.deepEqual(parseHash("#scalars&runs=a"), {});
  assert.deepEqual(
    parseHash("#gradflow&p.gradflow.step=x&p.gradflow.zoom=9-3&p.gradflow.pins=%7B&p.gradflow.run=%E0%A4%A"),
    { run: "%E0%A4%A" },
  );
  assert.deepEqual(
    parseHash(
      "#p.gradflow.axis=x&p.gradflow.smooth=2&p.gradflow.log=%5B1%5D&p.gradflow.reduce=none&p.gradflow.charts=%5B1%5D",
    ),
    {},
  );
});
