// The plugin's routes. Addresses are relative to the frame's base, so that --path_prefix and experiments work.
import type { Module } from "./model/architecture";
import type { Moment } from "./model/health";
import type { Histograms, SiteHistograms } from "./model/ridge";
import type { Overview } from "./model/overview";
import { offline } from "./offline";
import { columnAt, decodeSeries, type Series } from "./model/series";
import type { Issue, Verdict } from "./model/verdict";
import type { MetricSpec } from "./schema";

export type RunState = "closed" | "running" | "silent";

export interface RunSummary {
  readonly run: string;
  readonly version: string;
  readonly first: number | null;
  readonly last: number | null;
  readonly started: number | null;
  readonly updated: number;
  /** Whether the last session was closed, or else nothing was written for longer than usual; an older page has none. */
  readonly state?: RunState;
  /** The model, where its folder holds several runs. */
  readonly model?: string | null;
  readonly parameters?: number | null;
  readonly too_new: number;
  /** Records that could not be understood and were left out; an older server does not count them. */
  readonly damaged?: number;
}

export interface Session {
  readonly session: string;
  readonly started: number | null;
  readonly model?: string;
  readonly parameters?: number;
  /** The blocks of the model in the order of the forward pass. */
  readonly blocks?: readonly string[];
  readonly world_size?: number;
}

/** A metric of the catalogue, and what makes a run hold it. */
export interface CatalogEntry extends MetricSpec {
  readonly how: string;
  readonly code: string;
}

export interface RunMetric extends MetricSpec {
  readonly first: number;
  readonly last: number;
  readonly sites: number;
  /** The phases in which it was read. */
  readonly phases: readonly string[];
  /** Whether values are those of one run measured by another. */
  readonly compared?: boolean;
}

export interface RunMeta extends RunSummary {
  readonly sessions: readonly Session[];
  readonly phases: readonly string[];
  readonly metrics: readonly RunMetric[];
  /** Medians of the first five and the last five losses, null before ten; a page that was kept earlier has none. */
  readonly loss?: { readonly first: number; readonly last: number } | null;
  readonly said: Verdict;
  /** Steps without a record, and records that could not be written. */
  readonly lost?: number;
}

export interface SeriesQuery {
  readonly run: string;
  readonly metric: string;
  /** Empty for training. */
  readonly phase: string;
  readonly columns: number;
  readonly reduce: string;
  readonly range: readonly [number, number] | null;
  readonly sites?: readonly string[];
  /** How many readings before the range are wanted as well. */
  readonly before?: number;
}

export async function fetchRuns(): Promise<readonly RunSummary[]> {
  const kept = offline();
  if (kept !== null) return kept.runs;
  return ((await getJson("runs")) as { readonly runs: readonly RunSummary[] }).runs;
}

/** What is known of all runs after about so many milliseconds. */
export async function fetchOverview(patience: number): Promise<Overview> {
  const kept = offline();
  return kept === null ? ((await getJson(`overview?patience=${patience}`)) as Overview) : kept.overview;
}

export async function fetchCatalog(): Promise<readonly CatalogEntry[]> {
  const kept = offline();
  if (kept !== null) return kept.catalog;
  return ((await getJson("catalog")) as { readonly metrics: readonly CatalogEntry[] }).metrics;
}

export async function fetchMeta(run: string): Promise<RunMeta> {
  const kept = offline();
  if (kept !== null) return kept.run(run).meta;
  return (await getJson(`meta?${new URLSearchParams({ run })}`)) as RunMeta;
}

/** Issues, the worst first; of very many the first ones only. */
export interface Issues {
  readonly issues: readonly Issue[];
}

export async function fetchIssues(run: string): Promise<Issues> {
  const kept = offline();
  if (kept === null) return (await getJson(`issues?${new URLSearchParams({ run })}`)) as Issues;
  const { issues } = kept.run(run);
  return { issues };
}

export async function fetchSeries(query: SeriesQuery): Promise<Series> {
  const kept = offline();
  if (kept !== null) return kept.series(query.run, query.metric, query.reduce, query.sites ?? []);
  const args = new URLSearchParams({ run: query.run, metric: query.metric, reduce: query.reduce });
  args.set("columns", String(Math.max(1, Math.min(8192, Math.round(query.columns)))));
  if (query.range !== null) {
    args.set("first", String(Math.floor(query.range[0])));
    args.set("last", String(Math.ceil(query.range[1])));
    if (query.before) args.set("before", String(query.before));
  }
  if (query.phase !== "") args.set("phase", query.phase);
  for (const site of query.sites ?? []) args.append("site", site);
  return decodeSeries(await (await get(`series?${args}`)).arrayBuffer());
}

/** What belongs on every time axis: a mark of the user, a checkpoint, a change of the learning rate, a resumed run, a gap. */
export interface Annotation {
  readonly kind: string;
  readonly step: number;
  readonly last: number;
  readonly text: string;
}

export async function fetchAnnotations(run: string): Promise<readonly Annotation[]> {
  const kept = offline();
  if (kept !== null) return kept.run(run).annotations;
  return (
    (await getJson(`annotations?${new URLSearchParams({ run })}`)) as { readonly annotations: readonly Annotation[] }
  ).annotations;
}

export async function fetchArchitecture(run: string): Promise<readonly Module[]> {
  const kept = offline();
  if (kept !== null) return kept.run(run).architecture;
  return ((await getJson(`architecture?${new URLSearchParams({ run })}`)) as { readonly modules: readonly Module[] })
    .modules;
}

/** First and last step of the readings of a metric before and after a step. */
export async function fetchAround(
  run: string,
  metric: string,
  step: number,
  count: number,
): Promise<readonly [number, number]> {
  const kept = offline();
  const args = new URLSearchParams({ run, metric, step: String(step), count: String(count) });
  const series =
    kept === null
      ? decodeSeries(await (await get(`around?${args}`)).arrayBuffer())
      : await kept.series(run, metric, "extreme", []);
  const at = columnAt(series.first, step);
  const [from, to] =
    kept === null ? [0, series.columns - 1] : [Math.max(0, at - count), Math.min(series.columns - 1, at + count)];
  return [series.first[from] ?? step, series.last[to] ?? step];
}

/** The first step with readings of a metric at or after a step, or the last where there is none. */
export async function fetchReading(run: string, metric: string, step: number, phase: string): Promise<number> {
  const kept = offline();
  const args = new URLSearchParams({ run, metric, step: String(step), count: "1", ...(phase === "" ? {} : { phase }) });
  const { first, last, columns } =
    kept === null
      ? decodeSeries(await (await get(`around?${args}`)).arrayBuffer())
      : await kept.series(run, metric, "extreme", []);
  for (let i = 0; i < columns; i++) if ((last[i] ?? 0) >= step) return Math.max(step, first[i] ?? 0);
  return last[columns - 1] ?? step;
}

export async function fetchMoment(
  run: string,
  step: number,
  metrics: readonly string[],
  phase: string,
): Promise<Moment> {
  const kept = offline();
  if (kept !== null) return kept.moment(run, step, metrics);
  const args = new URLSearchParams({ run, step: String(Math.round(step)) });
  if (phase !== "") args.set("phase", phase);
  for (const metric of metrics) args.append("metric", metric);
  return (await getJson(`moment?${args}`)) as Moment;
}

export async function listHistograms(
  run: string,
): Promise<readonly { readonly metric: string; readonly site: string }[]> {
  const kept = offline();
  if (kept !== null) return kept.run(run).histograms;
  return (
    (await getJson(`histograms?${new URLSearchParams({ run })}`)) as {
      readonly items: readonly { metric: string; site: string }[];
    }
  ).items;
}

export async function fetchHistograms(
  run: string,
  metric: string,
  site: string,
  most: number,
  range: readonly [number, number] | null,
): Promise<Histograms> {
  const found = offline()
    ?.run(run)
    .histograms.find((item) => item.metric === metric && item.site === site);
  if (found !== undefined)
    return {
      ...found,
      histograms: found.histograms.filter(({ step }) => range === null || (step >= range[0] && step <= range[1])),
    };
  const args = new URLSearchParams({ run, metric, site, most: String(most) });
  if (range !== null) {
    args.set("first", String(range[0]));
    args.set("last", String(range[1]));
  }
  return (await getJson(`histograms?${args}`)) as Histograms;
}

/** The histograms of every parameter, each evenly thinned out. */
export async function fetchAllHistograms(
  run: string,
  metric: string,
  most: number,
  range: readonly [number, number] | null,
): Promise<readonly SiteHistograms[]> {
  const inRange = ({ step }: { readonly step: number }): boolean =>
    range === null || (step >= range[0] && step <= range[1]);
  const kept = offline();
  if (kept !== null)
    return kept
      .run(run)
      .histograms.filter((item) => item.metric === metric)
      .map((item) => ({ ...item, histograms: item.histograms.filter(inRange) }));
  const args = new URLSearchParams({ run, metric, most: String(most) });
  if (range !== null) {
    args.set("first", String(range[0]));
    args.set("last", String(range[1]));
  }
  return ((await getJson(`histograms?${args}`)) as { readonly sites: readonly SiteHistograms[] }).sites;
}

async function getJson(address: string): Promise<unknown> {
  return (await get(address)).json();
}

async function get(address: string): Promise<Response> {
  const response = await fetch(`./${address}`);
  if (!response.ok) {
    const body = (await response.json().catch(() => ({}))) as { readonly error?: string };
    throw new Error(body.error ?? `the server answered ${response.status}`);
  }
  return response;
}
