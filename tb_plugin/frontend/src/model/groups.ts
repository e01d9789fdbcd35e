// Issues that share a cause are one card, so that three hundred dead layers are one thing to read.
import { SEVERITIES } from "../schema";
import type { Issue } from "./verdict";

export interface Group {
  readonly key: string;
  /** The worst and earliest, by which the group is known; as severe as the worst that it explains. */
  readonly head: Issue;
  readonly rest: readonly Issue[];
  /** What these issues explain, worst first: it is read with them, and is no group of its own. */
  readonly also: readonly Issue[];
  /** Every layer concerned, that of the head first. */
  readonly layers: readonly string[];
}

/** Groups in the order of their first issue; the server gives the worst first. */
export function groupIssues(issues: readonly Issue[]): readonly Group[] {
  const found = new Map<string, Issue[]>();
  const here = new Set(issues.map(identity));
  const consequences = new Map<string, Issue[]>();
  for (const issue of issues) {
    const cause = JSON.stringify(issue.explained_by ?? null);
    if (here.has(cause)) {
      consequences.set(cause, [...(consequences.get(cause) ?? []), issue]);
      continue;
    }
    const key = JSON.stringify([issue.issue_type, issue.cause ?? "", issue.severity === "INFO", issue.layer === ""]);
    const group = found.get(key);
    if (group === undefined) found.set(key, [issue]);
    else group.push(issue);
  }
  return [...found].flatMap(([key, [head, ...rest]]) => {
    if (head === undefined) return [];
    const mine = [head, ...rest];
    const also = mine.flatMap((issue) => consequences.get(identity(issue)) ?? []);
    const felt = also.filter(({ state }) => state === head.state);
    const severity = [head, ...felt].reduce((worst, { severity: each }) => {
      return SEVERITIES.indexOf(each) > SEVERITIES.indexOf(worst) ? each : worst;
    }, head.severity);
    const layers = [...new Set(mine.flatMap((issue) => issue.layers))];
    return [{ key, head: { ...head, severity }, rest, also, layers }];
  });
}

function identity({ issue_type, layer, step }: Issue): string {
  return JSON.stringify([issue_type, layer, step]);
}
