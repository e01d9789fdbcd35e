// Many runs side by side on the same axes, each against a chosen one.
import { cellKind, columnAt, type Series } from "./series";

export interface Multiple {
  readonly run: string;
  readonly steps: readonly number[];
  /** Null where there is no finite number. */
  readonly values: readonly (number | null)[];
}

export interface Axes {
  readonly steps: readonly [number, number];
  readonly low: number;
  readonly high: number;
}

export function multipleOf(series: Series): Multiple {
  const block = series.blocks.values().next().value;
  const values = Array.from({ length: series.columns }, (_, c) =>
    cellKind(block?.bits[c] ?? 0) === "value" ? (block?.values[c] ?? null) : null,
  );
  return { run: series.run, steps: Array.from(series.first), values };
}

/** A run measured by another at the same steps: a ratio on a log scale, else a difference; null where one has nothing. */
export function against(own: Multiple, other: Multiple, ratio: boolean): Multiple {
  const [steps, last] = [Float64Array.from(other.steps), other.steps.at(-1) ?? -Infinity];
  const values = own.values.map((value, i) => {
    const step = own.steps[i] ?? 0;
    const there = step > last ? null : (other.values[columnAt(steps, step)] ?? null);
    if (value === null || there === null) return null;
    return ratio ? (there === 0 ? null : value / there) : value - there;
  });
  return { ...own, values };
}

/** Axes that hold every run; a logarithmic one only what is above 0. */
export function axesOf(multiples: readonly Multiple[], log: boolean): Axes {
  let [first, last, low, high] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const { steps, values } of multiples) {
    [first, last] = [Math.min(first, steps[0] ?? Infinity), Math.max(last, steps.at(-1) ?? -Infinity)];
    for (const value of values)
      if (value !== null && (!log || value > 0)) [low, high] = [Math.min(low, value), Math.max(high, value)];
  }
  if (!(low <= high)) [low, high] = [log ? 0.1 : 0, 1];
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  return { steps: [Number.isFinite(first) ? first : 0, last > first ? last : first + 1], low, high };
}

export function pathOf({ steps, values }: Multiple, axes: Axes, log: boolean, width: number, height: number): string {
  const place = (value: number): number => (log ? Math.log(value) : value);
  const [low, high] = [place(axes.low), place(axes.high)];
  let [path, open] = ["", false];
  values.forEach((value, i) => {
    if (value === null || (log && value <= 0)) return void (open = false);
    const x = (((steps[i] ?? 0) - axes.steps[0]) / (axes.steps[1] - axes.steps[0])) * width;
    const y = height - ((place(value) - low) / (high - low)) * height;
    path += `${open ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    open = true;
  });
  return path;
}
