// Which: one row per layer with what was written about it at one step.
import type { RunMetric } from "../api";
import { MISSING_BITS, type SiteKind } from "../schema";
import { kindText } from "./format";
import { cellKind, columnAt, type Series } from "./series";
import { holdsAt } from "./strip";
import type { Issue } from "./verdict";

export type Written = number | "NaN" | "Infinity" | "-Infinity" | null;

export interface MetricMoment {
  readonly step: number | null;
  readonly sites: readonly string[];
  readonly values: readonly Written[];
}

/** The answer of /moment. */
export interface Moment {
  readonly step: number;
  readonly metrics: Readonly<Record<string, MetricMoment>>;
  /** Steps whose extreme stands for each value; absent where values are those of the step itself. */
  readonly coarse?: number;
}

export interface Column {
  readonly key: string;
  readonly title: string;
  readonly share: boolean;
  /** The thresholds of the metric. */
  readonly marks: readonly number[];
  /** The first of these that knows a layer counts. */
  readonly metrics: readonly string[];
}

/** What is asked of a layer of any kind; a block shows the worst of what lies inside it. */
const COMMON: readonly Column[] = [
  {
    key: "gradient",
    title: "gradient norm",
    share: false,
    marks: [],
    metrics: ["block.gradient_norm", "parameter.gradient_norm"],
  },
  { key: "gain", title: "gain", share: false, marks: [0.5, 2], metrics: ["block.gain"] },
  { key: "update", title: "update / weight", share: false, marks: [], metrics: ["parameter.update_ratio"] },
  { key: "dead", title: "dead units", share: true, marks: [0.9], metrics: ["activation.dead_share"] },
  { key: "zero", title: "zero gradients", share: true, marks: [0.9], metrics: ["parameter.zero_share"] },
];

/** Kinds of layers that the common columns speak of; any other kind shows what was read of it. */
const COMMON_KINDS: readonly SiteKind[] = ["block", "parameter", "module"];

/** The metric whose course is the trend, where a group has several. */
const LEADING: readonly string[] = [
  "block.gradient_norm",
  "block.gain",
  "parameter.gradient_norm",
  "parameter.update_ratio",
];

const [MOST_COLUMNS, MOST_ACCUSED] = [8, 100];

/** Rows that are shown together: all blocks, all parameters, or the modules that one instrument reads. */
export interface Group {
  readonly key: string;
  readonly label: string;
  readonly kind: SiteKind;
  /** What was read of just these, the leading metric first, then those with a threshold. */
  readonly metrics: readonly RunMetric[];
}

/** The groups of rows that a run holds, blocks first. */
export function groupsOf(available: readonly RunMetric[]): readonly Group[] {
  const order = ({ kind }: RunMetric): number =>
    COMMON_KINDS.includes(kind) ? COMMON_KINDS.indexOf(kind) : COMMON_KINDS.length;
  const rank = ({ name, marks }: RunMetric): number =>
    LEADING.includes(name) ? LEADING.indexOf(name) : LEADING.length + (marks.length > 0 ? 0 : 1);
  const groups = new Map<string, RunMetric[]>();
  for (const metric of [...available].sort((a, b) => order(a) - order(b))) {
    if (metric.kind === "run") continue;
    const own = metric.kind === "block" || metric.kind === "parameter" ? "" : `/${metric.name.split(".", 1).join()}`;
    const key = `${metric.kind}${own}`;
    groups.set(key, [...(groups.get(key) ?? []), metric]);
  }
  return [...groups].map(([key, metrics]) => {
    const [kind = "", family] = key.split("/");
    return {
      key,
      kind: kind as SiteKind,
      label: family === undefined ? kindText(kind) : `${kindText(kind)}: ${family}`,
      metrics: metrics.sort((a, b) => rank(a) - rank(b)),
    };
  });
}

/**
 * The columns of a group: the common ones of which the run holds something, then what else was read of just these; of
 * blocks and parameters, which have many metrics, only what has a threshold.
 */
export function columnsOf(group: Group, available: readonly RunMetric[]): readonly Column[] {
  const held = new Set(available.map(({ name }) => name));
  const common = COMMON_KINDS.includes(group.kind)
    ? COMMON.filter(({ metrics }) => metrics.some((name) => held.has(name)))
    : [];
  const taken = new Set(common.flatMap(({ metrics }) => metrics));
  const few = group.key === "block" || group.key === "parameter";
  const own = group.metrics.filter(({ name, marks }) => !taken.has(name) && (!few || marks.length > 0));
  return [
    ...common,
    ...own.map(({ name, title, unit, marks }) => ({
      key: name,
      title,
      share: unit === "share",
      marks,
      metrics: [name],
    })),
  ].slice(0, MOST_COLUMNS);
}

/** What stands in one cell: null where nothing was read; `among` counts the inner layers of which it is the greatest. */
export interface Cell {
  readonly value: number;
  readonly metric: string;
  readonly site: string;
  readonly among: number;
}

export interface Row {
  readonly site: string;
  readonly depth: number;
  readonly issue: Issue | null;
  /** The key of the first column whose number lies outside its thresholds, "" for none, null where nothing was judged. */
  readonly off: string | null;
  /** How much of the gradient at the last block arrives, where an issue holds that calls so much too little. */
  readonly arrives: number | null;
  readonly cells: Readonly<Record<string, Cell | null>>;
}

/** "site", "verdict", or the key of a column. */
export type SortKey = string;

/** The step at which most of a group's numbers were read, which may lie before the one that is asked for. */
export function readAt(group: Group, { metrics, step }: Moment): number {
  return group.metrics.map(({ name }) => metrics[name]?.step ?? null).find((read) => read !== null) ?? step;
}

/** The steps at which the numbers of a column were read, none where nothing was. */
export function stepsRead(key: string, rows: readonly Row[], { metrics }: Moment): readonly number[] {
  const used = new Set(rows.flatMap(({ cells }) => cells[key]?.metric ?? []));
  return [...new Set([...used].flatMap((name) => metrics[name]?.step ?? []))].sort((a, b) => a - b);
}

/** The metrics to ask for at a step, those of the columns and of the rows. */
export function wantedMetrics(group: Group, available: readonly RunMetric[]): readonly string[] {
  const names = new Set(available.map(({ name }) => name));
  const wanted = [group.metrics[0]?.name ?? "", ...columnsOf(group, available).flatMap(({ metrics }) => metrics)];
  return [...new Set(wanted)].filter((name) => names.has(name));
}

export function toNumber(written: Written): number {
  return typeof written === "number" ? written : Number(written ?? NaN);
}

/**
 * One row per site of a group's metrics, in depth order of the first that knows it; with `accusing` also one per layer that
 * an issue names.
 */
export function rowsOf(
  group: Group,
  moment: Moment,
  issues: readonly Issue[],
  columns: readonly Column[],
  accusing = true,
): readonly Row[] {
  const holding = issues.filter((issue) => issue.severity !== "INFO" && holdsAt(issue, moment.step));
  const accused = issuesByLayer(holding);
  const arriving = arrivals(
    moment.metrics["block.gradient_norm"],
    holding.find(({ issue_type }) => issue_type === "VANISHING"),
  );
  const finders = new Map(Object.entries(moment.metrics).map(([name, found]) => [name, new Finder(name, found)]));
  const sites = new Set(group.metrics.flatMap(({ name }) => moment.metrics[name]?.sites ?? []));
  return withAccused([...sites], accusing ? holding : []).map(({ site, depth }) => {
    const cells = Object.fromEntries(columns.map(({ key, metrics }) => [key, cellOf(site, metrics, finders)]));
    return {
      site,
      depth,
      issue: accused.get(site) ?? null,
      off: judge(columns, cells),
      arrives: arriving.get(site) ?? null,
      cells,
    };
  });
}

/** The sites in depth order, and the layers that issues name among them: where they lie, before all where that is nowhere. */
function withAccused(
  sites: readonly string[],
  issues: readonly Issue[],
): readonly { readonly site: string; readonly depth: number }[] {
  const places = new Map(sites.map((site, depth) => [site, depth]));
  for (const [site, depth] of [...places])
    for (let dot = site.indexOf("."); dot > 0; dot = site.indexOf(".", dot + 1))
      if (!places.has(site.slice(0, dot))) places.set(site.slice(0, dot), depth - 0.5);
  const here = new Set(sites);
  const absent = [...new Set(issues.flatMap(({ layers }) => layers))].filter((site) => site !== "" && !here.has(site));
  const placed = absent.slice(0, MOST_ACCUSED).map((site) => {
    let [depth, name] = [places.get(site), site];
    for (let dot = name.lastIndexOf("."); depth === undefined && dot > 0; dot = name.lastIndexOf(".")) {
      name = name.slice(0, dot);
      depth = here.has(name) ? (places.get(name) ?? 0) + 0.5 : undefined;
    }
    return { site, depth: depth ?? -1 };
  });
  return [...sites.map((site, depth) => ({ site, depth })), ...placed].sort((a, b) => a.depth - b.depth);
}

/** Of a vanishing gradient: the blocks at which less arrives than its threshold, or no more than where it accuses. */
function arrivals(norms: MetricMoment | undefined, issue: Issue | undefined): ReadonlyMap<string, number> {
  const found = new Map<string, number>();
  const last = toNumber(norms?.values.at(-1) ?? null);
  const shares = new Map((norms?.sites ?? []).map((site, i) => [site, toNumber(norms?.values[i] ?? null) / last]));
  const accused = (issue?.layers ?? []).map((layer) => shares.get(layer) ?? 0).filter(Number.isFinite);
  const enough = Math.max(Number(issue?.threshold), ...accused);
  for (const [site, share] of shares) if (share < enough) found.set(site, share);
  return found;
}

/** The first issue at each layer, or inside it. */
function issuesByLayer(issues: readonly Issue[]): ReadonlyMap<string, Issue> {
  const found = new Map<string, Issue>();
  for (const issue of issues) {
    for (const layer of issue.layers) {
      for (let name = layer, dot = name.length; dot > 0; dot = name.lastIndexOf("."), name = name.slice(0, dot))
        if (!found.has(name)) found.set(name, issue);
    }
  }
  return found;
}

/**
 * What of a row is not as it should be: the column of the first number that is none, or outside its thresholds, "" where all
 * lie within, null where none has thresholds that tell good from bad: two ends, or the most of a share.
 */
function judge(columns: readonly Column[], cells: Readonly<Record<string, Cell | null>>): string | null {
  let judged = false;
  for (const { key, share, marks } of columns) {
    const [low, high] = marks.length === 2 ? marks : share && (marks[0] ?? 0) > 0.5 ? [-Infinity, marks[0]] : [];
    const value = cells[key]?.value;
    if (value !== undefined && !Number.isFinite(value)) return key;
    if (low === undefined || high === undefined || value === undefined) continue;
    if (!(value >= low && value <= high)) return key;
    judged = true;
  }
  return judged ? "" : null;
}

const SEVERITY_ORDER = ["LOW", "MEDIUM", "HIGH", "CRITICAL"];

/** The word on a row: its issue, "ok" only where its numbers were judged and are fine. */
export function verdictOf({ issue, off, arrives }: Row): string {
  return (
    issue?.issue_type ?? (arrives !== null ? "outside" : off === null ? "no issue" : off === "" ? "ok" : "outside")
  );
}

/** Sorted rows whose name or verdict holds the text; what has no value comes last either way. */
export function arrange(rows: readonly Row[], key: SortKey, falling: boolean, filter: string): readonly Row[] {
  const text = filter.trim().toLowerCase();
  const shown = rows.filter((row) => `${row.site} ${verdictOf(row)}`.toLowerCase().includes(text));
  const rank = (row: Row): number => {
    if (key === "site") return row.depth;
    if (key === "verdict")
      return row.issue !== null
        ? 1 + SEVERITY_ORDER.indexOf(row.issue.severity)
        : row.off || row.arrives !== null
          ? 0
          : -1;
    const value = row.cells[key]?.value;
    return value === undefined ? -Infinity : Number.isNaN(value) ? Infinity : value;
  };
  const empty = (row: Row): boolean => key !== "site" && key !== "verdict" && (row.cells[key] ?? null) === null;
  const sign = falling ? -1 : 1;
  return [...shown].sort((a, b) => {
    if (empty(a) !== empty(b)) return empty(a) ? 1 : -1;
    const [left, right] = [rank(a), rank(b)];
    return left === right ? a.depth - b.depth : sign * (left < right ? -1 : 1);
  });
}

/** The points of a small line in a box, null where there is no number to draw. */
export function sparkline(
  values: ArrayLike<number>,
  log: boolean,
  width: number,
  height: number,
): readonly (readonly [number, number] | null)[] {
  const drawn = Array.from(values, (value) =>
    Number.isFinite(value) && (!log || value > 0) ? (log ? Math.log(value) : value) : null,
  );
  const known = drawn.filter((value): value is number => value !== null);
  const [low, high] = [
    known.reduce((a, b) => Math.min(a, b), Infinity),
    known.reduce((a, b) => Math.max(a, b), -Infinity),
  ];
  const y = (value: number): number =>
    high > low ? height - 1 - ((value - low) / (high - low)) * (height - 2) : height / 2;
  return drawn.map((value, i) =>
    value === null ? null : ([(i / Math.max(1, drawn.length - 1)) * width, y(value)] as const),
  );
}

/** What series hold at a step, where no server can be asked for the step itself. */
export function momentFrom(found: readonly Series[], step: number): Moment {
  const metrics: Record<string, MetricMoment> = {};
  for (const series of found) {
    const column = columnAt(series.first, step);
    const block = series.blocks.values().next().value;
    const values = series.sites.map((_, i): Written => {
      const at = i * series.columns + column;
      const kind = cellKind(block?.bits[at] ?? MISSING_BITS);
      const value = block?.values[at] ?? 0;
      if (kind === "missing" || column < 0) return null;
      return kind === "nan" ? "NaN" : kind === "inf" ? (value > 0 ? "Infinity" : "-Infinity") : value;
    });
    const read = series.last[column];
    metrics[series.metric] = { step: read === undefined ? null : Math.min(read, step), sites: series.sites, values };
  }
  const coarse = Math.max(1, ...found.filter(({ most }) => most > 1).map(({ width }) => width));
  return { step, metrics, ...(coarse > 1 ? { coarse } : {}) };
}

class Finder {
  readonly exact = new Map<string, Cell>();
  /** The greatest among the layers inside; NaN counts as greater than everything. */
  readonly within = new Map<string, Cell>();

  constructor(metric: string, { sites, values }: MetricMoment) {
    sites.forEach((site, i) => {
      const written = values[i] ?? null;
      if (written === null) return;
      const value = toNumber(written);
      this.exact.set(site, { value, metric, site, among: 1 });
      for (let dot = site.lastIndexOf("."); dot > 0; dot = site.lastIndexOf(".", dot - 1)) {
        const outer = site.slice(0, dot);
        const best = this.within.get(outer);
        const greater = best === undefined || Number.isNaN(value) || value > best.value;
        this.within.set(outer, { ...(greater ? { value, metric, site } : best), among: (best?.among ?? 0) + 1 });
      }
    });
  }
}

function cellOf(site: string, metrics: readonly string[], finders: ReadonlyMap<string, Finder>): Cell | null {
  const known = metrics.map((name) => finders.get(name)).filter((finder): finder is Finder => finder !== undefined);
  for (const kind of ["exact", "within"] as const) {
    for (const finder of known) {
      const cell = finder[kind].get(site);
      if (cell !== undefined) return cell;
    }
  }
  return null;
}
