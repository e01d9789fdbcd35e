// What the panel says first: is it learning, and if not, which layer, since when.
import type { IssueType, Severity } from "../schema";
import { formatStep } from "./format";
import { groupIssues } from "./groups";

export interface Issue {
  readonly issue_type: IssueType;
  readonly severity: Severity;
  readonly layer: string;
  readonly step: number;
  readonly value: number | string;
  readonly threshold: number | string;
  readonly message: string;
  readonly advice: string;
  readonly layers: readonly string[];
  /** What brought it about, where that is known. */
  readonly cause?: string;
  /** Type, layer and step of the issue whose consequence this one is. */
  readonly explained_by?: readonly [IssueType, string, number] | null;
  readonly healed_step: number | null;
  /** Steps directly before `step` in which it may have held already: none was read. */
  readonly before?: number;
  /** The step at which it was last written. */
  readonly seen: number;
  readonly state: "open" | "healed" | "ended";
  /** Per-site metrics that were read at the layer, or inside it. */
  readonly metrics: readonly string[];
}

export type Tone = "good" | "warn" | "bad" | "none";

/** What `gradflow report` says of a run, in its words; records/verdict.py makes it. */
export interface Verdict {
  readonly tone: Tone;
  readonly headline: string;
  readonly detail: string;
}

/** A note (severity INFO) is shown in the list, and is not a problem. */
export function isProblem(issue: Issue): boolean {
  return issue.state === "open" && issue.severity !== "INFO";
}

/** Changes whenever something that is shown of an issue changes. */
export function issueKey(issue: Issue): string {
  const { issue_type, layer, step, state, healed_step, severity, message, layers } = issue;
  return JSON.stringify([issue_type, layer, step, state, healed_step, severity, message, layers.length]);
}

/** When it began, in the words of the report. */
export function since({ step, before = 0 }: Issue): string {
  const unread = before > 0 ? `, or up to ${formatStep(before)} step${before > 1 ? "s" : ""} before` : "";
  return `since step ${formatStep(step)}${unread}`;
}

export function where(issue: Issue): string {
  return whereIn(issue.layer, issue.layers.length);
}

/** The first layer, and how many more of `count` there are. */
export function whereIn(layer: string, count: number): string {
  return `${layer === "" ? "whole model" : layer}${count > 1 ? ` (+${formatStep(count - 1)} more)` : ""}`;
}

/** What to do about the worst problem that is open, or was left open by an earlier session; "" without one. */
export function fixOf(issues: readonly Issue[]): string {
  const still = issues.filter(({ state, severity }) => state !== "healed" && severity !== "INFO");
  return groupIssues(still)[0]?.head.advice ?? "";
}

/** A sentence of the verdict, which begins with a small letter where others stand before it. */
export function sentence(text: string): string {
  return text.charAt(0).toUpperCase() + text.slice(1);
}

/** The metrics that an issue is judged by, or that follow it, the closest first. */
const JUDGED_BY: Partial<Record<IssueType, readonly string[]>> = {
  DEAD: ["activation.dead_share", "parameter.zero_share"],
  SATURATION: ["activation.saturated_share"],
  EXPLODING: ["block.gain", "block.gradient_norm", "parameter.gradient_norm"],
  VANISHING: ["block.gradient_norm", "block.gain", "parameter.gradient_norm"],
  LOSS_SPIKE: ["block.gradient_norm", "parameter.gradient_norm"],
  UNSTABLE: ["block.gradient_norm", "parameter.gradient_norm"],
  LEARNING_RATE: ["parameter.update_ratio"],
  ATTENTION_COLLAPSE: ["attention.entropy"],
  HEAD_REDUNDANCY: ["attention.diversity"],
  RANK_COLLAPSE: ["block.rank_residual"],
  RECURRENT_SUBCRITICAL: ["recurrent.decay", "recurrent.spectral_radius"],
  RECURRENT_SUPERCRITICAL: ["recurrent.decay", "recurrent.spectral_radius"],
  NOT_TRAINING: ["parameter.update_ratio", "parameter.gradient_norm"],
  NOT_LEARNING: ["parameter.update_ratio", "block.gradient_norm"],
  NUMERICAL: ["block.gradient_norm", "block.gain", "parameter.nonfinite", "parameter.gradient_norm"],
  BOTTLENECK: ["block.gain", "block.effective_rank"],
  STAGNATION: ["parameter.update_ratio", "parameter.gradient_norm"],
};

const RUN_JUDGED_BY: Partial<Record<IssueType, string>> = {
  LOSS_SPIKE: "loss",
  DIVERGING: "loss",
  NOT_LEARNING: "loss",
  STAGNATION: "update.ratio",
  UNSTABLE: "gradient.total_norm",
  LEARNING_RATE: "update.ratio",
};

/** The metric that shows an issue best among those that a run holds. */
export function metricFor(issue: Issue, available: readonly string[], current: string): string {
  const held = (names: readonly string[]): readonly string[] => names.filter((name) => available.includes(name));
  const [usual, there] = [held(JUDGED_BY[issue.issue_type] ?? []), held(issue.metrics)];
  const both = usual.find((name) => there.includes(name)) ?? (there.includes(current) ? current : there[0]);
  return both ?? usual[0] ?? current;
}

/** The metric whose course is that of the issue at its first layer, "" where none was read there. */
export function quantityFor(issue: Issue, available: readonly string[]): string {
  if (issue.layer === "") return RUN_JUDGED_BY[issue.issue_type] ?? "";
  return (
    (JUDGED_BY[issue.issue_type] ?? []).find((name) => available.includes(name) && issue.metrics.includes(name)) ?? ""
  );
}

/** Whether an issue is an event at one step: what came after it may be sound. */
export function isEvent(issue: Issue): boolean {
  return issue.issue_type === "LOSS_SPIKE" || issue.issue_type === "NUMERICAL";
}

/** Whether an issue is about what becomes of the gradient on its way through the blocks. */
export function isAlongDepth(issue: Issue): boolean {
  return issue.issue_type === "VANISHING" || issue.issue_type === "EXPLODING";
}
