// The lines below the map: their common axis and smoothing, and what each of them asks the server for.
import type { Annotation, CatalogEntry, RunMetric, SeriesQuery } from "../api";
import { el, setOptions } from "../dom";
import { AXES, type AxisKind } from "../model/axis";
import { offerMetrics } from "../model/offer";
import type { Series } from "../model/series";
import type { UrlState } from "../model/url";
import type { MetricInfo } from "./info";
import { LineCard, type LineCardEvents, type LineStyle } from "./lines";
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
  #wanted: readonly string[] = [];
  #usual: readonly string[] = [];
  readonly cards: readonly LineCard[];
  readonly #box = el("div", { class: "lines" });
  readonly root: HTMLElement;

  constructor(
    private readonly events: CurveEvents,
    tooltip: Tooltip,
    info: MetricInfo,
  ) {
    const card: LineCardEvents = {
      step: (step) => events.step(step),
      zoom: (range) => events.zoom(range),
      zoomBy: (factor, at) => events.zoomBy(factor, at),
      pan: (share) => events.pan(share),
      hover: (step, from) => events.hover(step, from),
      unpin: (site) => events.unpin(site),
      chosen: (chosen) => {
        events.changed();
        events.load(chosen);
      },
      log: (metric, on) => {
        this.#log = { ...this.#log, [metric]: on };
        this.redraw();
        events.changed();
      },
    };
    const style = (): LineStyle => ({ axis: this.#axis, smooth: this.#smooth, log: this.#log });
    this.cards = (["run", "run", "pins"] as const).map((kind) => new LineCard(kind, style, card, tooltip, info));
    this.#box.append(...this.cards.map(({ root }) => root));
    const heading = el(
      "div",
      { class: "bar" },
      el("h2", { text: "Over time" }),
      el("label", {}, "by", this.#axes),
      el("label", {}, "smoothing", this.#slider, this.#output),
    );
    this.root = el("section", { class: "curves", attrs: { "aria-label": "Lines over time" } }, heading, this.#box);
    setOptions(
      this.#axes,
      AXES.map(({ kind, label }) => ({ value: kind, label })),
      "step",
    );
    this.#axes.addEventListener("change", () => this.#restyle());
    this.#slider.addEventListener("input", () => this.#restyle());
    this.#showStyle();
  }

  /** Puts one more card beside the lines. */
  add(card: HTMLElement): void {
    this.#box.append(card);
  }

  /** What belongs into the address. */
  get state(): Pick<UrlState, "axis" | "smooth" | "log" | "charts"> {
    const charts = this.cards.filter(({ kind }) => kind === "run").map(({ metric }) => metric);
    return {
      axis: this.#axis,
      smooth: this.#smooth,
      log: this.#log,
      ...(charts.join() === this.#usual.join() ? {} : { charts }),
    };
  }

  restore(state: UrlState): void {
    [this.#axis, this.#smooth, this.#log, this.#wanted] = [
      state.axis ?? "step",
      state.smooth ?? 0,
      { ...state.log },
      state.charts ?? [],
    ];
    this.#showStyle();
  }

  /** Offers the run-level metrics of a run, and those it could hold; a chart without one hides. */
  offer(held: readonly RunMetric[], catalog: readonly CatalogEntry[]): void {
    const options = offerMetrics(held, catalog, (kind) => kind === "run");
    const names = held.filter(({ kind }) => kind === "run").map(({ name }) => name);
    const known = new Set(options.map(({ value }) => value));
    const taken: string[] = [];
    this.#usual = PREFERRED.map((list) => {
      const found = list.find((name) => names.includes(name)) ?? names.find((name) => !taken.includes(name)) ?? "";
      taken.push(found);
      return found;
    });
    this.cards
      .filter(({ kind }) => kind === "run")
      .forEach((card, i) => {
        const chosen =
          [card.asked ? card.metric : "", this.#wanted[i] ?? "", this.#usual[i] ?? ""].find((name) =>
            known.has(name),
          ) ?? "";
        card.offer(options, chosen);
      });
  }

  get pinned(): LineCard | undefined {
    return this.cards.find(({ kind }) => kind === "pins");
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
    ? "This run holds no such metric."
    : `Not recorded in this run. ${entry.how}\n${entry.code}`;
}
