// Holds what is chosen and loaded, and tells the views; the views never talk to each other.
import { fetchHistograms, fetchIssues, fetchMeta, fetchMoment, fetchRuns, fetchSeries, listHistograms, type RunMeta, type RunMetric, type RunSummary } from "./api";
import { el } from "./dom";
import { hostHash, isVisible, saveState } from "./host";
import { rowMetric, wantedMetrics } from "./model/health";
import { difference } from "./model/difference";
import type { Series } from "./model/series";
import { parseHash, type Mode } from "./model/url";
import { metricFor, type Issue } from "./model/verdict";
import { PIN_COLOURS } from "./style";
import { emptyState } from "./views/empty";
import { Header, runLabel } from "./views/header";
import { MetricInfo } from "./views/info";
import { LineCard, type LineCardEvents } from "./views/lines";
import { MapView, type MapEvents } from "./views/map";
import { MOST_RIDGES, RidgeView, type Listed } from "./views/ridge";
import { StripView } from "./views/strip";
import { HealthTable } from "./views/table";
import { Tooltip } from "./views/tooltip";
import { VerdictView } from "./views/verdict";

type Range = readonly [number, number];

const POLL_MS = 4000;
const RESIZE_MS = 120;
const TABLE_MS = 120;
const SAVE_MS = 100;
const TREND_COLUMNS = 60;
const MOST_SUGGESTED = 3;

export class Panel {
  readonly root = el("div");
  private readonly tooltip = new Tooltip();
  private mapped = "";
  private readonly info = new MetricInfo();
  private readonly header = new Header(
    { run: (run) => void this.openRun(run), compare: (run) => void this.compare(run, this.mode), step: (step) => this.moveTo(step), live: (on) => this.setLive(on) },
    true,
  );
  private readonly verdict = new VerdictView((issue) => void this.pick(issue));
  private readonly strip = new StripView((issue) => void this.pick(issue));
  private readonly mapEvents: MapEvents = {
    metric: (name) => void this.setMetric(name),
    step: (step) => this.moveTo(step),
    pin: (site) => void this.togglePin(site),
    hover: (step) => this.point(step, null),
    zoom: (range) => void this.zoom(range),
    mode: (mode) => void this.compare(this.other, mode),
  };
  private readonly map = new MapView(this.mapEvents, this.tooltip, this.info);
  private readonly second = new MapView(this.mapEvents, this.tooltip, this.info, true);
  private readonly table = new HealthTable({
    kind: () => void this.guard(() => this.loadTable(this.job, true)),
    pin: (site, metric) => void this.pinRow(site, metric),
  });
  private readonly ridges = new RidgeView(() => void this.guard(() => this.loadRidges(this.job)));
  private readonly lines: readonly LineCard[];
  private readonly error = el("div", { class: "card error", attrs: { role: "alert", "data-part": "error" } });
  private readonly page: HTMLElement;
  private run = "";
  private version = "";
  private runs: readonly RunSummary[] = [];
  /** The run compared with, empty for none. */
  private other = "";
  private mode: Mode = "beside";
  private otherHolds: ReadonlySet<string> = new Set();
  private metric = "";
  private meta: RunMeta | null = null;
  private range: Range | null = null;
  private step: number | null = null;
  private pins: readonly string[] = [];
  private live = true;
  private dark = false;
  /** Counts what was asked for; an answer to an earlier question is dropped. */
  private job = 0;
  private busy = false;
  private resizeTimer = 0;
  private histograms: readonly Listed[] = [];
  private tableTimer = 0;
  private saveTimer = 0;
  private tableShows = "";

  constructor() {
    const events: LineCardEvents = {
      changed: (card) => void this.guard(() => this.loadLine(card, this.job)),
      hover: (step, from) => this.point(step, from),
      zoom: (range) => void this.zoom(range),
      unpin: (site) => void this.togglePin(site),
    };
    this.lines = (["run", "run", "pins"] as const).map((kind) => new LineCard(kind, events, this.tooltip, this.info));
    const lines = el("div", { class: "lines" }, ...this.lines.map((card) => card.root));
    this.page = el("main", { class: "page" }, this.header.root, this.error, this.verdict.root, this.strip.root, this.map.root, this.second.root, lines, this.table.root, this.ridges.root, this.info.root);
    this.page.hidden = this.second.root.hidden = true;
    this.root.append(this.page, this.tooltip.root);
  }

  async start(): Promise<void> {
    const wanted = parseHash(hostHash());
    [this.run, this.metric, this.step, this.pins] = [wanted.run ?? "", wanted.metric ?? "", wanted.step ?? null, wanted.pins ?? []];
    [this.other, this.mode, this.range] = [wanted.other ?? "", wanted.mode ?? "beside", wanted.zoom ?? null];
    await this.refresh();
    document.body.dataset["ready"] = "1";
    window.setInterval(() => {
      if (this.live && !this.busy && isVisible()) void this.refresh();
    }, POLL_MS);
    window.addEventListener("resize", () => {
      window.clearTimeout(this.resizeTimer);
      this.resizeTimer = window.setTimeout(() => void (isVisible() && this.guard(() => this.loadCharts(this.job))), RESIZE_MS);
    });
  }

  /** Looks for runs and new steps; one small request when there is nothing new. */
  async refresh(): Promise<void> {
    await this.guard(async () => {
      const runs = await fetchRuns();
      const current = runs.find(({ run }) => run === this.run) ?? runs[0];
      if (current === undefined) {
        if (this.meta === null) this.root.replaceChildren(emptyState(), this.tooltip.root);
        return;
      }
      if (this.page.parentNode !== this.root) this.root.replaceChildren(this.page, this.tooltip.root);
      this.page.hidden = false;
      this.runs = runs;
      if (this.otherRun(current.run) === undefined) this.other = "";
      this.header.showRuns(runs, current.run, this.other);
      const version = `${current.version}\n${this.otherRun(current.run)?.version ?? ""}`;
      if (current.run === this.run && version === this.version && this.meta !== null) return;
      await this.load(current.run, version);
    });
  }

  themed(dark: boolean): void {
    this.dark = dark;
    this.map.themed(dark);
    this.second.themed(dark);
    for (const card of this.lines) card.redraw();
  }

  private async openRun(run: string): Promise<void> {
    [this.run, this.version, this.range, this.step, this.pins] = [run, "", null, null, []];
    if (this.other === run) this.other = "";
    this.meta = null;
    await this.refresh();
    this.save();
  }

  private async compare(run: string, mode: Mode): Promise<void> {
    [this.other, this.mode] = [run, mode];
    this.version = this.version.replace(/\n.*$/, `\n${this.otherRun(this.run)?.version ?? ""}`);
    this.save();
    const job = ++this.job;
    await this.guard(async () => {
      await this.meetOther(this.run);
      if (job === this.job) await this.loadCharts(job);
    });
  }

  /** Learns what the run compared with holds, so that nothing is asked in vain. */
  private async meetOther(run: string): Promise<void> {
    const other = this.otherRun(run);
    const metrics = other === undefined ? [] : (await fetchMeta(other.run)).metrics;
    if (other?.run === this.otherRun(run)?.run) this.otherHolds = new Set(metrics.map(({ name }) => name));
  }

  private async load(run: string, version: string): Promise<void> {
    const job = ++this.job;
    const [meta, issues, histograms] = await Promise.all([fetchMeta(run), fetchIssues(run), listHistograms(run), this.meetOther(run)]);
    if (job !== this.job) return;
    const fresh = this.meta === null;
    [this.run, this.version, this.meta] = [run, version, meta];
    this.header.showMeta(meta);
    this.verdict.show(issues, meta.last);
    this.strip.show(issues, meta.first ?? 0, meta.last ?? 0);
    const wide = meta.metrics.filter(({ kind }) => kind !== "run").map(({ name }) => name);
    if (!wide.includes(this.metric)) this.metric = wide.includes("block.gain") ? "block.gain" : (wide[0] ?? "");
    this.map.showMeta(meta, this.metric);
    this.table.showMeta(meta, issues);
    this.lines[0]?.showMeta(meta, ["loss"]);
    this.lines[1]?.showMeta(meta, ["gradient.total_norm", "gain.max", "update.ratio"], this.lines[0]?.metric);
    this.histograms = histograms;
    await this.loadCharts(job, fresh ? issues : []);
  }

  private async loadCharts(job: number, suggest: readonly Issue[] = []): Promise<void> {
    const [pinsCard] = this.lines.filter(({ kind }) => kind === "pins");
    await Promise.all([
      this.loadMap(job).then(() => {
        if (job !== this.job) return undefined;
        this.mapped = `${this.run}\n${this.metric}`;
        if (suggest.length > 0 && this.pins.length === 0) this.pins = this.suggestedPins(suggest);
        this.showPins();
        return pinsCard === undefined ? undefined : this.loadLine(pinsCard, job);
      }),
      ...this.lines.filter(({ kind }) => kind === "run").map((card) => this.loadLine(card, job)),
    ]);
    if (job !== this.job) return;
    this.strip.showRange(this.extent());
    this.showStep();
    this.ridges.offer(this.histograms, this.pins);
    await Promise.all([this.loadTable(job, true), this.loadRidges(job)]);
  }

  private async loadRidges(job: number): Promise<void> {
    if (this.ridges.site === "") return;
    const found = await fetchHistograms(this.run, this.ridges.metric, this.ridges.site, MOST_RIDGES, this.range);
    if (job === this.job) this.ridges.show(found);
  }

  private async loadMap(job: number): Promise<void> {
    this.map.showZoom(this.range !== null);
    const spec = this.spec(this.metric);
    if (spec === undefined) return this.map.clear("this run holds no per-layer metric; watch the model with blocks or parameters");
    const series = await fetchSeries({ run: this.run, metric: this.metric, columns: this.map.columns, reduce: "extreme", range: this.range });
    if (job !== this.job || series.metric !== this.metric) return;
    const other = this.otherRun(this.run);
    this.map.showMode(other === undefined ? null : this.mode);
    this.second.root.hidden = other === undefined || this.mode === "difference";
    if (other === undefined) return this.map.show(series, spec, this.extent(), this.dark);
    await this.loadOther(job, series, spec, other.run);
  }

  private async loadOther(job: number, own: Series, spec: RunMetric, run: string): Promise<void> {
    const [mine, theirs] = [runLabel(this.run), runLabel(run)];
    const query = { run, metric: this.metric, columns: this.map.columns, reduce: "extreme", range: this.range };
    const found = this.otherHolds.has(this.metric) ? await fetchSeries(query) : `${theirs} holds no ${spec.title}`;
    if (job !== this.job) return;
    if (this.mode === "difference") {
      const apart = typeof found === "string" ? null : difference(own, found, spec);
      if (apart !== null) return this.map.show(apart.series, apart.spec, this.extent(), this.dark, `${mine} against ${theirs}`);
      this.map.clear(typeof found === "string" ? found : `${theirs} has no layer of the same name`);
      return;
    }
    this.map.show(own, spec, this.extent(), this.dark, mine);
    if (typeof found === "string") this.second.clear(found, theirs);
    else this.second.show(found, spec, this.extent(), this.dark, theirs, this.map);
  }

  private otherRun(run: string): RunSummary | undefined {
    return this.other === run ? undefined : this.runs.find((item) => item.run === this.other);
  }

  /** The table follows the step a moment later, so that a slider can be dragged; `anew` loads the trends as well. */
  private async loadTable(job: number, anew: boolean): Promise<void> {
    const metrics = this.meta?.metrics ?? [];
    const metric = rowMetric(this.table.kind, metrics);
    const shows = [this.run, this.version, this.currentStep, metric].join("\n");
    if (metric === undefined || (shows === this.tableShows && !anew)) return;
    const [moment, trend] = await Promise.all([
      fetchMoment(this.run, this.currentStep, wantedMetrics(this.table.kind, metrics)),
      anew ? fetchSeries({ run: this.run, metric, columns: TREND_COLUMNS, reduce: "extreme", range: this.range }) : null,
    ]);
    if (job !== this.job) return;
    this.tableShows = shows;
    this.table.show(metric, moment);
    if (trend !== null) this.table.showTrend(trend, this.spec(metric)?.scale === "log");
  }

  private async loadLine(card: LineCard, job: number): Promise<void> {
    const metric = card.kind === "run" ? card.metric : this.metric;
    // Until the map of this metric is there, its sites are those of another; the map's arrival loads the pins.
    if (card.kind === "pins" && this.mapped !== `${this.run}\n${this.metric}`) return;
    const spec = this.spec(metric);
    const sites = card.kind === "run" ? [] : this.pins.filter((pin) => this.map.sites.includes(pin));
    if (spec === undefined) return card.clear("this run holds no such metric");
    if (card.kind === "pins" && sites.length === 0) return card.clear("Click a layer in the map to follow it here.", "Pinned layers");
    const query = { metric, columns: card.columns, reduce: "mean,min,max", range: this.range, sites };
    const other = card.kind === "run" && this.otherHolds.has(metric) ? this.otherRun(this.run) : undefined;
    const [series, theirs] = await Promise.all([
      fetchSeries({ run: this.run, ...query }),
      other === undefined ? null : fetchSeries({ run: other.run, ...query }),
    ]);
    if (job !== this.job) return;
    card.show(series, spec, this.extent(), this.pins, theirs);
    card.showStep(this.currentStep);
  }

  private spec(metric: string): RunMetric | undefined {
    return this.meta?.metrics.find(({ name }) => name === metric);
  }

  /** The steps on every axis, the end of the last step included. */
  private extent(): Range {
    const shown = [this.meta, this.otherRun(this.run)];
    const first = this.range?.[0] ?? Math.min(...shown.map((run) => run?.first ?? Infinity));
    const last = this.range?.[1] ?? Math.max(...shown.map((run) => run?.last ?? 0)) + 1;
    return Number.isFinite(first) ? [first, Math.max(last, first + 1)] : [0, 1];
  }

  private get currentStep(): number {
    return this.step ?? this.meta?.last ?? 0;
  }

  private suggestedPins(issues: readonly Issue[]): readonly string[] {
    const open = issues.filter(({ state }) => state === "open").flatMap(({ layers }) => layers);
    return [...new Set(open)].filter((layer) => this.map.sites.includes(layer)).slice(0, MOST_SUGGESTED);
  }

  private showStep(): void {
    this.header.showStep(this.currentStep);
    this.strip.showStep(this.currentStep);
    this.map.showStep(this.currentStep);
    this.second.showStep(this.currentStep);
    for (const card of this.lines) card.showStep(this.currentStep);
    window.clearTimeout(this.tableTimer);
    this.tableTimer = window.setTimeout(() => void this.guard(() => this.loadTable(this.job, false)), TABLE_MS);
  }

  private showPins(): void {
    this.map.showPins(this.pins);
    this.second.showPins(this.pins);
    this.table.showPins(this.pins);
  }

  /** A click on a row is a click on the map; where the map shows another kind of layer, it changes to this one. */
  private async pinRow(site: string, metric: string): Promise<void> {
    await this.togglePin(site);
    if (this.pins.includes(site) && !this.map.sites.includes(site)) await this.setMetric(metric);
  }

  private moveTo(step: number | null): void {
    this.step = step;
    this.showStep();
    this.save();
  }

  /** One linked cursor: every view but the one under the pointer shows the step. */
  private point(step: number | null, from: LineCard | null): void {
    if (from !== null) this.map.showHover(step);
    this.second.showHover(step);
    for (const card of this.lines) if (card !== from) card.showHover(step);
  }

  private async pick(issue: Issue): Promise<void> {
    const names = this.meta?.metrics.map(({ name }) => name) ?? [];
    this.metric = metricFor(issue, names, this.metric);
    const concerned = issue.layers.slice(0, MOST_SUGGESTED);
    this.pins = [...new Set([...concerned, ...this.pins])].filter((pin) => pin !== "").slice(0, PIN_COLOURS.length);
    this.step = issue.step;
    this.strip.choose(issue);
    if (this.range !== null && (issue.step < this.range[0] || issue.step > this.range[1])) this.range = null;
    if (this.meta !== null) this.map.showMeta(this.meta, this.metric);
    this.save();
    await this.guard(() => this.loadCharts(++this.job));
    this.map.root.scrollIntoView({ block: "nearest" });
  }

  private async setMetric(name: string): Promise<void> {
    this.metric = name;
    if (this.meta !== null) this.map.showMeta(this.meta, this.metric);
    this.save();
    await this.guard(() => this.loadCharts(++this.job));
  }

  private async togglePin(site: string): Promise<void> {
    this.pins = this.pins.includes(site) ? this.pins.filter((pin) => pin !== site) : [...this.pins, site].slice(-PIN_COLOURS.length);
    this.showPins();
    this.save();
    const card = this.lines.find(({ kind }) => kind === "pins");
    if (card !== undefined) await this.guard(() => this.loadLine(card, this.job));
  }

  private async zoom(range: Range | null): Promise<void> {
    this.range = range === null || range[1] - range[0] < 2 ? null : [Math.max(0, Math.floor(range[0])), Math.ceil(range[1])];
    this.save();
    await this.guard(() => this.loadCharts(++this.job));
  }

  private setLive(on: boolean): void {
    this.live = on;
    if (on) void this.refresh();
  }

  /** The host takes its time to change its address, so that happens after the repaint. */
  private save(): void {
    window.clearTimeout(this.saveTimer);
    this.saveTimer = window.setTimeout(() => this.saveNow(), SAVE_MS);
  }

  private saveNow(): void {
    saveState({ run: this.run, metric: this.metric, other: this.other, mode: this.mode, pins: this.pins, ...(this.range === null ? {} : { zoom: this.range }), ...(this.step === null ? {} : { step: this.step }) });
  }

  /** Nothing is lost on an error: what was shown stays, and the error is said above it. */
  private async guard(work: () => Promise<void>): Promise<void> {
    this.busy = true;
    try {
      await work();
      this.error.textContent = "";
    } catch (error) {
      this.page.hidden = false;
      this.error.textContent = `Could not load: ${error instanceof Error ? error.message : String(error)}`;
    } finally {
      this.busy = false;
    }
  }
}
