// When: issues laid out on a time line, and the order in which one steps through them.
import { SEVERITIES } from "../schema";
import type { Issue } from "./verdict";

export interface Bar {
  readonly issue: Issue;
  readonly from: number;
  readonly to: number;
  readonly lane: number;
}

export interface Strip {
  readonly bars: readonly Bar[];
  readonly lanes: number;
  /** Issues that found no free lane; the buttons still reach them. */
  readonly hidden: number;
}

/** Issues by the step they began at, the graver first where several began together. */
export function inOrder(issues: readonly Issue[]): readonly Issue[] {
  return [...issues].sort((a, b) => a.step - b.step || SEVERITIES.indexOf(b.severity) - SEVERITIES.indexOf(a.severity));
}

/** The step after which an issue no longer holds. */
export function endOf(issue: Issue, last: number): number {
  if (issue.healed_step !== null) return issue.healed_step;
  return issue.state === "ended" ? Math.max(issue.seen, issue.step) : last;
}

/** Whether an issue held at a step. */
export function holdsAt(issue: Issue, step: number): boolean {
  if (step < issue.step) return false;
  if (issue.healed_step !== null) return step < issue.healed_step;
  return issue.state === "open" || step <= issue.seen;
}

/**
 * Lays issues out so that no bar covers another; a bar takes at least `least` steps, so that its name can be read. The
 * chosen issue always has a bar: in the last lane those give way that it would cover.
 */
export function layOut(
  issues: readonly Issue[],
  last: number,
  least: number,
  most: number,
  chosen: Issue | null = null,
): Strip {
  const free: number[] = [];
  const bars: Bar[] = [];
  let hidden = 0;
  for (const issue of inOrder(issues)) {
    const to = Math.max(endOf(issue, last), issue.step);
    const found = free.findIndex((end) => end <= issue.step);
    const lane = found >= 0 ? found : free.length;
    if (lane >= most) {
      hidden++;
      continue;
    }
    free[lane] = Math.max(to, issue.step + least);
    bars.push({ issue, from: issue.step, to, lane });
  }
  if (chosen === null || !issues.includes(chosen) || bars.some(({ issue }) => issue === chosen))
    return { bars, lanes: free.length, hidden };
  const bar = { issue: chosen, from: chosen.step, to: Math.max(endOf(chosen, last), chosen.step), lane: most - 1 };
  const end = ({ from, to }: Bar): number => Math.max(to, from + least);
  const kept = bars.filter((item) => item.lane !== bar.lane || item.from >= end(bar) || end(item) <= bar.from);
  return { bars: [...kept, bar], lanes: free.length, hidden: hidden + bars.length - kept.length - 1 };
}

/** The issue before or after the one that was chosen last, or else before or after a step. */
export function neighbour(ordered: readonly Issue[], chosen: Issue | null, step: number, by: 1 | -1): Issue | null {
  const at = chosen === null ? -1 : ordered.indexOf(chosen);
  if (at >= 0) return ordered[at + by] ?? null;
  const past = ordered.filter((issue) => (by > 0 ? issue.step > step : issue.step < step));
  return (by > 0 ? past[0] : past.at(-1)) ?? null;
}
