// What a hand does on the page, turned into what is chosen and shown; the views never talk to each other.
import { fetchAround, fetchOverview, fetchRuns } from "./api";
import { Choice } from "./choice";
import { afterFrame, el, unveil } from "./dom";
import { hostHash, isVisible, saveState, watchSize } from "./host";
import { Loader } from "./loader";
import { parseHash, type Mode } from "./model/url";
import { metricFor, type Issue } from "./model/verdict";
import { panBy, zoomBy, type Range } from "./model/zoom";
import { PIN_COLOURS } from "./style";
import { OverviewPage, SOON } from "./overview";
import { ArchitectureView } from "./views/architecture";
import { Curves } from "./views/curves";
import { emptyState } from "./views/empty";
import { Header } from "./views/header";
import { nameRuns, runLabel } from "./model/labels";
import { MetricInfo } from "./views/info";
import type { LineCard } from "./views/lines";
import { LosingCard } from "./views/losing";
import { MapView, type MapEvents } from "./views/map";
import { RidgeView } from "./views/ridge";
import { MetricSearch } from "./views/search";
import { StripView } from "./views/strip";
import { HealthTable } from "./views/table";
import { Tooltip } from "./views/tooltip";
import { VerdictView } from "./views/verdict";

type Timer = "table" | "save" | "zoom";

const [POLL_MS, RESIZE_MS, TABLE_MS, SAVE_MS, WHEEL_MS, MOST_PINNED, AROUND] = [4000, 120, 120, 100, 90, 3, 20];

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
      overview: () => void this.#openOverview(),
      phase: (word) => this.#anew(() => this.#now.setPhase(word)),
    },
    true,
  );
  readonly #verdict = new VerdictView(
    (issue) => this.#pick(issue),
    (issue) => void this.#around(issue),
  );
  readonly #strip = new StripView((issue) => this.#pick(issue));
  readonly #navigate = {
    step: (step: number) => this.#moveTo(step >= (this.#now.meta?.last ?? Infinity) ? null : step),
    zoom: (range: Range | null) => this.#zoom(range, 0),
    zoomBy: (factor: number, at: number) => this.#zoomBy(factor, at),
    pan: (share: number) => this.#pan(share),
  };
  readonly #mapEvents: MapEvents = {
    ...this.#navigate,
    metric: (name) => this.#setMetric(name),
    search: () => {
      this.#search.offer(this.#now.held, this.#now.catalog);
      this.#search.open();
    },
    pin: (site) => this.#togglePin(site),
    hover: (step, site) => this.#point(step, null, site),
    mode: (mode) => void this.#compare(this.#now.other, mode),
    reduce: (reducer) => this.#anew(() => (this.#now.reduce = reducer)),
    depth: (state) => {
      this.#now.depth = state;
      this.#showDepth();
      this.#save();
    },
  };
  readonly #search = new MetricSearch((name) => this.#setMetric(name));
  readonly #map = new MapView(this.#mapEvents, this.#tooltip, this.#info);
  readonly #second = new MapView(this.#mapEvents, this.#tooltip, this.#info, true);
  readonly #table = new HealthTable({
    kind: () => void this.#loader.table(true),
    pin: (site, metric) => this.#pinRow(site, metric),
  });
  readonly #ridges = new RidgeView(() => {
    this.#save();
    void this.#loader.ridges();
  });
  readonly #losing = new LosingCard((site) => this.#togglePin(site));
  readonly #curves = new Curves(
    {
      ...this.#navigate,
      hover: (step, from) => this.#point(step, from, null),
      unpin: (site) => this.#togglePin(site),
      load: (card) => void this.#loader.line(card),
      changed: () => this.#save(),
    },
    this.#tooltip,
    this.#info,
    this.#losing,
  );
  readonly #architecture = new ArchitectureView((name) => this.#togglePin(name));
  readonly #error = el("div", { class: "card error", attrs: { role: "alert", "data-part": "error" } });
  readonly #overview = new OverviewPage({
    open: (run) => void this.#openRun(run),
    error: (message) => (this.#overviewError.textContent = message),
    changed: () => this.#save(),
  });
  readonly #overviewError = el("div", { class: "card error", attrs: { role: "alert" } });
  readonly #notice = el("div", { class: "card notice", attrs: { role: "status", "data-part": "notice" } });
  readonly #page: HTMLElement;
  readonly #loader: Loader;
  #live = true;
  readonly #timers: Record<Timer, number> = { table: 0, save: 0, zoom: 0 };

  constructor() {
    const views = {
      header: this.#header,
      verdict: this.#verdict,
      strip: this.#strip,
      map: this.#map,
      second: this.#second,
      curves: this.#curves,
      table: this.#table,
      architecture: this.#architecture,
      ridges: this.#ridges,
    };
    const { header, ...cards } = views;
    const page = el(
      "main",
      { class: "page" },
      header.root,
      this.#notice,
      this.#error,
      ...Object.values(cards).map(({ root }) => root),
      this.#info.root,
      this.#search.root,
    );
    page.hidden = this.#second.root.hidden = true;
    this.#page = page;
    this.#overview.root.hidden = true;
    this.#overview.root.prepend(el("p", { class: "lead", text: "GradFlow" }), this.#overviewError);
    this.#fill();
    this.#loader = new Loader(this.#now, {
      ...views,
      losing: this.#losing,
      page,
      showStep: () => this.#showStep(),
      showPins: () => this.#showPins(),
      save: () => this.#save(),
      showError: (message) => {
        this.#error.textContent = message;
        if (message !== "") unveil(page);
      },
    });
  }

  async start(): Promise<void> {
    const wanted = parseHash(hostHash());
    this.#now.restore(wanted);
    this.#overview.chosen = wanted.compare ?? [];
    this.#curves.restore(wanted);
    this.#ridges.restore(wanted.histograms ?? "");
    this.#map.bar.showReducer(this.#now.reduce);
    this.#showDepth();
    await this.refresh(true);
    document.body.dataset["ready"] = "1";
    const look = (): void => {
      if (this.#live && this.#loader.idle && isVisible()) void this.refresh();
    };
    window.setInterval(look, POLL_MS);
    document.addEventListener("visibilitychange", look);
    watchSize(RESIZE_MS, (wider) => {
      if (wider === null) look();
      else if (wider) void this.#reload();
      else this.#showDepth();
    });
  }

  /** Looks for runs and new steps; one small request when there is nothing new. */
  async refresh(opening = false): Promise<void> {
    await this.#loader.guard(async () => {
      // Without a run to open, the first answer is the table of all of them: the list of runs is a part of it.
      const overview = opening && this.#now.run === "" ? await fetchOverview(SOON) : null;
      const runs = overview === null || overview.runs.length < overview.total ? await fetchRuns() : overview.runs;
      nameRuns(overview?.runs ?? runs);
      const first = this.#now.run === "" && runs.length > 1;
      if (first || this.#overviewShown) {
        this.#showOverview(true);
        this.#now.runs = runs;
        return this.#overview.refresh(runs, overview);
      }
      const wanted = this.#now.missing || this.#now.run;
      const found = runs.find(({ run }) => run === wanted);
      const current = found ?? runs.find(({ run }) => run === this.#now.run) ?? runs[0];
      if (current === undefined) {
        if (this.#now.meta === null) this.root.replaceChildren(emptyState(), this.#tooltip.root);
        return;
      }
      if (this.#page.parentNode !== this.root) this.#fill();
      this.#now.runs = runs;
      // A link to a run that is not there opens another one, and says so until somebody chooses, or the run appears.
      if (found === undefined && wanted !== "" && this.#now.missing === "")
        [this.#now.missing, this.#now.meta] = [wanted, null];
      else if (found !== undefined && this.#now.missing !== "") this.#now.openRun(wanted);
      this.#showNotice(current.run);
      if (this.#now.otherRun(current.run) === undefined) this.#now.other = "";
      this.#header.showRuns(runs, current.run, this.#now.other);
      await this.#loader.run(current.run, `${current.version} ${current.state}`);
    });
  }

  #fill(): void {
    this.root.replaceChildren(this.#overview.root, this.#page, this.#tooltip.root);
    this.#showOverview(this.#overviewShown);
  }

  get #overviewShown(): boolean {
    return !this.#overview.root.hidden;
  }

  #showOverview(shown: boolean): void {
    this.#overview.root.hidden = !shown;
    if (shown) this.#page.hidden = true;
    this.#overviewError.textContent = "";
  }

  /** Back to the table of all runs. */
  async #openOverview(): Promise<void> {
    this.#now.openRun("");
    this.#loader.forget();
    this.#showOverview(true);
    await this.refresh();
    this.#save();
  }

  #showNotice(shown: string): void {
    const { missing } = this.#now;
    this.#notice.textContent =
      missing === ""
        ? ""
        : `The run "${runLabel(missing)}" is not in this log directory: it was deleted, renamed, or has not been loaded yet. Showing instead: "${runLabel(shown)}".`;
  }

  themed(dark: boolean): void {
    for (const map of [this.#map, this.#second]) map.themed(dark);
    this.#architecture.colour(this.#map.shade, this.#map.reading);
    this.#curves.redraw();
    this.#ridges.draw();
  }

  async #openRun(run: string): Promise<void> {
    this.#now.openRun(run);
    this.#showOverview(false);
    this.#showDepth();
    this.#loader.forget();
    await this.refresh();
    this.#save();
  }

  async #compare(run: string, mode: Mode): Promise<void> {
    [this.#now.other, this.#now.mode] = [run, mode];
    this.#save();
    await (this.#now.meta === null ? this.refresh() : this.#loader.other());
  }

  #showDepth(): void {
    for (const map of [this.#map, this.#second]) map.showDepth(this.#now.depth);
  }

  #showStep(): void {
    for (const view of [this.#header, this.#strip, this.#map, this.#second, ...this.#curves.cards])
      view.showStep(this.#now.currentStep);
    this.#later("table", TABLE_MS, () => void this.#loader.table(false));
  }

  #showPins(): void {
    for (const view of [this.#map, this.#second, this.#table, this.#architecture]) view.showPins(this.#now.pins);
  }

  /** A click on a row is a click on the map; where the map shows another kind of layer, it changes to this one. */
  #pinRow(site: string, metric: string): void {
    this.#togglePin(site);
    if (this.#now.pins.includes(site) && !this.#map.sites.includes(site)) this.#setMetric(metric);
  }

  #moveTo(step: number | null): void {
    const range = this.#now.moveTo(step);
    if (range !== this.#now.range) this.#zoom(range, WHEEL_MS);
    this.#showStep();
    this.#save();
  }

  /** One linked cursor: every view but the one under the pointer shows the step, and the other map the layer. */
  #point(step: number | null, from: LineCard | null, site: string | null): void {
    this.#map.showHover(step, from === null ? site : null);
    this.#second.showHover(step, site);
    for (const card of this.#curves.cards) if (card !== from) card.showHover(step);
  }

  /** The failing step: what was read just before and after it, at all layers. */
  async #around(issue: Issue): Promise<void> {
    const metric = metricFor(
      issue,
      this.#now.held.map(({ name }) => name),
      this.#now.metric,
    );
    await this.#loader.guard(async () => {
      const [first, last] = await fetchAround(this.#now.run, metric, issue.step, AROUND);
      this.#pick(issue, [first, last + 1]);
    });
  }

  #pick(issue: Issue, range: Range | null = null): void {
    this.#anew(() => {
      this.#now.metric = metricFor(
        issue,
        this.#now.held.map(({ name }) => name),
        this.#now.metric,
      );
      this.#now.pinIssue(issue, MOST_PINNED);
      if (range !== null) this.#now.zoom(range);
      this.#strip.choose(issue);
      this.#map.root.scrollIntoView({ block: "nearest" });
    });
  }

  #setMetric(name: string): void {
    this.#anew(() => ([this.#now.metric, this.#now.asked] = [name, true]));
  }

  /** Makes a choice and loads what it changes. */
  #anew(choose: () => void): void {
    choose();
    this.#loader.offer();
    this.#save();
    this.#loader.drop();
    void this.#reload();
  }

  /** Loads the charts anew; a run that is not known yet is loaded whole. */
  #reload(): Promise<void> {
    return this.#now.meta === null ? this.refresh() : this.#loader.charts();
  }

  #togglePin(site: string): void {
    this.#now.togglePin(site);
    this.#showPins();
    this.#save();
    const { pinned } = this.#curves;
    // The mark is seen before its line is asked for.
    if (pinned !== undefined) afterFrame(() => void this.#loader.line(pinned));
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
    this.#showStep();
    this.#map.bar.showZoom(this.#now.range !== null);
    this.#save();
    this.#loader.drop();
    this.#later("zoom", patience, () => void this.#reload());
  }

  #setLive(on: boolean): void {
    if ((this.#live = on)) void this.refresh();
  }

  /** The host takes its time to change its address, so that happens after the repaint. */
  #save(): void {
    this.#later("save", SAVE_MS, () =>
      saveState({
        ...this.#now.state,
        ...this.#curves.state,
        histograms: this.#ridges.form,
        compare: this.#overview.chosen,
      }),
    );
  }

  #later(timer: Timer, wait: number, work: () => void): void {
    window.clearTimeout(this.#timers[timer]);
    if (wait === 0) work();
    else this.#timers[timer] = window.setTimeout(work, wait);
  }
}
