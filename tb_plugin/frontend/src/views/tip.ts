// What is said of the place on the map that is pointed at.
import type { RunMetric } from "../api";
import type { Pointed } from "../charts/heatmap";
import type { Depth } from "../model/depth";
import { formatNumber, formatStep, formatTime, missingText, siteText, unitText } from "../model/format";
import { holdsUntil } from "../model/reach";
import { columnAt, type Series } from "../model/series";
import type { Tip } from "./tooltip";

/** The tip, and the site whose reading it tells. */
export function tipOf(
  series: Series,
  spec: RunMetric,
  depth: Depth,
  { cell, rows }: Pointed,
): { readonly tip: Tip; readonly site: string } {
  const row = depth.rows[rows[0]];
  const among = depth.rows.slice(...rows).reduce((sum, { from, to }) => sum + to - from, 0);
  const unit = cell.kind === "value" ? unitText(spec.unit) : "";
  const none = cell.site < 0;
  const absent = none && row !== undefined && row.from === row.to;
  const value = none
    ? "not read"
    : cell.kind === "missing"
      ? missingText(spec.name)
      : `${formatNumber(cell.value)} ${unit}`.trim();
  const site = absent ? row.key : (series.sites[cell.site] ?? series.sites[row?.from ?? 0] ?? "");
  const most = among > 1 ? [`most extreme of ${among} rows here`] : [];
  const lines = [
    `${spec.title}, ${none && !absent ? "last read at " : ""}step ${stepsOf(series, cell.column)}`,
    formatTime(series.wall[cell.column] ?? 0),
    ...most,
  ];
  return { tip: { layer: siteText(site), value, lines }, site };
}

/** When what holds at a step was read, and whether it was so long ago that it does not hold any more. */
export function readingText(series: Series, step: number): string {
  const column = columnAt(series.first, step);
  const holds = step < (holdsUntil(series)[column] ?? Infinity);
  return `${holds ? "" : "last read at "}step ${stepsOf(series, column)}`;
}

/** The steps that a column stands for. */
function stepsOf(series: Series, column: number): string {
  const [first, last] = [series.first[column], series.last[column]];
  if (first === undefined || last === undefined) return "\u2013";
  return first === last ? formatStep(first) : `${formatStep(first)}\u2013${formatStep(last)}`;
}
