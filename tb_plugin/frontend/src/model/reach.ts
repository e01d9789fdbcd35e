// How long a reading holds: until the next one, unless that is much longer in coming than readings are around it.
import { columnAt, type Series } from "./series";

const [AROUND, TIMES] = [2, 2];
const known = new WeakMap<Series, Float64Array>();

/**
 * For each column the step before which its reading holds: at most twice the longest of the distances between the two
 * readings before it, and the two after. What was read once holds at its own step.
 */
export function holdsUntil(series: Series): Float64Array {
  const found = known.get(series) ?? reachOf(series);
  known.set(series, found);
  return found;
}

function reachOf({ first, last, columns }: Series): Float64Array {
  const distance = (i: number): number => (i >= 0 && i + 1 < columns ? (first[i + 1] ?? 0) - (last[i] ?? 0) : 0);
  return Float64Array.from({ length: columns }, (_, i) => {
    let usual = 0;
    for (let by = 1; by <= AROUND; by++) usual = Math.max(usual, distance(i - by), distance(i + by));
    // Of two readings alone neither tells whether the other came late.
    if (usual === 0) usual = columns === 2 ? distance(0) / TIMES : 0.5;
    return (last[i] ?? 0) + Math.max(1, TIMES * usual);
  });
}

/** The columns [from, to] that the steps [begin, end) show, to before from where nothing was read. */
export function columnsBetween(series: Series, begin: number, end: number): readonly [number, number] {
  const { first } = series;
  const [held, next] = [columnAt(first, begin), columnAt(first, end)];
  const to = next >= 0 && first[next] === end ? next - 1 : next;
  const lasts = held >= 0 && begin < (holdsUntil(series)[held] ?? 0);
  return [lasts ? held : held + 1, Math.max(to, held)];
}
