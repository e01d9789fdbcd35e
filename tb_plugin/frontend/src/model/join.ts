// Two runs on one step axis.

export interface Joined {
  readonly steps: Float64Array;
  /** For each step the column of the first series, and that of the second; -1 where it has none. */
  readonly own: Int32Array;
  readonly other: Int32Array;
}

export function joinSteps(own: Float64Array, other: Float64Array): Joined {
  const steps = Float64Array.from(new Set([...own, ...other])).sort();
  const columns = (from: Float64Array): Int32Array => {
    const at = new Map(Array.from(from, (step, column) => [step, column]));
    return Int32Array.from(steps, (step) => at.get(step) ?? -1);
  };
  return { steps, own: columns(own), other: columns(other) };
}

/** Values on the joined axis; undefined, unlike null, does not break a line. */
export function spread<T>(values: readonly T[], columns: Int32Array): (T | undefined)[] {
  return Array.from(columns, (column) => (column < 0 ? undefined : values[column]));
}
