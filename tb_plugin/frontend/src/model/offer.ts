// Which metrics a view offers: those that the run holds, by kind, and after them those it could hold.
import type { CatalogEntry, RunMetric } from "../api";
import type { Option } from "../dom";
import type { MetricSpec } from "../schema";
import { kindText } from "./format";

/** What a run holds first; then, under a heading of its own, what the catalogue knows besides. */
export function offerMetrics(
  held: readonly RunMetric[],
  catalog: readonly CatalogEntry[],
  wanted: (kind: string) => boolean,
): readonly Option[] {
  const known = new Set(held.map(({ name }) => name));
  const kinds = [...new Set(held.map(({ kind }) => kind))].filter(wanted).sort((a, b) => rank(a) - rank(b));
  const own = kinds.flatMap((kind) =>
    held
      .filter((metric) => metric.kind === kind)
      .map(({ name, title }) => ({ value: name, label: title, group: kindText(kind) })),
  );
  const absent = catalog.filter(({ name, kind }) => !known.has(name) && wanted(kind));
  return [
    ...own,
    ...absent.map(({ name, title }) => ({ value: name, label: title, group: "Not in this run: how to record it" })),
  ];
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

export interface Topic {
  readonly topic: string;
  readonly metrics: readonly { readonly metric: MetricSpec; readonly held: boolean }[];
}

const TOPICS: Readonly<Record<string, string>> = {
  block: "Gradient through the blocks",
  gain: "Gradient through the blocks",
  gradient: "Gradients of the parameters",
  parameter: "Parameters and their updates",
  update: "Parameters and their updates",
  activation: "Activations",
  attention: "Attention",
  recurrent: "Recurrent layers",
  loss: "Loss",
  learning_rate: "Optimizer",
  optimizer: "Optimizer",
  flow: "Optimizer",
  runtime: "Runtime and memory",
  overhead: "Runtime and memory",
};

/** The metrics whose name, title or formula hold every word of a text, by topic; those that a run holds come first. */
export function findMetrics(
  held: readonly MetricSpec[],
  catalog: readonly MetricSpec[],
  text: string,
): readonly Topic[] {
  const words = text.toLowerCase().split(/\s+/).filter(Boolean);
  const known = new Set(held.map(({ name }) => name));
  const topics = new Map<string, { metric: MetricSpec; held: boolean }[]>();
  for (const metric of [...held, ...catalog.filter(({ name }) => !known.has(name))]) {
    const family = metric.name.split(".", 1).join();
    const topic = TOPICS[family] ?? kindText(family);
    const spoken = `${metric.title} ${metric.name} ${metric.formula} ${topic}`.toLowerCase();
    if (!words.every((word) => spoken.includes(word))) continue;
    topics.set(topic, [...(topics.get(topic) ?? []), { metric, held: known.has(metric.name) }]);
  }
  const rank = ({ metrics }: Topic): number => -metrics.filter((item) => item.held).length;
  return [...topics]
    .map(([topic, metrics]) => ({ topic: topic.charAt(0).toUpperCase() + topic.slice(1), metrics }))
    .sort((a, b) => Math.sign(rank(a)) - Math.sign(rank(b)));
}
