// The lines below the map: their common axis and smoothing, and what each of them asks the server for.
import type { Annotation, CatalogEntry, RunMetric, SeriesQuery } from "../api";
import { el, setOptions, type Option } from "../dom";
import { AXES, type AxisKind } from "../model/axis";
import { offerMetrics } from "../model/offer";
import type { Series } from "../model/series";
import type { UrlState } from "../model/url";
import type { MetricInfo } from "./info";
import { LineCard, removeButton, type LineCardEvents, type LineStyle } from "./lines";
import type { LosingCard } from "./losing";
import type { Navigate } from "./navigate";
import type { Tooltip } from "./tooltip";

export interface CurveEvents extends Navigate {
  hover(step: number | null, from: LineCard): void;
  unpin(site: string): void;
  /** A card has to be loaded. */
  load(card: LineCard): void;
  /** What is stored in the address changed. */
  changed(): void;
}

/** What is chosen elsewhere in the panel. */
export interface CurveContext {
  readonly run: string;
  readonly other: string | null;
  readonly phase: string;
  readonly metric: string;
  readonly pins: readonly string[];
  /** The sites of the metric on the map, null until they are known; and those of the run compared with. */
  readonly sites: readonly string[] | null;
  readonly otherSites: readonly string[];
  readonly otherHolds: ReadonlySet<string>;
  readonly range: readonly [number, number] | null;
  readonly extent: readonly [number, number];
  /** The chosen step, at the time of asking. */
  step(): number;
  readonly annotations: readonly Annotation[];
  readonly started: readonly [number, number];
  spec(metric: string): RunMetric | undefined;
  /** Asks for a series, or returns what was answered before. */
  series(query: SeriesQuery): Promise<Series>;
  /** What the catalogue knows of a metric. */
  entry(metric: string): CatalogEntry | undefined;
  /** Whether the answer is still wanted. */
  current(): boolean;
}

/** Charts that are not of one metric of the whole run. */
const [PINS, LEFT, MOST_CHARTS] = ["@pins", "@left", 16];
const PREFERRED: readonly (readonly string[])[] = [["loss"], ["gradient.total_norm", "gain.max", "update.ratio"]];

export class Curves {
  readonly #axes = el("select", { attrs: { "aria-label": "Axis of the lines", "data-part": "axis" } });
  readonly #slider = el("input", {
    attrs: { type: "range", min: "0", max: "0.99", step: "0.01", "aria-label": "Smoothing", "data-part": "smooth" },
  });
  readonly #output = el("output");
  #axis: AxisKind = "step";
  #smooth = 0;
  #log: Record<string, boolean> = {};
  /** What somebody chose, null for what is usual. */
  #chosen: readonly string[] | null = null;
  #usual: readonly string[] = [];
  #options: readonly Option[] = [];
  #absent: ReadonlySet<string> = new Set();
  /** The charts in their order; that of the gradient left has no card of ours. */
  #charts: readonly { readonly name: string; readonly card: LineCard | null }[] = [];
  readonly #pins: LineCard;
  readonly #make: () => LineCard;
  readonly #box = el("div", { class: "lines" });
  readonly #add = el("select", {
    class: "add",
    title: "Add a chart",
    attrs: { "aria-label": "Add a chart", "data-part": "add-chart" },
  });
  readonly root: HTMLElement;

  constructor(
    private readonly events: CurveEvents,
    tooltip: Tooltip,
    info: MetricInfo,
    private readonly losing: LosingCard,
  ) {
    const card: LineCardEvents = {
      step: (step) => events.step(step),
      zoom: (range) => events.zoom(range),
      zoomBy: (factor, at) => events.zoomBy(factor, at),
      pan: (share) => events.pan(share),
      hover: (step, from) => events.hover(step, from),
      unpin: (site) => events.unpin(site),
      chosen: (chosen) => {
        this.#choose(this.#charts.map(({ name, card }) => (card === chosen ? chosen.metric : name)));
        events.load(chosen);
      },
      remove: (removed) => this.#choose(this.#names((item) => item.card !== removed)),
      log: (metric, on) => {
        this.#log = { ...this.#log, [metric]: on };
        this.redraw();
        events.changed();
      },
    };
    const style = (): LineStyle => ({ axis: this.#axis, smooth: this.#smooth, log: this.#log });
    this.#make = () => new LineCard("run", style, card, tooltip, info);
    this.#pins = new LineCard("pins", style, card, tooltip, info);
    losing.root
      .querySelector(".bar")
      ?.append(removeButton(() => this.#choose(this.#names(({ name }) => name !== LEFT))));
    this.#add.addEventListener("change", () => this.#added(this.#add.value));
    const heading = el(
      "div",
      { class: "bar" },
      el("h2", { text: "Over time" }),
      el("label", {}, "by", this.#axes),
      el("label", {}, "smoothing", this.#slider, this.#output),
      this.#add,
    );
    this.root = el("section", { class: "curves", attrs: { "aria-label": "Charts over time" } }, heading, this.#box);
    setOptions(
      this.#axes,
      AXES.map(({ kind, label }) => ({ value: kind, label })),
      "step",
    );
    this.#axes.addEventListener("change", () => this.#restyle());
    this.#slider.addEventListener("input", () => this.#restyle());
    this.#showStyle();
  }

  /** The cards of lines that are shown. */
  get cards(): readonly LineCard[] {
    return this.#charts.flatMap(({ card }) => card ?? []);
  }

  /** What belongs into the address. */
  get state(): Pick<UrlState, "axis" | "smooth" | "log" | "charts"> {
    const same = this.#chosen === null || this.#chosen.join() === this.#usual.join();
    return {
      axis: this.#axis,
      smooth: this.#smooth,
      log: this.#log,
      ...(same ? {} : { charts: this.#chosen ?? [] }),
    };
  }

  restore(state: UrlState): void {
    [this.#axis, this.#smooth, this.#log, this.#chosen] = [
      state.axis ?? "step",
      state.smooth ?? 0,
      { ...state.log },
      state.charts ?? null,
    ];
    this.#showStyle();
  }

  /** Offers the run-level metrics of a run, and those it could hold. */
  offer(held: readonly RunMetric[], catalog: readonly CatalogEntry[]): void {
    this.#options = offerMetrics(held, catalog, (kind) => kind === "run");
    const names = held.filter(({ kind }) => kind === "run").map(({ name }) => name);
    const taken: string[] = [];
    for (const list of PREFERRED) {
      const found = list.find((name) => names.includes(name)) ?? names.find((name) => !taken.includes(name));
      if (found !== undefined) taken.push(found);
    }
    this.#usual = [...taken, PINS, LEFT];
    this.#absent = new Set(this.#options.map(({ value }) => value).filter((value) => !names.includes(value)));
    this.#lay();
  }

  /** Other charts, by name. */
  #choose(names: readonly string[]): void {
    this.#chosen = names;
    this.#lay();
    this.events.changed();
  }

  #names(keep: (item: { readonly name: string; readonly card: LineCard | null }) => boolean): readonly string[] {
    return this.#charts.filter(keep).map(({ name }) => name);
  }

  #added(name: string): void {
    if (name === "") return;
    const before = new Set(this.cards);
    this.#choose([...this.#names(() => true), name]);
    for (const card of this.cards) if (!before.has(card)) this.events.load(card);
  }

  /** Puts the charts in their order; a card whose metric stays is the same card. */
  #lay(): void {
    const known = new Set([...this.#options.map(({ value }) => value), PINS, LEFT]);
    const wanted = (this.#chosen ?? this.#usual).filter((name) => known.has(name)).slice(0, MOST_CHARTS);
    const free = this.#charts.flatMap(({ card }) => (card === null || card === this.#pins ? [] : [card]));
    const kept = wanted.map((name) => {
      const at = free.findIndex(({ metric }) => metric === name);
      return at < 0 ? null : (free.splice(at, 1)[0] ?? null);
    });
    this.#charts = wanted.map((name, i) => {
      if (name === LEFT) return { name, card: null };
      if (name === PINS) return { name, card: this.#pins };
      const card = kept[i] ?? free.shift() ?? this.#make();
      const other = card.metric !== name;
      card.offer(this.#options, name);
      // What a run lacks is explained at once; what it holds is loaded with the rest.
      if (other && this.#absent.has(name)) this.events.load(card);
      return { name, card };
    });
    const roots = this.#charts.map(({ card }) => card?.root ?? this.losing.root);
    if (roots.length !== this.#box.children.length || roots.some((root, i) => root !== this.#box.children[i])) {
      this.#box.replaceChildren(...roots);
      // Those that stay have another width.
      this.redraw();
    }
    const special = [
      { value: PINS, label: "pinned layers" },
      { value: LEFT, label: "gradient remaining, from the loss back" },
    ].filter(({ value }) => !wanted.includes(value));
    const rest = wanted.length < MOST_CHARTS ? [...special, ...this.#options] : [];
    setOptions(this.#add, [{ value: "", label: "+ chart" }, ...rest], "");
  }

  get pinned(): LineCard | undefined {
    return this.cards.find((card) => card === this.#pins);
  }

  /** Loads one card; what is no longer wanted when it arrives is dropped. */
  async load(card: LineCard, at: CurveContext): Promise<void> {
    const pins = card.kind === "pins";
    // Until the map of this metric is there, its sites are unknown; the map's arrival loads the pins.
    if (pins && at.sites === null) return;
    const metric = pins ? at.metric : card.metric;
    const spec = at.spec(metric);
    const [sites, theirs] = [at.sites ?? [], at.otherSites].map((there) =>
      pins ? at.pins.filter((pin) => there.includes(pin)) : [],
    );
    if (spec === undefined) return card.clear(absent(at.entry(metric)), "Pinned layers");
    if (pins && sites?.length === 0) return card.clear("Click a layer in the map to follow it here.", "Pinned layers");
    const query = { metric, phase: at.phase, columns: card.columns, reduce: "mean,min,max", range: at.range };
    const other = at.otherHolds.has(metric) && (!pins || theirs?.length !== 0) ? at.other : null;
    const [series, found] = await Promise.all([
      at.series({ ...query, run: at.run, sites: sites ?? [] }),
      other === null ? null : at.series({ ...query, run: other, sites: theirs ?? [] }),
    ]);
    if (!at.current()) return;
    card.show({
      series,
      spec,
      range: at.extent,
      pins: at.pins,
      other: found,
      started: at.started,
      annotations: at.annotations,
    });
    card.showStep(at.step());
  }

  redraw(): void {
    for (const card of this.cards) card.redraw();
    this.losing.redraw();
  }

  #restyle(): void {
    this.#axis = AXES.find(({ kind }) => kind === this.#axes.value)?.kind ?? "step";
    this.#smooth = Number(this.#slider.value);
    this.#showStyle();
    this.redraw();
    this.events.changed();
  }

  #showStyle(): void {
    this.#axes.value = this.#axis;
    this.#slider.value = String(this.#smooth);
    this.#output.textContent = this.#smooth === 0 ? "off" : this.#smooth.toFixed(2);
  }
}

function absent(entry: CatalogEntry | undefined): string {
  return entry === undefined
    ? "This run does not have this metric."
    : `Not recorded in this run. ${entry.how}\n${entry.code}`;
}
