import assert from "node:assert/strict";
import { test } from "node:test";
import { cellKind, columnAt, decodeSeries, finiteRow } from "../src/model/series";
import { MISSING_BITS, NAN_BITS } from "../src/schema";

/** Builds the bytes that the server sends for two sites and three columns. */
export function packet(bits: readonly number[], v = 1): ArrayBuffer {
  const header = {
    v,
    run: "r",
    metric: "block.gain",
    sites: ["a", "b"],
    columns: 3,
    width: 2,
    most: 2,
    reducers: ["extreme"],
  };
  let text = JSON.stringify(header);
  while ((8 + text.length) % 8 !== 0) text += " ";
  const buffer = new ArrayBuffer(8 + text.length + 4 * 3 * 8 + 4 * bits.length);
  const view = new DataView(buffer);
  new Uint8Array(buffer).set(new TextEncoder().encode("GFS1"));
  view.setUint32(4, text.length, true);
  new Uint8Array(buffer).set(new TextEncoder().encode(text), 8);
  const at = 8 + text.length;
  [1, 2, 4, 1, 3, 5, 10, 11, 12, 1, 2, 2].forEach((n, i) => view.setFloat64(at + 8 * i, n, true));
  bits.forEach((word, i) => view.setUint32(at + 96 + 4 * i, word, true));
  return buffer;
}

const ONE = 0x3f800000;
const CELLS = [ONE, MISSING_BITS, NAN_BITS, 0x7f800000, 0xff800000, 0];

test("a packet decodes to steps, times and values site by site", () => {
  const series = decodeSeries(packet(CELLS));
  assert.deepEqual([...series.first], [1, 2, 4]);
  assert.deepEqual([...series.last], [1, 3, 5]);
  assert.deepEqual([...series.wall], [10, 11, 12]);
  assert.equal(series.blocks.get("extreme")?.values[0], 1);
});

test("missing, NaN, both infinities and zero are told apart", () => {
  assert.deepEqual(CELLS.map(cellKind), ["value", "missing", "nan", "inf", "inf", "value"]);
});

test("what is not a series is refused", () => {
  assert.throws(() => decodeSeries(new ArrayBuffer(4)), /not a GradFlow series/);
  assert.throws(() => decodeSeries(packet(CELLS, 99)), /newer format/);
});

test("a step belongs to the last column that begins at or before it", () => {
  const first = Float64Array.from([1, 2, 4]);
  assert.deepEqual(
    [0, 1, 2, 3, 4, 9].map((step) => columnAt(first, step)),
    [-1, 0, 1, 1, 2, 2],
  );
});

test("a line has gaps where no finite number stands, and on a log axis where none is positive", () => {
  const series = decodeSeries(packet(CELLS));
  const block = series.blocks.get("extreme");
  assert.ok(block);
  assert.deepEqual(finiteRow(series, block, 0, false), [1, null, null]);
  assert.deepEqual(finiteRow(series, block, 1, false), [null, null, 0]);
  assert.deepEqual(finiteRow(series, block, 1, true), [null, null, null]);
});
