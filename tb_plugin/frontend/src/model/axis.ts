// What the lines run over: steps, time since the start, or the time of day. Only steps are the same in every view.
import { columnAt, type Series } from "./series";

export type AxisKind = "step" | "relative" | "wall";

export const AXES: readonly { readonly kind: AxisKind; readonly label: string }[] = [
  { kind: "step", label: "step" },
  { kind: "relative", label: "time since start" },
  { kind: "wall", label: "time of day" },
];

/** Where each column of a series lies on an axis; never falls, even where a clock was set back. */
export function axisValues(series: Series, kind: AxisKind, started: number): Float64Array {
  if (kind === "step") return series.first;
  let latest = -Infinity;
  return series.wall.map((wall) => (latest = Math.max(latest, kind === "wall" ? wall : wall - started)));
}

/** A step on an axis, between columns by the straight line through both. */
export function stepToX(first: Float64Array, xs: Float64Array, step: number): number {
  return between(first, xs, step);
}

export function xToStep(first: Float64Array, xs: Float64Array, x: number): number {
  return between(xs, first, x);
}

function between(from: Float64Array, to: Float64Array, at: number): number {
  const left = Math.max(0, Math.min(from.length - 2, columnAt(from, at)));
  const [a, b, c, d] = [from[left], from[left + 1], to[left], to[left + 1]];
  if (a === undefined || c === undefined) return NaN;
  if (b === undefined || d === undefined || b === a) return c;
  return Math.max(to[0] ?? c, Math.min(to.at(-1) ?? d, c + ((at - a) / (b - a)) * (d - c)));
}
