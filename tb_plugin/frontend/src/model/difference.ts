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
 * the first run, sites those that both have; where either has no reading, nothing is shown. Null without a common site.
 */
export function difference(own: Series, other: Series, spec: RunMetric): Difference | null {
  const there = new Map(other.sites.map((site, i) => [site, i]));
  const sites = own.sites.filter((site) => there.has(site));
  const [left, right] = [firstBlock(own), firstBlock(other)];
  if (sites.length === 0 || left === undefined || right === undefined) return null;
  const ratio = spec.scale === "log";
  const values = new Float32Array(sites.length * own.columns);
  const bits = new Uint32Array(values.buffer);
  const partner = Int32Array.from(own.first, (first, c) => overlapping(other, first, own.last[c] ?? first));
  sites.forEach((site, row) => {
    const [from, to] = [own.sites.indexOf(site) * own.columns, (there.get(site) ?? 0) * other.columns];
    for (let c = 0; c < own.columns; c++) {
      const [a, b, at] = [from + c, to + (partner[c] ?? -1), row * own.columns + c];
      const apart = (partner[c] ?? -1) < 0 || kindAt(left, a) === "missing" || kindAt(right, b) === "missing";
      const value = ratio ? (left.values[a] ?? NaN) / (right.values[b] ?? NaN) : (left.values[a] ?? NaN) - (right.values[b] ?? NaN);
      if (apart) bits[at] = MISSING_BITS;
      else if (Number.isNaN(value)) bits[at] = NAN_BITS;
      else values[at] = value;
    }
  });
  const series: Series = { ...own, sites, blocks: new Map([["extreme", { values, bits }]]) };
  const range = ratio ? { low: 0, high: null, marks: [0.5, 2] } : linearRange(values);
  return { series, spec: { ...spec, ...range, title: `${spec.title}, ${ratio ? "ratio" : "difference"} of the two runs`, unit: ratio ? "1" : spec.unit } };
}

function firstBlock(series: Series): Block | undefined {
  return series.blocks.values().next().value;
}

function kindAt(block: Block, at: number): string {
  return cellKind(block.bits[at] ?? MISSING_BITS);
}

/** The column of a series that shares a step with first..last, or the one before that reaches into the gap; else -1. */
function overlapping(series: Series, first: number, last: number): number {
  const column = columnAt(series.first, last);
  if (column < 0) return -1;
  const end = Math.max(series.last[column] ?? 0, (series.first[column] ?? 0) + series.width - 1);
  return end >= first ? column : -1;
}

/** Ends that lie evenly around 0, robust against single outliers. */
function linearRange(values: Float32Array): { low: number; high: number; marks: readonly number[] } {
  const sizes = Array.from(values, Math.abs).filter(Number.isFinite).sort((a, b) => a - b);
  const high = sizes[Math.floor(ROBUST * (sizes.length - 1))] || sizes.at(-1) || 1;
  return { low: -high, high, marks: [-high / 2, high / 2] };
}
