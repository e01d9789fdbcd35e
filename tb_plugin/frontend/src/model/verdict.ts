// What the panel says first: is it learning, and if not, which layer, since when.
import type { IssueType, Severity } from "../schema";
import { formatStep } from "./format";

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
  readonly healed_step: number | null;
  /** The step at which it was last written. */
  readonly seen: number;
  readonly state: "open" | "healed" | "ended";
  /** Per-site metrics that were read at the layer, or inside it. */
  readonly metrics: readonly string[];
}

export type Tone = "good" | "warn" | "bad" | "none";

export interface Verdict {
  readonly tone: Tone;
  readonly headline: string;
  readonly detail: string;
}

const NAMED = 2;

/** A note (severity INFO) is shown in the list, and is not a problem. */
export function isProblem(issue: Issue): boolean {
  return issue.state === "open" && issue.severity !== "INFO";
}

/** Changes whenever something that is shown of an issue changes. */
export function issueKey(issue: Issue): string {
  const { issue_type, layer, step, state, healed_step, severity, message, layers } = issue;
  return JSON.stringify([issue_type, layer, step, state, healed_step, severity, message, layers.length]);
}

export function where(issue: Issue): string {
  const more = issue.layers.length > 1 ? ` (+${issue.layers.length - 1} more)` : "";
  return `${issue.layer === "" ? "whole model" : issue.layer}${more}`;
}

/** What was lost stands in the headline: nobody looked at those steps, so that nobody can call them healthy. */
export function verdict(issues: readonly Issue[], last: number | null, lost = 0): Verdict {
  const missing = lost === 0 ? "" : `, ${formatStep(lost)} ${lost === 1 ? "step" : "steps"} lost`;
  if (last === null) return { tone: "none", headline: "No steps yet", detail: "The run is open and nothing was written so far." };
  const problems = issues.filter(isProblem);
  const worst = problems[0];
  if (worst === undefined) {
    const healed = issues.filter((issue) => issue.state === "healed").length;
    const past = healed === 0 ? "" : ` ${healed} earlier ${healed === 1 ? "problem has" : "problems have"} healed.`;
    const headline = lost === 0 ? "Healthy" : `Healthy in the recorded steps${missing}`;
    return { tone: lost === 0 ? "good" : "warn", headline, detail: `No open problem at step ${formatStep(last)}.${past}` };
  }
  const tone = problems.some((issue) => issue.severity === "HIGH" || issue.severity === "CRITICAL") ? "bad" : "warn";
  const headline = `${problems.length === 1 ? "1 problem" : `${problems.length} problems`}${missing}`;
  const named = problems.slice(0, NAMED).map((issue) => `${issue.issue_type} in ${where(issue)} since step ${formatStep(issue.step)}`);
  return { tone, headline, detail: named.join("  \u00b7  ") };
}

/** The metric that shows an issue best among those that a run holds. */
export function metricFor(issue: Issue, available: readonly string[], current: string): string {
  const wanted: Partial<Record<IssueType, readonly string[]>> = {
    DEAD: ["activation.dead_share", "parameter.zero_share"],
    SATURATION: ["activation.saturated_share"],
    EXPLODING: ["block.gain", "block.gradient_norm", "parameter.gradient_norm"],
    VANISHING: ["block.gain", "block.gradient_norm", "parameter.gradient_norm"],
    NUMERICAL: ["block.gain", "parameter.nonfinite", "parameter.gradient_norm"],
    BOTTLENECK: ["block.gain", "block.effective_rank"],
    STAGNATION: ["parameter.update_ratio"],
  };
  const held = (names: readonly string[]): readonly string[] => names.filter((name) => available.includes(name));
  const [usual, there] = [held(wanted[issue.issue_type] ?? []), held(issue.metrics)];
  const both = usual.find((name) => there.includes(name)) ?? (there.includes(current) ? current : there[0]);
  return both ?? usual[0] ?? current;
}
