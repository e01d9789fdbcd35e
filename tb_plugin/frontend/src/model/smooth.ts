// TensorBoard's own smoothing: an exponential moving average whose start is not drawn towards zero.

/**
 * Smooths the numbers and leaves every gap where it is; a curve that never changes stays as it is.
 *
 * `weight` is what is kept of the past, 0 for none, below 1.
 */
export function smooth<T extends number | null | undefined>(values: readonly T[], weight: number): (number | T)[] {
  const known = values.filter((value) => typeof value === "number");
  if (weight <= 0 || known.every((value) => value === known[0])) return [...values];
  let [average, rest] = [0, 1];
  return values.map((value) => {
    if (typeof value !== "number") return value;
    average = average * weight + (1 - weight) * value;
    rest *= weight;
    return average / (1 - rest);
  });
}
