// Holds what is chosen and loaded, and tells the views; the views never talk to each other.
import { fetchCatalog, fetchHistograms, fetchIssues, fetchMeta, fetchMoment, fetchRuns, fetchSeries, listHistograms, type CatalogEntry, type RunMeta, type RunMetric, type RunSummary } from "./api";
import { el } from "./dom";
import { hostHash, isVisible, saveState } from "./host";
import { difference } from "./model/difference";
import { wantedMetrics } from "./model/health";
import { firstMetric, offerMetrics } from "./model/offer";
import type { Series } from "./model/series";
import { parseHash, type Mode, type Reducer } from "./model/url";
import { metricFor, type Issue } from "./model/verdict";
import { panBy, zoomBy, type Range } from "./model/zoom";
import { PIN_COLOURS } from "./style";
import { Curves, type CurveContext } from "./views/curves";
import { emptyState } from "./views/empty";
import { Header, runLabel } from "./views/header";
import { MetricInfo } from "./views/info";
import type { LineCard } from "./views/lines";
import { MapView, type MapEvents } from "./views/map";
import { MOST_RIDGES, RidgeView, type Listed } from "./views/ridge";
import { StripView } from "./views/strip";
import { HealthTable } from "./views/table";
import { Tooltip } from "./views/tooltip";
import { VerdictView } from "./views/verdict";

type Timer = "resize" | "table" | "save" | "zoom";

const [POLL_MS, RESIZE_MS, TABLE_MS, SAVE_MS, WHEEL_MS] = [4000, 120, 120, 100, 90];
const [TREND_COLUMNS, MOST_SUGGESTED] = [60, 3];

export class Panel {
  readonly root = el("div");
  readonly #tooltip = new Tooltip();
  readonly #info = new MetricInfo();
  readonly #header = new Header(
    {
      run: (run) => void this.#openRun(run),
      compare: (run) => void this.#compare(run, this.#mode),
      step: (step) => this.#moveTo(step),
      live: (on) => this.#setLive(on),
      phase: (word) => void this.#setPhase(word),
    },
    true,
  );
  readonly #verdict = new VerdictView((issue) => void this.#pick(issue));
  readonly #strip = new StripView((issue) => void this.#pick(issue));
  readonly #navigate = {
    step: (step: number) => this.#moveTo(step >= (this.#meta?.last ?? Infinity) ? null : step),
    zoom: (range: Range | null) => this.#zoom(range, 0),
    zoomBy: (factor: number, at: number) => this.#zoomBy(factor, at),
    pan: (share: number) => this.#pan(share),
  };
  readonly #mapEvents: MapEvents = {
    ...this.#navigate,
    metric: (name) => void this.#setMetric(name),
    pin: (site) => void this.#togglePin(site),
    hover: (step, site) => this.#point(step, null, site),
    mode: (mode) => void this.#compare(this.#other, mode),
    reduce: (reducer) => void this.#setReduce(reducer),
  };
  readonly #map = new MapView(this.#mapEvents, this.#tooltip, this.#info);
  readonly #second = new MapView(this.#mapEvents, this.#tooltip, this.#info, true);
  readonly #table = new HealthTable({
    kind: () => void this.#guard(() => this.#loadTable(this.#job, true)),
    pin: (site, metric) => void this.#pinRow(site, metric),
  });
  readonly #ridges = new RidgeView(() => void this.#guard(() => this.#loadRidges(this.#job)));
  readonly #curves = new Curves(
    {
      ...this.#navigate,
      hover: (step, from) => this.#point(step, from, null),
      unpin: (site) => void this.#togglePin(site),
      load: (card) => void this.#guard(() => this.#loadLine(card, this.#job)),
      changed: () => this.#save(),
    },
    this.#tooltip,
    this.#info,
  );
  readonly #error = el("div", { class: "card error", attrs: { role: "alert", "data-part": "error" } });
  readonly #page: HTMLElement;
  #run = "";
  #version = "";
  #runs: readonly RunSummary[] = [];
  #catalog: readonly CatalogEntry[] = [];
  /** The run compared with, empty for none. */
  #other = "";
  #mode: Mode = "beside";
  #otherHolds: ReadonlySet<string> = new Set();
  #otherSites: readonly string[] = [];
  #metric = "";
  /** Whether somebody asked for the metric, by a choice or a link. */
  #asked = true;
  #reduce: Reducer = "extreme";
  #phase = "";
  #meta: RunMeta | null = null;
  #range: Range | null = null;
  #step: number | null = null;
  #pins: readonly string[] = [];
  #live = true;
  #dark = false;
  /** Counts what was asked for; an answer to an earlier question is dropped. */
  #job = 0;
  #busy = 0;
  /** Which map is shown: its sites are known. */
  #mapped = "";
  #histograms: readonly Listed[] = [];
  #issues: readonly Issue[] = [];
  #tableShows = "";
  readonly #timers: Record<Timer, number> = { resize: 0, table: 0, save: 0, zoom: 0 };

  constructor() {
    const views = [this.#verdict, this.#strip, this.#map, this.#second, this.#curves, this.#table, this.#ridges, this.#info];
    this.#page = el("main", { class: "page" }, this.#header.root, this.#error, ...views.map(({ root }) => root));
    this.#page.hidden = this.#second.root.hidden = true;
    this.root.append(this.#page, this.#tooltip.root);
  }

  async start(): Promise<void> {
    const wanted = parseHash(hostHash());
    [this.#run, this.#metric, this.#step, this.#pins] = [wanted.run ?? "", wanted.metric ?? "", wanted.step ?? null, wanted.pins ?? []];
    [this.#other, this.#mode, this.#range] = [wanted.other ?? "", wanted.mode ?? "beside", wanted.zoom ?? null];
    [this.#reduce, this.#phase] = [wanted.reduce ?? "extreme", wanted.phase ?? ""];
    this.#curves.restore(wanted);
    this.#map.showReducer(this.#reduce);
    await this.refresh();
    document.body.dataset["ready"] = "1";
    const look = (): void => {
      if (this.#live && this.#busy === 0 && isVisible()) void this.refresh();
    };
    window.setInterval(look, POLL_MS);
    document.addEventListener("visibilitychange", look);
    let width = window.innerWidth;
    window.addEventListener("resize", () => {
      this.#later("resize", RESIZE_MS, () => {
        if (!isVisible()) return;
        // A tab that is shown again has the size it had.
        if (window.innerWidth === width) return look();
        width = window.innerWidth;
        void this.#reload();
      });
    });
  }

  /** Looks for runs and new steps; one small request when there is nothing new. */
  async refresh(): Promise<void> {
    await this.#guard(async () => {
      const runs = await fetchRuns();
      const current = runs.find(({ run }) => run === this.#run) ?? runs[0];
      if (current === undefined) {
        if (this.#meta === null) this.root.replaceChildren(emptyState(), this.#tooltip.root);
        return;
      }
      if (this.#page.parentNode !== this.root) this.root.replaceChildren(this.#page, this.#tooltip.root);
      this.#runs = runs;
      if (this.#otherRun(current.run) === undefined) this.#other = "";
      this.#header.showRuns(runs, current.run, this.#other);
      const version = `${current.version}\n${this.#otherRun(current.run)?.version ?? ""}`;
      if (current.run === this.#run && version === this.#version && this.#meta !== null) return;
      await this.#load(current.run, version);
    });
  }

  themed(dark: boolean): void {
    this.#dark = dark;
    this.#map.themed(dark);
    this.#second.themed(dark);
    this.#curves.redraw();
  }

  async #openRun(run: string): Promise<void> {
    [this.#run, this.#version, this.#range, this.#step, this.#pins, this.#phase] = [run, "", null, null, [], ""];
    if (this.#other === run) this.#other = "";
    [this.#meta, this.#asked, this.#histograms] = [null, false, []];
    // Answers about the run before are not wanted any more.
    this.#job++;
    await this.refresh();
    this.#save();
  }

  async #compare(run: string, mode: Mode): Promise<void> {
    [this.#other, this.#mode] = [run, mode];
    this.#version = this.#version.replace(/\n.*$/, `\n${this.#otherRun(this.#run)?.version ?? ""}`);
    this.#save();
    if (this.#meta === null) return this.refresh();
    const job = ++this.#job;
    await this.#guard(async () => {
      await this.#meetOther(this.#run);
      if (job === this.#job) await this.#loadCharts(job);
    });
  }

  /** Learns what the run compared with holds, so that nothing is asked in vain. */
  async #meetOther(run: string): Promise<void> {
    const other = this.#otherRun(run);
    const metrics = other === undefined ? [] : (await fetchMeta(other.run)).metrics;
    if (other?.run === this.#otherRun(run)?.run) this.#otherHolds = new Set(metrics.filter((metric) => this.#inPhase(metric)).map(({ name }) => name));
  }

  async #load(run: string, version: string): Promise<void> {
    const job = ++this.#job;
    const [meta, issues, histograms] = await Promise.all([fetchMeta(run), fetchIssues(run), listHistograms(run), this.#meetOther(run)]);
    if (job !== this.#job) return;
    const fresh = this.#meta === null;
    [this.#run, this.#version, this.#meta] = [run, version, meta];
    if (!meta.phases.includes(this.#phase)) this.#phase = "";
    // A metric that this run lacks stays chosen where somebody asked for it by name: the map then says how to get it.
    if (this.#spec(this.#metric) === undefined) {
      if (this.#asked && this.#metric !== "") await this.#learnCatalog();
      if (!this.#asked || this.#catalogued(this.#metric) === undefined) this.#metric = firstMetric(this.#held, this.#metric);
    }
    this.#page.hidden = false;
    this.#header.showMeta(meta, this.#phase);
    this.#verdict.show(issues, meta.last);
    this.#strip.show(issues, meta.first ?? 0, meta.last ?? 0);
    this.#issues = issues;
    this.#offer();
    this.#histograms = histograms;
    await this.#loadCharts(job, fresh ? issues : []);
    await this.#learnCatalog();
    if (job === this.#job) this.#offer();
  }

  async #learnCatalog(): Promise<void> {
    if (this.#catalog.length === 0) this.#catalog = await fetchCatalog();
  }

  #offer(): void {
    const [every, chosen] = [offerMetrics(this.#held, this.#catalog, () => true), this.#spec(this.#metric)];
    this.#map.offer(every, this.#metric, chosen?.sites ?? 0);
    this.#second.offer([], "", chosen?.sites ?? 0);
    this.#table.showMeta(this.#run, this.#held, this.#issues);
    this.#curves.offer(this.#held, this.#catalog);
  }

  async #loadCharts(job: number, suggest: readonly Issue[] = []): Promise<void> {
    const pinned = this.#curves.pinned;
    const sums = this.#curves.cards.filter((card) => card !== pinned);
    await Promise.all([
      this.#loadMap(job).then(() => {
        if (job !== this.#job) return undefined;
        this.#mapped = `${this.#run}\n${this.#metric}`;
        if (suggest.length > 0 && this.#pins.length === 0) this.#pins = this.#suggestedPins(suggest);
        this.#showPins();
        return pinned === undefined ? undefined : this.#loadLine(pinned, job);
      }),
      ...sums.map((card) => this.#loadLine(card, job)),
    ]);
    if (job !== this.#job) return;
    if (this.#range === null) this.#verdict.showCourse(sums[0]?.course ?? null);
    this.#strip.showRange(this.#extent());
    this.#showStep();
    this.#ridges.offer(this.#histograms, this.#pins);
    await Promise.all([this.#loadTable(job, true), this.#loadRidges(job)]);
  }

  async #loadRidges(job: number): Promise<void> {
    if (this.#ridges.site === "") return;
    const found = await fetchHistograms(this.#run, this.#ridges.metric, this.#ridges.site, MOST_RIDGES, this.#range);
    if (job === this.#job) this.#ridges.show(found);
  }

  async #loadMap(job: number): Promise<void> {
    this.#map.showZoom(this.#range !== null);
    const [spec, other] = [this.#spec(this.#metric), this.#otherRun(this.#run)];
    this.#otherSites = [];
    if (spec === undefined) {
      this.#second.root.hidden = true;
      const entry = this.#catalogued(this.#metric) ?? null;
      return this.#map.clear(entry === null ? "this run holds no metric yet" : "not in this run", "", entry);
    }
    const query = { run: this.#run, metric: this.#metric, phase: this.#phase, columns: this.#map.columns, reduce: this.#reduce, range: this.#range };
    const theirs = other !== undefined && this.#otherHolds.has(this.#metric) ? fetchSeries({ ...query, run: other.run }) : null;
    const [series, found] = await Promise.all([fetchSeries(query), theirs]);
    if (job !== this.#job || series.metric !== this.#metric) return;
    this.#otherSites = found?.sites ?? [];
    this.#map.showMode(other === undefined ? null : this.#mode);
    this.#second.root.hidden = other === undefined || this.#mode === "difference";
    const content = { series, spec, range: this.#extent(), dark: this.#dark, of: "", like: null };
    if (other === undefined) this.#map.show(content);
    else this.#showTwo(content, found, other.run);
  }

  #showTwo(own: Parameters<MapView["show"]>[0], found: Series | null, run: string): void {
    const [mine, theirs, { spec }] = [runLabel(this.#run), runLabel(run), own];
    if (this.#mode === "difference") {
      const apart = found === null ? null : difference(own.series, found, spec);
      if (apart !== null) return this.#map.show({ ...own, ...apart, of: `${mine} against ${theirs}` });
      return this.#map.clear(found === null ? `${theirs} holds no ${spec.title}` : `${theirs} has no layer of the same name`);
    }
    this.#map.show({ ...own, of: mine });
    if (found === null) this.#second.clear(`${theirs} holds no ${spec.title}`, theirs);
    else this.#second.show({ ...own, series: found, of: theirs, like: this.#map });
  }

  #otherRun(run: string): RunSummary | undefined {
    return this.#other === run ? undefined : this.#runs.find((item) => item.run === this.#other);
  }

  /** The table follows the step a moment later, so that a slider can be dragged; `anew` loads the trends as well. */
  async #loadTable(job: number, anew: boolean): Promise<void> {
    const [group, run] = [this.#table.group, this.#run];
    const metric = group?.metrics[0];
    const shows = [run, this.#version, this.#currentStep, group?.key, this.#phase].join("\n");
    if (this.#meta === null || group === null || metric === undefined || (shows === this.#tableShows && !anew)) return;
    const query = { run, metric: metric.name, phase: this.#phase, columns: TREND_COLUMNS, reduce: "extreme", range: this.#range };
    const [moment, trend] = await Promise.all([
      fetchMoment(run, this.#currentStep, wantedMetrics(group, this.#held), this.#phase),
      anew ? fetchSeries(query) : null,
    ]);
    if (job !== this.#job) return;
    this.#tableShows = shows;
    if (trend !== null) this.#table.showTrend(trend, metric.scale === "log");
    this.#table.show(group, moment);
  }

  async #loadLine(card: LineCard, job: number): Promise<void> {
    const other = this.#otherRun(this.#run);
    const context: CurveContext = {
      run: this.#run,
      other: other?.run ?? null,
      phase: this.#phase,
      metric: this.#metric,
      pins: this.#pins,
      sites: this.#mapped === `${this.#run}\n${this.#metric}` ? this.#map.sites : null,
      otherSites: this.#otherSites,
      otherHolds: this.#otherHolds,
      range: this.#range,
      extent: this.#extent(),
      step: this.#currentStep,
      started: [this.#meta?.started ?? 0, other?.started ?? 0],
      spec: (metric) => this.#spec(metric),
      entry: (metric) => this.#catalogued(metric),
      current: () => job === this.#job,
    };
    await this.#curves.load(card, context);
  }

  /** What the run holds in the chosen phase. */
  get #held(): readonly RunMetric[] {
    return (this.#meta?.metrics ?? []).filter((metric) => this.#inPhase(metric));
  }

  #inPhase({ phases }: RunMetric): boolean {
    return this.#phase === "" || phases.includes(this.#phase);
  }

  #spec(metric: string): RunMetric | undefined {
    return this.#held.find(({ name }) => name === metric);
  }

  #catalogued(metric: string): CatalogEntry | undefined {
    return this.#catalog.find(({ name }) => name === metric);
  }

  /** All steps there are, the end of the last one included. */
  get #whole(): Range {
    const shown = [this.#meta, this.#otherRun(this.#run)];
    const first = Math.min(...shown.map((run) => run?.first ?? Infinity));
    const last = Math.max(...shown.map((run) => run?.last ?? 0)) + 1;
    return Number.isFinite(first) ? [first, Math.max(last, first + 1)] : [0, 1];
  }

  /** The steps on every axis. */
  #extent(): Range {
    return this.#range ?? this.#whole;
  }

  get #currentStep(): number {
    return this.#step ?? this.#meta?.last ?? 0;
  }

  #suggestedPins(issues: readonly Issue[]): readonly string[] {
    const open = issues.filter(({ state }) => state === "open").flatMap(({ layers }) => layers);
    return [...new Set(open)].filter((layer) => this.#map.sites.includes(layer)).slice(0, MOST_SUGGESTED);
  }

  #showStep(): void {
    for (const view of [this.#header, this.#strip, this.#map, this.#second, ...this.#curves.cards]) view.showStep(this.#currentStep);
    this.#later("table", TABLE_MS, () => void this.#guard(() => this.#loadTable(this.#job, false)));
  }

  #showPins(): void {
    for (const view of [this.#map, this.#second, this.#table]) view.showPins(this.#pins);
  }

  /** A click on a row is a click on the map; where the map shows another kind of layer, it changes to this one. */
  async #pinRow(site: string, metric: string): Promise<void> {
    await this.#togglePin(site);
    if (this.#pins.includes(site) && !this.#map.sites.includes(site)) await this.#setMetric(metric);
  }

  #moveTo(step: number | null): void {
    this.#step = step;
    this.#showStep();
    this.#save();
  }

  /** One linked cursor: every view but the one under the pointer shows the step, and the other map the layer. */
  #point(step: number | null, from: LineCard | null, site: string | null): void {
    this.#map.showHover(step, from === null ? site : null);
    this.#second.showHover(step, site);
    for (const card of this.#curves.cards) if (card !== from) card.showHover(step);
  }

  async #pick(issue: Issue): Promise<void> {
    this.#metric = metricFor(issue, this.#held.map(({ name }) => name), this.#metric);
    const concerned = issue.layers.slice(0, MOST_SUGGESTED);
    this.#pins = [...new Set([...concerned, ...this.#pins])].filter((pin) => pin !== "").slice(0, PIN_COLOURS.length);
    this.#step = issue.step;
    this.#strip.choose(issue);
    if (this.#range !== null && (issue.step < this.#range[0] || issue.step > this.#range[1])) this.#range = null;
    this.#map.root.scrollIntoView({ block: "nearest" });
    await this.#anew();
  }

  async #setMetric(name: string): Promise<void> {
    [this.#metric, this.#asked] = [name, true];
    await this.#anew();
  }

  async #setReduce(reducer: Reducer): Promise<void> {
    this.#reduce = reducer;
    await this.#anew();
  }

  async #setPhase(word: string): Promise<void> {
    this.#phase = word === this.#meta?.phases[0] ? "" : word;
    if (this.#spec(this.#metric) === undefined) this.#metric = firstMetric(this.#held, this.#metric);
    await this.#anew();
  }

  /** Loads what a choice changed. */
  async #anew(): Promise<void> {
    this.#offer();
    this.#save();
    this.#job++;
    await this.#reload();
  }

  /** Loads the charts anew; a run that is not known yet is loaded whole. */
  #reload(): Promise<void> {
    return this.#meta === null ? this.refresh() : this.#guard(() => this.#loadCharts(this.#job));
  }

  async #togglePin(site: string): Promise<void> {
    this.#pins = this.#pins.includes(site) ? this.#pins.filter((pin) => pin !== site) : [...this.#pins, site].slice(-PIN_COLOURS.length);
    this.#showPins();
    this.#save();
    const card = this.#curves.pinned;
    if (card !== undefined) await this.#guard(() => this.#loadLine(card, this.#job));
  }

  #zoomBy(factor: number, at: number): boolean {
    const range = zoomBy(this.#extent(), at, factor, this.#whole);
    if (range === null && this.#range === null) return false;
    this.#zoom(range, WHEEL_MS);
    return true;
  }

  #pan(share: number): boolean {
    if (this.#range === null) return false;
    this.#zoom(panBy(this.#range, share, this.#whole), WHEEL_MS);
    return true;
  }

  /** What is there already is stretched at once; what the server knows of the new range follows. */
  #zoom(range: Range | null, patience: number): void {
    this.#range = range === null || range[1] - range[0] < 2 ? null : [Math.max(0, Math.floor(range[0])), Math.ceil(range[1])];
    const extent = this.#extent();
    for (const view of [this.#map, this.#second, ...this.#curves.cards]) view.stretch(extent);
    this.#strip.showRange(extent);
    this.#map.showZoom(this.#range !== null);
    this.#save();
    this.#job++;
    this.#later("zoom", patience, () => void this.#reload());
  }

  #setLive(on: boolean): void {
    this.#live = on;
    if (on) void this.refresh();
  }

  /** The host takes its time to change its address, so that happens after the repaint. */
  #save(): void {
    this.#later("save", SAVE_MS, () => this.#saveNow());
  }

  #saveNow(): void {
    saveState({
      run: this.#run,
      metric: this.#metric,
      other: this.#other,
      mode: this.#mode,
      pins: this.#pins,
      reduce: this.#reduce,
      phase: this.#phase,
      ...this.#curves.state,
      ...(this.#range === null ? {} : { zoom: this.#range }),
      ...(this.#step === null ? {} : { step: this.#step }),
    });
  }

  #later(timer: Timer, wait: number, work: () => void): void {
    window.clearTimeout(this.#timers[timer]);
    if (wait === 0) work();
    else this.#timers[timer] = window.setTimeout(work, wait);
  }

  /** Nothing is lost on an error: what was shown stays, and the error is said above it. */
  async #guard(work: () => Promise<void>): Promise<void> {
    this.#busy++;
    try {
      await work();
      this.#error.textContent = "";
    } catch (error) {
      this.#page.hidden = false;
      this.#error.textContent = `Could not load: ${error instanceof Error ? error.message : String(error)}`;
    } finally {
      this.#busy--;
    }
  }
}
