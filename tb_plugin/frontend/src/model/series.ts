// The binary answer of /series; tb_plugin/http_api.md describes it.
import { FORMAT, MISSING_BITS } from "../schema";

export type CellKind = "value" | "missing" | "nan" | "inf";

/** One reduction of a series. Site after site: the value of site s in column c lies at s * columns + c. */
export interface Block {
  readonly values: Float32Array;
  readonly bits: Uint32Array;
}

export interface Series {
  readonly run: string;
  readonly metric: string;
  readonly sites: readonly string[];
  readonly columns: number;
  /** Steps per column. */
  readonly width: number;
  /** Greatest number of readings in one column. */
  readonly most: number;
  readonly first: Float64Array;
  readonly last: Float64Array;
  readonly wall: Float64Array;
  readonly blocks: ReadonlyMap<string, Block>;
}

interface Header {
  readonly v: number;
  readonly run: string;
  readonly metric: string;
  readonly sites: readonly string[];
  readonly columns: number;
  readonly width: number;
  readonly most: number;
  readonly reducers: readonly string[];
}

const MAGIC = 0x31534647;
const PREAMBLE = 8;

export function decodeSeries(buffer: ArrayBuffer): Series {
  const view = new DataView(buffer);
  if (buffer.byteLength < PREAMBLE || view.getUint32(0, true) !== MAGIC) throw new Error("not a GradFlow series");
  const length = view.getUint32(4, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, PREAMBLE, length))) as Header;
  if (header.v > FORMAT) throw new Error("this series has a newer format; reload the page");
  let offset = PREAMBLE + length;
  const doubles = (): Float64Array => {
    const out = new Float64Array(buffer, offset, header.columns);
    offset += out.byteLength;
    return out;
  };
  const [first, last, wall] = [doubles(), doubles(), doubles()];
  doubles();
  const blocks = new Map<string, Block>();
  const cells = header.columns * header.sites.length;
  for (const reducer of header.reducers) {
    blocks.set(reducer, {
      values: new Float32Array(buffer, offset, cells),
      bits: new Uint32Array(buffer, offset, cells),
    });
    offset += 4 * cells;
  }
  const { run, metric, sites, columns, width, most } = header;
  return { run, metric, sites, columns, width, most, first, last, wall, blocks };
}

/** Tells the four states apart; by bits, because a browser may change the payload of a NaN it has read as a number. */
export function cellKind(bits: number): CellKind {
  if ((bits & 0x7f800000) !== 0x7f800000) return "value";
  if (bits === MISSING_BITS) return "missing";
  return (bits & 0x7fffff) === 0 ? "inf" : "nan";
}

/** The last column that begins at or before a step, -1 when there is none. */
export function columnAt(first: Float64Array, step: number): number {
  let low = 0;
  let high = first.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if ((first[middle] ?? Infinity) <= step) low = middle + 1;
    else high = middle;
  }
  return low - 1;
}

/** One site's values in one reduction, with null where there is no finite number to draw. */
export function finiteRow(series: Series, block: Block, site: number, positive: boolean): (number | null)[] {
  const out: (number | null)[] = [];
  for (let c = 0; c < series.columns; c++) {
    const value = block.values[site * series.columns + c] ?? NaN;
    out.push(Number.isFinite(value) && (!positive || value > 0) ? value : null);
  }
  return out;
}

/** A series with some of its reductions and sites; all sites where none is named. */
export function pick(series: Series, reducers: readonly string[], sites: readonly string[]): Series {
  const rows = sites.map((site) => series.sites.indexOf(site));
  const blocks = new Map<string, Block>();
  for (const reducer of reducers) {
    const block = series.blocks.get(reducer);
    if (block !== undefined) blocks.set(reducer, sites.length === 0 ? block : chosenRows(block, rows, series.columns));
  }
  return { ...series, blocks, sites: sites.length === 0 ? series.sites : sites };
}

function chosenRows(block: Block, rows: readonly number[], columns: number): Block {
  const bits = new Uint32Array(rows.length * columns).fill(MISSING_BITS);
  rows.forEach((row, i) => {
    if (row >= 0) bits.set(block.bits.subarray(row * columns, (row + 1) * columns), i * columns);
  });
  return { bits, values: new Float32Array(bits.buffer) };
}

/** How much memory a series takes. */
export function bytesOf(series: Series): number {
  let bytes = 3 * series.first.byteLength;
  for (const { values } of series.blocks.values()) bytes += values.byteLength;
  return bytes;
}
