// What the verdict says beside its sentence: the loss of the whole run, and how the quantities of the problems went on.
import type { RunMeta, RunMetric, SeriesQuery } from "./api";
import { courseOf, courseText, isLow, type Course } from "./model/course";
import { groupIssues } from "./model/groups";
import { FROM_LOSS } from "./model/losing";
import type { Series } from "./model/series";
import { sitesOf } from "./model/tree";
import { isAlongDepth, isProblem, issueKey, quantityFor, type Issue } from "./model/verdict";
import type { Courses } from "./views/verdict";

type Ask = (query: SeriesQuery) => Promise<Series>;

export interface Answer {
  readonly loss: Series | null;
  readonly courses: Courses;
}

const [ANSWER_COLUMNS, FEW_COLUMNS, MOST_COLUMNS, MOST_COURSES] = [400, 8, 4096, 3];

export async function answerOf(ask: Ask, run: string, meta: RunMeta, issues: readonly Issue[]): Promise<Answer> {
  const has = (name: string): RunMetric | undefined => meta.metrics.find((metric) => metric.name === name);
  const whole = { run, phase: "", columns: ANSWER_COLUMNS, range: null };
  const loss = has("loss") === undefined ? null : ask({ ...whole, metric: "loss", reduce: "mean" });
  const heads = groupIssues(issues.filter(isProblem))
    .slice(0, MOST_COURSES)
    .map(({ head }) => head);
  const [series, found] = await Promise.all([loss, Promise.all(heads.map((issue) => textOf(ask, run, meta, issue)))]);
  return { loss: series, courses: new Map(found.filter((item): item is [string, string] => item !== null)) };
}

/** How the quantity of one issue went on, by the issue's key; null where it was not read. */
async function textOf(ask: Ask, run: string, meta: RunMeta, issue: Issue): Promise<[string, string] | null> {
  const names = meta.metrics.map(({ name }) => name);
  const has = (name: string): RunMetric | undefined => meta.metrics.find((metric) => metric.name === name);
  const spec = has(quantityFor(issue, names));
  const reached = spec?.name === "block.gradient_norm" && isAlongDepth(issue) ? has(FROM_LOSS) : undefined;
  if (reached !== undefined) {
    // What reaches a layer of the gradient at the loss: what is left behind the block after it.
    const order = meta.sessions.at(-1)?.blocks ?? [];
    const next = order[order.indexOf(issue.layer) + 1];
    const at = (sites: readonly string[]): string | undefined =>
      order.includes(issue.layer) ? sites.find((name) => name === next) : undefined;
    const course = await courseAt(ask, run, reached, issue, at);
    if (course !== null)
      return [issueKey(issue), courseText(course, `gradient from the loss to ${issue.layer}`, reached.unit)];
  }
  // Whether the layer itself was read is known of metrics of layers only.
  if (spec === undefined || (spec.kind === "run") !== (issue.layer === "")) return null;
  const course = await courseAt(ask, run, spec, issue, (sites) => sites[sitesOf(sites, issue.layer)[0] ?? -1]);
  return course === null ? null : [issueKey(issue), courseText(course, spec.title, spec.unit)];
}

async function courseAt(
  ask: Ask,
  run: string,
  spec: RunMetric,
  issue: Issue,
  choose: (sites: readonly string[]) => string | undefined,
): Promise<Course | null> {
  const common = { run, phase: "", range: null, metric: spec.name };
  const { sites } = await ask({ ...common, columns: FEW_COLUMNS, reduce: "extreme" });
  const site = choose(sites);
  if (site === undefined) return null;
  const low = isLow(issue);
  const reduce = `${low ? "min" : "max"},extreme`;
  return courseOf(await ask({ ...common, columns: MOST_COLUMNS, reduce, sites: [site] }), low);
}
