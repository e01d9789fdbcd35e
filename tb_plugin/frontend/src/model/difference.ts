// One run against another: the same map of how much they differ.
import type { RunMetric } from "../api";
import { MISSING_BITS, NAN_BITS } from "../schema";
import { cellKind, columnAt, type Block, type Series } from "./series";

export interface Difference {
  readonly series: Series;
  readonly spec: RunMetric;
}

const ROBUST = 0.99;

/**
 * What a run is, measured by another: a ratio for a metric drawn on a log scale, else a difference. Columns are those of
 * the first run, sites those that both have; where either map shows nothing, nothing is shown. Null without a common site.
 */
export function difference(own: Series, other: Series, spec: RunMetric): Difference | null {
  const there = new Map(other.sites.map((site, i) => [site, i]));
  const sites = own.sites.filter((site) => there.has(site));
  const [left, right] = [firstBlock(own), firstBlock(other)];
  if (sites.length === 0 || left === undefined || right === undefined) return null;
  const ratio = spec.scale === "log";
  const values = new Float32Array(sites.length * own.columns);
  const bits = new Uint32Array(values.buffer);
  const partner = Int32Array.from(own.first, (first, c) => shownAt(other, first, own.last[c] ?? first));
  sites.forEach((site, row) => {
    const [from, to] = [own.sites.indexOf(site) * own.columns, (there.get(site) ?? 0) * other.columns];
    for (let c = 0; c < own.columns; c++) {
      const [a, b, at] = [from + c, to + (partner[c] ?? -1), row * own.columns + c];
      const apart = (partner[c] ?? -1) < 0 || kindAt(left, a) === "missing" || kindAt(right, b) === "missing";
      const value = ratio
        ? (left.values[a] ?? NaN) / (right.values[b] ?? NaN)
        : (left.values[a] ?? NaN) - (right.values[b] ?? NaN);
      if (apart) bits[at] = MISSING_BITS;
      else if (Number.isNaN(value)) bits[at] = NAN_BITS;
      else values[at] = value;
    }
  });
  const series: Series = { ...own, sites, blocks: new Map([["extreme", { values, bits }]]) };
  const range = ratio ? { low: 0, high: null, marks: [0.5, 2] } : linearRange(values);
  return {
    series,
    spec: {
      ...spec,
      ...range,
      title: `${spec.title}, ${ratio ? "ratio" : "difference"} of the two runs`,
      unit: ratio ? "1" : spec.unit,
      formula: `${ratio ? "own / other" : "own - other"} of ${spec.formula}`,
      compared: true,
    },
  };
}

/** How many layers of either run have none of the same name in the other, in words; empty where all have. */
export function alone(own: Series, other: Series | null, shared: number): string {
  const [here, there] = [own.sites.length - shared, (other?.sites.length ?? shared) - shared];
  if (here + there === 0) return "";
  return `, without a partner: ${here} of ${own.sites.length} layers here, ${there} of ${other?.sites.length ?? 0} there`;
}

function firstBlock(series: Series): Block | undefined {
  return series.blocks.values().next().value;
}

function kindAt(block: Block, at: number): string {
  return cellKind(block.bits[at] ?? MISSING_BITS);
}

/**
 * The column that a map of the series shows at first..last: a reading stands until the next one, and the last one as long
 * as the one before it did. -1 where the map is empty.
 */
function shownAt(series: Series, first: number, last: number): number {
  const column = columnAt(series.first, last);
  if (column < series.columns - 1) return column;
  const [begin, end, before] = [series.first[column] ?? 0, series.last[column] ?? 0, series.first[column - 1]];
  const stands = before === undefined ? series.width : Math.max(series.width, begin - before);
  return first < Math.max(end + 1, begin + stands) ? column : -1;
}

/** Ends that lie evenly around 0, robust against single outliers. */
function linearRange(values: Float32Array): { low: number; high: number; marks: readonly number[] } {
  const sizes = Array.from(values, Math.abs)
    .filter(Number.isFinite)
    .sort((a, b) => a - b);
  const high = sizes[Math.floor(ROBUST * (sizes.length - 1))] || sizes.at(-1) || 1;
  return { low: -high, high, marks: [-high / 2, high / 2] };
}
