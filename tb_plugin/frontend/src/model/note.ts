// What the map leaves out, in words: nothing is thinned out without them.
import { formatStep } from "./format";
import { columnAt, type Series } from "./series";
import type { Depth } from "./depth";

export interface Drawn {
  readonly range: readonly [number, number];
  /** Pixels of the screen. */
  readonly width: number;
  readonly height: number;
  /** What "furthest out" is counted from. */
  readonly neutral: string;
}

export function mapNote(series: Series, depth: Depth, { range, width, height, neutral }: Drawn): string {
  const parts: string[] = [];
  const columns = columnAt(series.first, range[1]) - Math.max(0, columnAt(series.first, range[0]));
  const reducer = series.blocks.keys().next().value ?? "";
  if (series.most > 1) parts.push(`${formatStep(series.width)} steps per column: ${reducer} shown`);
  else if (columns > width)
    parts.push(`${Math.ceil(columns / width)} readings per pixel: the one furthest from ${neutral} shown`);
  const inView = depth.high - depth.low;
  const perPixel = inView / Math.max(1, height);
  const folded = depth.rows.filter(({ from, to }) => to - from > 1).length;
  if (perPixel > 1) parts.push(`${Math.ceil(perPixel)} rows per pixel: the one furthest from ${neutral} shown`);
  else if (folded > 0) parts.push(`folded rows show their reading furthest from ${neutral}`);
  if (parts.length === 0) parts.push("every reading shown");
  if (inView < depth.rows.length)
    parts.push(`rows ${Math.floor(depth.low) + 1}\u2013${Math.ceil(depth.high)} of ${formatStep(depth.rows.length)}`);
  return parts.join("; ");
}
