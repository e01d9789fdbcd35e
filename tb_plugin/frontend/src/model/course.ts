// How the quantity of an issue went on: where it is now, and where it was worst.
import { formatStep, threeDigits } from "./format";
import { cellKind, type Series } from "./series";
import type { Issue } from "./verdict";
import type { Unit } from "../schema";

export interface Course {
  /** null where nothing arrived. */
  readonly now: number | null;
  readonly worst: number;
  /** The steps of the column in which it was worst. */
  readonly worstSteps: readonly [number, number];
}

/** Whether less is worse, by the side of its threshold on which an issue was found. */
export function isLow({ value, threshold }: Issue): boolean {
  return Number(value) < Number(threshold);
}

/** The last reading of a series of one site, and the worst: NaN or Inf before every number, the first of equals. */
export function courseOf(series: Series, low: boolean): Course | null {
  const block = series.blocks.get(low ? "min" : "max") ?? series.blocks.values().next().value;
  const last = series.blocks.get("extreme") ?? block;
  let worst: { value: number; steps: readonly [number, number]; rank: number } | null = null;
  let now: number | null = null;
  for (let column = 0; column < series.columns; column++) {
    const kind = cellKind(block?.bits[column] ?? 0);
    if (kind === "missing") {
      now = null;
      continue;
    }
    const value = block?.values[column] ?? NaN;
    const rank = kind === "value" ? (low ? -value : value) : Infinity;
    if (worst === null || rank > worst.rank)
      worst = { value, rank, steps: [series.first[column] ?? 0, series.last[column] ?? 0] };
    now = last?.values[column] ?? value;
  }
  return worst === null ? null : { now, worst: worst.value, worstSteps: worst.steps };
}

export function courseText({ now, worst, worstSteps: [first, last] }: Course, title: string, unit: Unit): string {
  return `${title}: now ${quantity(now, unit)}, worst ${quantity(worst, unit)} at ${last > first ? `steps ${formatStep(first)}\u2013${formatStep(last)}` : `step ${formatStep(first)}`}`;
}

function quantity(value: number | null, unit: Unit): string {
  if (value === null) return "nothing arrived";
  if (unit === "share" && Number.isFinite(value)) return `${threeDigits(value * 100)} %`;
  // Nats say little to the eye: the factor that they stand for says more.
  return unit === "nats" && Number.isFinite(value) ? `\u00d7${threeDigits(Math.exp(value))}` : threeDigits(value);
}
