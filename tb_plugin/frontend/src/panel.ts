// Holds what is chosen and loaded, and tells the views; the views never talk to each other.
import { fetchCatalog, fetchHistograms, fetchIssues, fetchMeta, fetchMoment, fetchRuns, fetchSeries, listHistograms } from "./api";
import { Choice } from "./choice";
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
  readonly #now = new Choice(PIN_COLOURS.length);
  readonly #tooltip = new Tooltip();
  readonly #info = new MetricInfo();
  readonly #header = new Header(
    {
      run: (run) => void this.#openRun(run),
      compare: (run) => void this.#compare(run, this.#now.mode),
      step: (step) => this.#moveTo(step),
      live: (on) => this.#setLive(on),
      phase: (word) => void this.#setPhase(word),
    },
    true,
  );
  readonly #verdict = new VerdictView((issue) => void this.#pick(issue));
  readonly #strip = new StripView((issue) => void this.#pick(issue));
  readonly #navigate = {
    step: (step: number) => this.#moveTo(step >= (this.#now.meta?.last ?? Infinity) ? null : step),
    zoom: (range: Range | null) => this.#zoom(range, 0),
    zoomBy: (factor: number, at: number) => this.#zoomBy(factor, at),
    pan: (share: number) => this.#pan(share),
  };
  readonly #mapEvents: MapEvents = {
    ...this.#navigate,
    metric: (name) => void this.#setMetric(name),
    pin: (site) => void this.#togglePin(site),
    hover: (step, site) => this.#point(step, null, site),
    mode: (mode) => void this.#compare(this.#now.other, mode),
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
  #version = "";
  #otherHolds: ReadonlySet<string> = new Set();
  #otherSites: readonly string[] = [];
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
    this.#now.restore(wanted);
    this.#curves.restore(wanted);
    this.#map.showReducer(this.#now.reduce);
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
      const current = runs.find(({ run }) => run === this.#now.run) ?? runs[0];
      if (current === undefined) {
        if (this.#now.meta === null) this.root.replaceChildren(emptyState(), this.#tooltip.root);
        return;
      }
      if (this.#page.parentNode !== this.root) this.root.replaceChildren(this.#page, this.#tooltip.root);
      this.#now.runs = runs;
      if (this.#now.otherRun(current.run) === undefined) this.#now.other = "";
      this.#header.showRuns(runs, current.run, this.#now.other);
      const version = `${current.version}\n${this.#now.otherRun(current.run)?.version ?? ""}`;
      if (current.run === this.#now.run && version === this.#version && this.#now.meta !== null) return;
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
    this.#now.openRun(run);
    [this.#version, this.#histograms] = ["", []];
    // Answers about the run before are not wanted any more.
    this.#job++;
    await this.refresh();
    this.#save();
  }

  async #compare(run: string, mode: Mode): Promise<void> {
    [this.#now.other, this.#now.mode] = [run, mode];
    this.#version = this.#version.replace(/\n.*$/, `\n${this.#now.otherRun(this.#now.run)?.version ?? ""}`);
    this.#save();
    if (this.#now.meta === null) return this.refresh();
    const job = ++this.#job;
    await this.#guard(async () => {
      await this.#meetOther(this.#now.run);
      if (job === this.#job) await this.#loadCharts(job);
    });
  }

  /** Learns what the run compared with holds, so that nothing is asked in vain. */
  async #meetOther(run: string): Promise<void> {
    const other = this.#now.otherRun(run);
    const metrics = other === undefined ? [] : (await fetchMeta(other.run)).metrics;
    if (other?.run === this.#now.otherRun(run)?.run) this.#otherHolds = new Set(metrics.filter((metric) => this.#now.inPhase(metric)).map(({ name }) => name));
  }

  async #load(run: string, version: string): Promise<void> {
    const job = ++this.#job;
    const [meta, issues, histograms] = await Promise.all([fetchMeta(run), fetchIssues(run), listHistograms(run), this.#meetOther(run)]);
    if (job !== this.#job) return;
    const fresh = this.#now.meta === null;
    [this.#now.run, this.#version, this.#now.meta] = [run, version, meta];
    if (!meta.phases.includes(this.#now.phase)) this.#now.phase = "";
    // A metric that this run lacks stays chosen where somebody asked for it by name: the map then says how to get it.
    if (this.#now.spec(this.#now.metric) === undefined) {
      if (this.#now.asked && this.#now.metric !== "") await this.#learnCatalog();
      if (!this.#now.asked || this.#now.catalogued(this.#now.metric) === undefined) this.#now.metric = firstMetric(this.#now.held, this.#now.metric);
    }
    this.#page.hidden = false;
    this.#header.showMeta(meta, this.#now.phase);
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
    if (this.#now.catalog.length === 0) this.#now.catalog = await fetchCatalog();
  }

  #offer(): void {
    const [every, chosen] = [offerMetrics(this.#now.held, this.#now.catalog, () => true), this.#now.spec(this.#now.metric)];
    this.#map.offer(every, this.#now.metric, chosen?.sites ?? 0);
    this.#second.offer([], "", chosen?.sites ?? 0);
    this.#table.showMeta(this.#now.run, this.#now.held, this.#issues);
    this.#curves.offer(this.#now.held, this.#now.catalog);
  }

  async #loadCharts(job: number, suggest: readonly Issue[] = []): Promise<void> {
    const pinned = this.#curves.pinned;
    const sums = this.#curves.cards.filter((card) => card !== pinned);
    await Promise.all([
      this.#loadMap(job).then(() => {
        if (job !== this.#job) return undefined;
        this.#mapped = `${this.#now.run}\n${this.#now.metric}`;
        if (suggest.length > 0 && this.#now.pins.length === 0) this.#now.pins = this.#suggestedPins(suggest);
        this.#showPins();
        return pinned === undefined ? undefined : this.#loadLine(pinned, job);
      }),
      ...sums.map((card) => this.#loadLine(card, job)),
    ]);
    if (job !== this.#job) return;
    if (this.#now.range === null) this.#verdict.showCourse(sums[0]?.course ?? null);
    this.#strip.showRange(this.#now.extent);
    this.#showStep();
    this.#ridges.offer(this.#histograms, this.#now.pins);
    await Promise.all([this.#loadTable(job, true), this.#loadRidges(job)]);
  }

  async #loadRidges(job: number): Promise<void> {
    if (this.#ridges.site === "") return;
    const found = await fetchHistograms(this.#now.run, this.#ridges.metric, this.#ridges.site, MOST_RIDGES, this.#now.range);
    if (job === this.#job) this.#ridges.show(found);
  }

  async #loadMap(job: number): Promise<void> {
    this.#map.showZoom(this.#now.range !== null);
    const [spec, other] = [this.#now.spec(this.#now.metric), this.#now.otherRun(this.#now.run)];
    this.#otherSites = [];
    if (spec === undefined) {
      this.#second.root.hidden = true;
      const entry = this.#now.catalogued(this.#now.metric) ?? null;
      return this.#map.clear(entry === null ? "this run holds no metric yet" : "not in this run", "", entry);
    }
    const query = { run: this.#now.run, metric: this.#now.metric, phase: this.#now.phase, columns: this.#map.columns, reduce: this.#now.reduce, range: this.#now.range };
    const theirs = other !== undefined && this.#otherHolds.has(this.#now.metric) ? fetchSeries({ ...query, run: other.run }) : null;
    const [series, found] = await Promise.all([fetchSeries(query), theirs]);
    if (job !== this.#job || series.metric !== this.#now.metric) return;
    this.#otherSites = found?.sites ?? [];
    this.#map.showMode(other === undefined ? null : this.#now.mode);
    this.#second.root.hidden = other === undefined || this.#now.mode === "difference";
    const content = { series, spec, range: this.#now.extent, dark: this.#dark, of: "", like: null };
    if (other === undefined) this.#map.show(content);
    else this.#showTwo(content, found, other.run);
  }

  #showTwo(own: Parameters<MapView["show"]>[0], found: Series | null, run: string): void {
    const [mine, theirs, { spec }] = [runLabel(this.#now.run), runLabel(run), own];
    if (this.#now.mode === "difference") {
      const apart = found === null ? null : difference(own.series, found, spec);
      if (apart !== null) return this.#map.show({ ...own, ...apart, of: `${mine} against ${theirs}` });
      return this.#map.clear(found === null ? `${theirs} holds no ${spec.title}` : `${theirs} has no layer of the same name`);
    }
    this.#map.show({ ...own, of: mine });
    if (found === null) this.#second.clear(`${theirs} holds no ${spec.title}`, theirs);
    else this.#second.show({ ...own, series: found, of: theirs, like: this.#map });
  }

  /** The table follows the step a moment later, so that a slider can be dragged; `anew` loads the trends as well. */
  async #loadTable(job: number, anew: boolean): Promise<void> {
    const [group, run] = [this.#table.group, this.#now.run];
    const metric = group?.metrics[0];
    const shows = [run, this.#version, this.#now.currentStep, group?.key, this.#now.phase].join("\n");
    if (this.#now.meta === null || group === null || metric === undefined || (shows === this.#tableShows && !anew)) return;
    const query = { run, metric: metric.name, phase: this.#now.phase, columns: TREND_COLUMNS, reduce: "extreme", range: this.#now.range };
    const [moment, trend] = await Promise.all([
      fetchMoment(run, this.#now.currentStep, wantedMetrics(group, this.#now.held), this.#now.phase),
      anew ? fetchSeries(query) : null,
    ]);
    if (job !== this.#job) return;
    this.#tableShows = shows;
    if (trend !== null) this.#table.showTrend(trend, metric.scale === "log");
    this.#table.show(group, moment);
  }

  async #loadLine(card: LineCard, job: number): Promise<void> {
    const other = this.#now.otherRun(this.#now.run);
    const context: CurveContext = {
      run: this.#now.run,
      other: other?.run ?? null,
      phase: this.#now.phase,
      metric: this.#now.metric,
      pins: this.#now.pins,
      sites: this.#mapped === `${this.#now.run}\n${this.#now.metric}` ? this.#map.sites : null,
      otherSites: this.#otherSites,
      otherHolds: this.#otherHolds,
      range: this.#now.range,
      extent: this.#now.extent,
      step: this.#now.currentStep,
      started: [this.#now.meta?.started ?? 0, other?.started ?? 0],
      spec: (metric) => this.#now.spec(metric),
      entry: (metric) => this.#now.catalogued(metric),
      current: () => job === this.#job,
    };
    await this.#curves.load(card, context);
  }

  #suggestedPins(issues: readonly Issue[]): readonly string[] {
    const open = issues.filter(({ state }) => state === "open").flatMap(({ layers }) => layers);
    return [...new Set(open)].filter((layer) => this.#map.sites.includes(layer)).slice(0, MOST_SUGGESTED);
  }

  #showStep(): void {
    for (const view of [this.#header, this.#strip, this.#map, this.#second, ...this.#curves.cards]) view.showStep(this.#now.currentStep);
    this.#later("table", TABLE_MS, () => void this.#guard(() => this.#loadTable(this.#job, false)));
  }

  #showPins(): void {
    for (const view of [this.#map, this.#second, this.#table]) view.showPins(this.#now.pins);
  }

  /** A click on a row is a click on the map; where the map shows another kind of layer, it changes to this one. */
  async #pinRow(site: string, metric: string): Promise<void> {
    await this.#togglePin(site);
    if (this.#now.pins.includes(site) && !this.#map.sites.includes(site)) await this.#setMetric(metric);
  }

  #moveTo(step: number | null): void {
    this.#now.step = step;
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
    this.#now.metric = metricFor(issue, this.#now.held.map(({ name }) => name), this.#now.metric);
    this.#now.pinIssue(issue, MOST_SUGGESTED);
    this.#strip.choose(issue);
    this.#map.root.scrollIntoView({ block: "nearest" });
    await this.#anew();
  }

  async #setMetric(name: string): Promise<void> {
    [this.#now.metric, this.#now.asked] = [name, true];
    await this.#anew();
  }

  async #setReduce(reducer: Reducer): Promise<void> {
    this.#now.reduce = reducer;
    await this.#anew();
  }

  async #setPhase(word: string): Promise<void> {
    this.#now.setPhase(word);
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
    return this.#now.meta === null ? this.refresh() : this.#guard(() => this.#loadCharts(this.#job));
  }

  async #togglePin(site: string): Promise<void> {
    this.#now.togglePin(site);
    this.#showPins();
    this.#save();
    const card = this.#curves.pinned;
    if (card !== undefined) await this.#guard(() => this.#loadLine(card, this.#job));
  }

  #zoomBy(factor: number, at: number): boolean {
    const range = zoomBy(this.#now.extent, at, factor, this.#now.whole);
    if (range === null && this.#now.range === null) return false;
    this.#zoom(range, WHEEL_MS);
    return true;
  }

  #pan(share: number): boolean {
    if (this.#now.range === null) return false;
    this.#zoom(panBy(this.#now.range, share, this.#now.whole), WHEEL_MS);
    return true;
  }

  /** What is there already is stretched at once; what the server knows of the new range follows. */
  #zoom(range: Range | null, patience: number): void {
    this.#now.zoom(range);
    const extent = this.#now.extent;
    for (const view of [this.#map, this.#second, ...this.#curves.cards]) view.stretch(extent);
    this.#strip.showRange(extent);
    this.#map.showZoom(this.#now.range !== null);
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
    saveState({ ...this.#now.state, ...this.#curves.state });
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
