// All runs at a glance: which columns a table of them has, in which order its rows stand, and which a text leaves.
import type { RunSummary } from "../api";
import type { IssueType, Severity } from "../schema";
import { SEVERITIES } from "../schema";
import { toNumber, type Written } from "./health";
import type { Tone, Verdict } from "./verdict";

export type Hyperparameter = number | string | boolean;

/** One run in the answer of /overview. */
export interface OverviewRun extends RunSummary {
  /** Whether nothing but its name is known yet. */
  readonly pending?: boolean;
  readonly issues: { readonly open: number; readonly healed: number; readonly ended: number };
  /** Open issues that no other explains; absent in a page that was kept earlier. */
  readonly problems?: number;
  readonly verdict: {
    readonly issue_type: IssueType;
    readonly severity: Severity;
    readonly layer: string;
    readonly step: number;
  } | null;
  /** Null while nothing but its name is known. */
  readonly said: Verdict | null;
  readonly loss: { readonly first: number; readonly last: number } | null;
  readonly trend: readonly (readonly [number, Written])[];
  readonly hyperparameters: Readonly<Record<string, Hyperparameter>>;
}

export interface Overview {
  readonly total: number;
  /** How many runs were not looked at yet; absent where all were. */
  readonly pending?: number;
  readonly runs: readonly OverviewRun[];
}

export interface OverviewColumn {
  readonly key: string;
  readonly title: string;
  readonly numeric: boolean;
}

const FIXED: readonly OverviewColumn[] = [
  { key: "run", title: "run", numeric: false },
  { key: "verdict", title: "verdict", numeric: false },
  { key: "layer", title: "worst layer", numeric: false },
  { key: "first", title: "first loss", numeric: true },
  { key: "last", title: "last loss", numeric: true },
  { key: "trend", title: "loss over time", numeric: false },
  { key: "steps", title: "steps", numeric: true },
];
/** From what needs no look to what does. */
const UNSOUND: readonly Tone[] = ["good", "none", "warn", "bad"];
const MOST_PARAMETERS = 6;
export const PARAMETER = "hp:";

/** The columns of a table of these runs: of the hyperparameters only those that tell runs apart, the commonest first. */
export function columnsOf(runs: readonly OverviewRun[]): readonly OverviewColumn[] {
  const known = new Map<string, { values: Set<string>; count: number; numeric: boolean }>();
  for (const { hyperparameters } of runs) {
    for (const [name, value] of Object.entries(hyperparameters)) {
      const item = known.get(name) ?? { values: new Set<string>(), count: 0, numeric: true };
      item.values.add(String(value));
      item.count++;
      item.numeric &&= typeof value === "number";
      known.set(name, item);
    }
  }
  const telling = [...known].filter(
    ([, { values, count }]) => values.size > 1 || (count < runs.length && runs.length > 1),
  );
  telling.sort(([, a], [, b]) => b.count - a.count);
  return [
    ...FIXED,
    ...telling
      .slice(0, MOST_PARAMETERS)
      .map(([name, { numeric }]) => ({ key: `${PARAMETER}${name}`, title: name, numeric })),
  ];
}

export function problemsOf({ problems, issues }: OverviewRun): number {
  return problems ?? issues.open;
}

/** Whether the last loss of a run is NaN or infinite. */
export function hasBrokenLoss({ trend }: OverviewRun): boolean {
  const last = trend.at(-1);
  return last !== undefined && !Number.isFinite(toNumber(last[1]));
}

/** What a run has in a column, for sorting; null where it has nothing. */
export function valueIn(run: OverviewRun, key: string): number | string | null {
  if (key.startsWith(PARAMETER)) {
    const value = run.hyperparameters[key.slice(PARAMETER.length)];
    return value === undefined ? null : typeof value === "boolean" ? String(value) : value;
  }
  switch (key) {
    case "verdict":
      return run.pending
        ? null
        : run.verdict === null
          ? UNSOUND.indexOf(run.said?.tone ?? "none") / UNSOUND.length
          : 1000 * (1 + SEVERITIES.indexOf(run.verdict.severity)) + Math.min(999, problemsOf(run));
    case "layer":
      return run.verdict?.layer ?? null;
    case "first":
      return run.loss?.first ?? null;
    case "last":
      return hasBrokenLoss(run) ? NaN : (run.loss?.last ?? null);
    case "trend":
      return run.loss === null ? null : run.loss.last / run.loss.first;
    case "steps":
      return run.last;
    case "updated":
      return run.updated;
    default:
      return run.run;
  }
}

/** The runs that hold every word of a text in their name, verdict, model or hyperparameters, in order of a column. */
export function arrangeRuns(
  runs: readonly OverviewRun[],
  key: string,
  falling: boolean,
  filter: string,
): readonly OverviewRun[] {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  const shown = words.length === 0 ? runs : runs.filter((run) => words.every((word) => textOf(run).includes(word)));
  const sign = falling ? -1 : 1;
  const rated = shown.map((run) => ({ run, value: valueIn(run, key) }));
  rated.sort((a, b) => {
    if (a.value === null || b.value === null) return Number(a.value === null) - Number(b.value === null);
    if (typeof a.value === "number" && typeof b.value === "number")
      return sign * ((Number.isNaN(a.value) ? Infinity : a.value) - (Number.isNaN(b.value) ? Infinity : b.value) || 0);
    return sign * String(a.value).localeCompare(String(b.value), "en", { numeric: true });
  });
  return rated.map(({ run }) => run);
}

function textOf(run: OverviewRun): string {
  const parameters = Object.entries(run.hyperparameters).map(([name, value]) => `${name}=${value}`);
  return [
    run.run,
    run.model ?? "",
    run.verdict?.issue_type ?? run.said?.headline ?? "",
    run.verdict?.layer ?? "",
    ...parameters,
  ]
    .join(" ")
    .toLowerCase();
}
