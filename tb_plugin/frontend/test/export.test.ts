import assert from "node:assert/strict";
import { test } from "node:test";
import { csv, fileName, seriesRows } from "../src/model/export";
import { MISSING_BITS } from "../src/schema";
import { seriesAt } from "./series";

test("csv quotes what has to be quoted, and no layer's name becomes a formula", () => {
  assert.equal(
    csv([
      ["a,b", 'say "x"', 1.5, null],
      ["=1+1", -2, NaN, Infinity],
    ]),
    '"a,b","say ""x""",1.5,\r\n\'=1+1,-2,NaN,Infinity\r\n',
  );
});

test("a series becomes one line per site and column, missing empty", () => {
  const floats = Float32Array.from([1, 0, NaN, 0.5]);
  const bits = new Uint32Array(floats.buffer);
  bits[1] = MISSING_BITS;
  const series = seriesAt([1, 2], { extreme: { values: floats, bits } }, { run: "r", metric: "m", sites: ["a", "b"] });
  assert.deepEqual(seriesRows(series), [
    ["site", "first_step", "last_step", "wall_time", "extreme"],
    ["a", 1, 1, 1, 1],
    ["a", 2, 2, 2, null],
    ["b", 1, 1, 1, NaN],
    ["b", 2, 2, 2, 0.5],
  ]);
});

test("file names hold nothing but letters, digits, dots and dashes", () => {
  assert.equal(fileName("../a b/<x>", "block.gain"), "..-a-b-x-_block.gain");
});
