// Asks the server for what is chosen and hands the answers to the views; an answer to an earlier question is dropped.
import {
  fetchAllHistograms,
  fetchAnnotations,
  fetchArchitecture,
  fetchCatalog,
  fetchHistograms,
  fetchIssues,
  fetchMeta,
  fetchMoment,
  fetchReading,
  fetchSeries,
  listHistograms,
  type SeriesQuery,
} from "./api";
import { answerOf } from "./answer";
import type { Choice } from "./choice";
import { inModelOrder, placesIn, type Module } from "./model/architecture";
import { alone, difference } from "./model/difference";
import { wantedMetrics, type Moment } from "./model/health";
import { firstMetric, offerMetrics } from "./model/offer";
import { FROM_LOSS, leftOf } from "./model/losing";
import { Recent } from "./model/recent";
import { bytesOf, type Series } from "./model/series";
import { isEvent, isProblem, metricFor, type Issue } from "./model/verdict";
import { runLabel } from "./model/labels";
import type { Views } from "./page";
import type { LineCard } from "./views/lines";
import type { MapContent } from "./views/map";
import { MOST_RIDGES, type Listed } from "./views/ridge";

const [TREND_COLUMNS, MOST_SUGGESTED, MOST_ACCUSED, KEPT_BYTES, MOST_CELLS] = [60, 3, 100, 12e6, 6e6];
const [LOSING_LINES, BYTES] = [6, 64];
/** Readings before the steps in view: the newest holds at their beginning, and the others tell how long. */
const BEFORE = 3;

export class Loader {
  /** Counts what was asked for. */
  #job = 0;
  #busy = 0;
  #version = "";
  #otherHolds: ReadonlySet<string> = new Set();
  #otherSites: readonly string[] = [];
  /** Which map is shown: its sites are known. */
  #mapped = "";
  #histograms: readonly Listed[] = [];
  #issues: readonly Issue[] = [];
  #modules: { readonly run: string; readonly list: readonly Module[] } | null = null;
  #tableShows = "";
  readonly #recent = new Recent<Series>(KEPT_BYTES, bytesOf);
  /** A zoom changes no step: its numbers are there already. */
  readonly #moments = new Recent<Moment>(KEPT_BYTES, ({ metrics }) =>
    Object.values(metrics).reduce((sum, { sites }) => sum + BYTES * sites.length, 0),
  );
  readonly #series = (query: SeriesQuery): Promise<Series> =>
    this.#recent.get(JSON.stringify(query), () => fetchSeries(query));

  constructor(
    private readonly now: Choice,
    private readonly views: Views,
  ) {}

  get idle(): boolean {
    return this.#busy === 0;
  }

  /** Answers on their way are not wanted any more. */
  drop(): void {
    this.#job++;
  }

  /** What was loaded of a run is not that of the next one. */
  forget(): void {
    [this.#version, this.#histograms] = ["", []];
    for (const kept of [this.#recent, this.#moments]) kept.forget();
    this.drop();
  }

  /** Nothing is lost on an error: what was shown stays, and the error is said above it. */
  async guard(work: () => Promise<void>): Promise<void> {
    this.#busy++;
    try {
      await work();
      this.views.showError("");
    } catch (error) {
      this.views.showError(`Could not load: ${error instanceof Error ? error.message : String(error)}`);
    } finally {
      this.#busy--;
    }
  }

  /** Loads a run whole, unless this version of it, and of the one compared with, is shown already. */
  async run(run: string, own: string): Promise<void> {
    const { now, views } = this;
    const version = `${own}\n${now.otherRun(run)?.version ?? ""}`;
    if (run === now.run && version === this.#version && now.meta !== null) return;
    const job = ++this.#job;
    const [meta, { issues }, histograms, annotations] = await Promise.all([
      fetchMeta(run),
      fetchIssues(run),
      listHistograms(run),
      fetchAnnotations(run),
      this.#meetOther(run),
    ]);
    if (job !== this.#job) return;
    for (const kept of [this.#recent, this.#moments]) kept.forget();
    // All that stands above the map is known before it is shown, so that nothing moves when it arrives.
    const [modules, answer] = await Promise.all([this.#architecture(run), answerOf(this.#series, run, meta, issues)]);
    if (job !== this.#job) return;
    const fresh = now.meta === null;
    [now.run, this.#version, now.meta, now.annotations] = [run, version, meta, annotations];
    if (!meta.phases.includes(now.phase)) now.phase = "";
    const worst = issues.find(isProblem);
    // The map opens on what the verdict is about, unless somebody asked for something else.
    if (fresh && worst !== undefined && (now.metric === "" || !now.asked))
      now.metric = metricFor(
        worst,
        now.held.map(({ name }) => name),
        "",
      );
    // A metric that this run lacks stays chosen where somebody asked for it by name: the map then says how to get it.
    if (now.spec(now.metric) === undefined) {
      if (now.asked && now.metric !== "") await this.#learnCatalog();
      if (!now.asked || now.catalogued(now.metric) === undefined) now.metric = firstMetric(now.held, now.metric);
    }
    views.page.hidden = false;
    views.header.showMeta(meta, now.phase);
    views.architecture.show(modules);
    views.verdict.show(issues, meta, (layer) => placesIn(modules, layer));
    views.verdict.showLoss(answer.loss);
    views.verdict.showCourses(answer.courses);
    if (fresh) this.#begin(issues);
    views.strip.show(issues, meta.first ?? 0, meta.last ?? 0);
    [this.#issues, this.#histograms] = [issues, inModelOrder(modules, histograms, ({ site }) => site)];
    this.offer();
    await this.#charts(job, fresh ? issues : []);
    await this.#learnCatalog();
    if (job === this.#job) this.offer();
  }

  /** Another run to compare with, or none. */
  async other(): Promise<void> {
    this.#version = this.#version.replace(/\n.*$/, `\n${this.now.otherRun(this.now.run)?.version ?? ""}`);
    const job = ++this.#job;
    for (const kept of [this.#recent, this.#moments]) kept.forget();
    await this.guard(async () => {
      await this.#meetOther(this.now.run);
      if (job === this.#job) await this.#charts(job);
    });
  }

  /** Everything that depends on metric, phase, reduction or steps in view. */
  charts(): Promise<void> {
    return this.guard(() => this.#charts(this.#job));
  }

  line(card: LineCard): Promise<void> {
    return this.guard(() => this.#line(card, this.#job));
  }

  /** The table follows the step a moment later, so that a slider can be dragged; `anew` loads the trends as well. */
  table(anew: boolean): Promise<void> {
    return this.guard(() => this.#table(this.#job, anew));
  }

  ridges(): Promise<void> {
    return this.guard(() => this.#ridges(this.#job));
  }

  /** Offers what can be chosen in each view. */
  offer(): void {
    const { now, views } = this;
    const [every, sites] = [offerMetrics(now.held, now.catalog, () => true), now.spec(now.metric)?.sites ?? 0];
    views.map.offer(every, now.metric, sites);
    views.second.offer([], "", sites);
    views.table.showMeta(now.run, now.held, this.#issues);
    views.curves.offer(now.held, now.catalog);
    views.losing.offer(now.spec(FROM_LOSS) !== undefined);
  }

  async #learnCatalog(): Promise<void> {
    if (this.now.catalog.length === 0) this.now.catalog = await fetchCatalog();
  }

  /** Learns what the run compared with holds, so that nothing is asked in vain. */
  async #meetOther(run: string): Promise<void> {
    const other = this.now.otherRun(run);
    const meta = other === undefined ? undefined : await fetchMeta(other.run);
    if (other?.run !== this.now.otherRun(run)?.run) return;
    const held = (meta?.metrics ?? []).filter((metric) => this.now.inPhase(metric));
    this.#otherHolds = new Set(held.map(({ name }) => name));
    this.views.verdict.showOther(meta ? [runLabel(meta.run), meta.said] : null);
  }

  async #charts(job: number, suggest: readonly Issue[] = []): Promise<void> {
    const { now, views } = this;
    const { cards } = views.curves;
    // The map first: a server that works on the lines at the same time answers later.
    await Promise.all([this.#map(job), this.#land(job)]);
    if (job !== this.#job) return;
    this.#mapped = `${now.run}\n${now.metric}`;
    if (suggest.length > 0 && now.pins.length === 0) now.pins = this.#suggestedPins(suggest);
    views.showPins();
    await Promise.all(cards.map((card) => this.#line(card, job)));
    if (job !== this.#job) return;
    views.strip.showRange(now.extent);
    views.showStep();
    views.ridges.offer(this.#histograms, now.pins);
    await Promise.all([this.#table(job, true), this.#ridges(job)]);
  }

  /** What an issue is about was read at its step, or next after it: before it all may have been well. */
  async #land(job: number): Promise<void> {
    const { run, metric, phase, landing } = this.now;
    if (landing === null || this.now.spec(metric) === undefined) return;
    const step = await fetchReading(run, metric, landing, phase);
    if (job !== this.#job) return;
    [this.now.step, this.now.landing] = [step, null];
    this.views.save();
  }

  /** An event is looked at where it happened, what holds on at the last step. */
  #begin(issues: readonly Issue[]): void {
    const { now } = this;
    const worst = issues.find(isProblem);
    if (worst !== undefined && isEvent(worst) && now.step === null && !now.placed) now.land(worst.step);
    now.placed = true;
  }

  /** The model does not change while a run goes on. */
  async #architecture(run: string): Promise<readonly Module[]> {
    if (this.#modules?.run !== run || this.#modules.list.length === 0)
      this.#modules = { run, list: await fetchArchitecture(run) };
    return this.#modules.list;
  }

  /** The layers that open problems are about, those of the worst first. */
  get #accused(): readonly string[] {
    return [...new Set(this.#issues.filter(isProblem).flatMap(({ layers }) => layers))].slice(0, MOST_ACCUSED);
  }

  #suggestedPins(issues: readonly Issue[]): readonly string[] {
    const open = issues.filter(({ state }) => state === "open").flatMap(({ layers }) => layers);
    return [...new Set(open)].filter((layer) => this.views.map.sites.includes(layer)).slice(0, MOST_SUGGESTED);
  }

  async #map(job: number): Promise<void> {
    const {
      now,
      views: { map, second },
    } = this;
    const { run, metric, phase, reduce, range } = now;
    map.bar.showZoom(range !== null);
    const [spec, other] = [now.spec(metric), now.otherRun(run)];
    this.#otherSites = [];
    if (spec === undefined) {
      second.root.hidden = true;
      const entry = now.catalogued(metric) ?? null;
      return map.clear(entry === null ? "this run has no metrics yet" : "not in this run", "", entry);
    }
    // Fewer columns where there are very many rows: each column keeps its extreme, and a closer look asks again.
    const columns = Math.min(map.columns, Math.max(200, Math.floor(MOST_CELLS / Math.max(1, spec.sites))));
    const query = { run, metric, phase, columns, reduce, range, before: range === null ? 0 : BEFORE };
    const theirs =
      other !== undefined && this.#otherHolds.has(metric) ? this.#series({ ...query, run: other.run }) : null;
    const [series, found] = await Promise.all([this.#series(query), theirs]);
    if (job !== this.#job || series.metric !== now.metric) return;
    this.#otherSites = found?.sites ?? [];
    map.bar.showMode(other === undefined ? null : now.mode);
    second.root.hidden = other === undefined || now.mode === "difference";
    const order = now.meta?.sessions.at(-1)?.blocks ?? [];
    const content = {
      series,
      spec,
      range: now.extent,
      of: "",
      like: null,
      accused: this.#accused,
      order,
      annotations: now.annotations,
    };
    if (other === undefined) map.show(content);
    else this.#showTwo(content, found, other.run);
  }

  #showTwo(own: MapContent, found: Series | null, run: string): void {
    const { map, second } = this.views;
    const [mine, theirs, { spec }] = [runLabel(this.now.run), runLabel(run), own];
    if (this.now.mode === "difference") {
      const apart = found === null ? null : difference(own.series, found, spec);
      if (apart !== null) {
        const of = `${mine} against ${theirs}${alone(own.series, found, apart.series.sites.length)}`;
        return map.show({ ...own, ...apart, of });
      }
      return map.clear(found === null ? `${theirs} holds no ${spec.title}` : `${theirs} has no layer of the same name`);
    }
    map.show({ ...own, of: mine });
    // The issues are those of the first run.
    if (found === null) second.clear(`${theirs} holds no ${spec.title}`, theirs);
    else second.show({ ...own, series: found, of: theirs, like: map, accused: [], annotations: [] });
  }

  async #line(card: LineCard, job: number): Promise<void> {
    const { now, views } = this;
    const { run, phase, metric, pins, range, extent } = now;
    const other = now.otherRun(run);
    await views.curves.load(card, {
      run,
      other: other?.run ?? null,
      phase,
      metric,
      pins,
      sites: this.#mapped === `${run}\n${metric}` ? views.map.sites : null,
      otherSites: this.#otherSites,
      otherHolds: this.#otherHolds,
      range,
      extent,
      step: () => now.currentStep,
      series: this.#series,
      annotations: now.annotations,
      started: [now.meta?.started ?? 0, other?.started ?? 0],
      spec: (name) => now.spec(name),
      entry: (name) => now.catalogued(name),
      // Of several pins in a row only the last answer counts, whichever comes first.
      current: () => job === this.#job && (card.kind === "run" || pins === now.pins),
    });
  }

  async #table(job: number, anew: boolean): Promise<void> {
    const { run, meta, currentStep, phase, range, held } = this.now;
    const { views } = this;
    const { table } = views;
    const { group } = table;
    const metric = group?.metrics[0];
    const shows = [run, this.#version, currentStep, group?.key, phase].join("\n");
    if (meta === null || group === null || metric === undefined || (shows === this.#tableShows && !anew)) return;
    const query = { run, metric: metric.name, phase, columns: TREND_COLUMNS, reduce: "extreme", range };
    const [moment, trend] = await Promise.all([
      this.#moment(wantedMetrics(group, held)),
      anew ? this.#series(query) : null,
    ]);
    if (job !== this.#job) return;
    this.#tableShows = shows;
    await this.#losing(job, anew);
    views.architecture.colour(views.map.shade, views.map.reading);
    if (job !== this.#job) return;
    if (trend !== null) table.showTrend(trend, metric.scale === "log");
    table.show(group, moment);
  }

  #moment(metrics: readonly string[], run = this.now.run): Promise<Moment> {
    const { currentStep, phase } = this.now;
    const key = JSON.stringify([run, currentStep, phase, metrics]);
    return this.#moments.get(key, () => fetchMoment(run, currentStep, metrics, phase));
  }

  /** What is left of the gradient by depth, at the chosen step, in each run that is compared. */
  async #losing(job: number, anew: boolean): Promise<void> {
    const {
      now,
      views: { losing },
    } = this;
    if (now.spec(FROM_LOSS) === undefined) return;
    const query = {
      run: now.run,
      metric: FROM_LOSS,
      phase: now.phase,
      columns: LOSING_LINES,
      reduce: "mean",
      range: now.range,
    };
    const other = now.otherRun(now.run);
    const [moment, earlier, theirs] = await Promise.all([
      this.#moment([FROM_LOSS]),
      anew && other === undefined ? this.#series(query) : null,
      other !== undefined && this.#otherHolds.has(FROM_LOSS) ? this.#moment([FROM_LOSS], other.run) : null,
    ]);
    const found = moment.metrics[FROM_LOSS];
    if (job !== this.#job || found === undefined) return;
    if (earlier !== null) losing.showEarlier(earlier);
    const beside = other === undefined ? [] : [leftOf(runLabel(other.run), theirs?.metrics[FROM_LOSS])];
    losing.show([leftOf(runLabel(now.run), found), ...beside]);
  }

  async #ridges(job: number): Promise<void> {
    const { ridges } = this.views;
    if (ridges.site === "") return;
    if (ridges.form === "all") {
      const { run, range } = this.now;
      const every = await fetchAllHistograms(run, ridges.metric, ridges.most, range);
      if (job === this.#job) ridges.showAll(inModelOrder(this.#modules?.list ?? [], every, ({ site }) => site));
      return;
    }
    const found = await fetchHistograms(this.now.run, ridges.metric, ridges.site, MOST_RIDGES, this.now.range);
    if (job === this.#job) ridges.show(found);
  }
}
