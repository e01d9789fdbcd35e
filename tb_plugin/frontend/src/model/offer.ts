// Which metrics a view offers: those that the run holds, by kind, and after them those it could hold.
import type { CatalogEntry, RunMetric } from "../api";
import type { Option } from "../dom";
import { kindText } from "./format";

/** What a run holds first; then, under a heading of its own, what the catalogue knows besides. */
export function offerMetrics(held: readonly RunMetric[], catalog: readonly CatalogEntry[], wanted: (kind: string) => boolean): readonly Option[] {
  const known = new Set(held.map(({ name }) => name));
  const kinds = [...new Set(held.map(({ kind }) => kind))].filter(wanted).sort((a, b) => rank(a) - rank(b));
  const own = kinds.flatMap((kind) => held.filter((metric) => metric.kind === kind).map(({ name, title }) => ({ value: name, label: title, group: kindText(kind) })));
  const absent = catalog.filter(({ name, kind }) => !known.has(name) && wanted(kind));
  return [...own, ...absent.map(({ name, title }) => ({ value: name, label: title, group: "Not in this run: how to get it" }))];
}

/** The metric to begin with, the first of these that there is: what was wanted, the gain of blocks, the widest. */
export function firstMetric(held: readonly RunMetric[], wanted: string): string {
  if (held.some(({ name }) => name === wanted)) return wanted;
  const wide = held.filter(({ kind }) => kind !== "run");
  const gain = wide.find(({ kind, scale, marks }) => kind === "block" && scale === "log" && marks.length === 2);
  return (gain ?? wide[0] ?? held[0])?.name ?? "";
}

function rank(kind: string): number {
  const at = ["block", "parameter", "module"].indexOf(kind);
  return kind === "run" ? Infinity : at < 0 ? 3 : at;
}
