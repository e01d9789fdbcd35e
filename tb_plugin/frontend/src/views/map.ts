// Where: any metric over depth and time, with the profile of one step beside it.
import type { CatalogEntry, RunMetric } from "../api";
import { HeatMap } from "../charts/heatmap";
import { Profile } from "../charts/profile";
import { el, keepChildren, setOptions, setText, type Option } from "../dom";
import { colourScale, css, type ColourScale } from "../model/colour";
import { csv, fileName, mapSvg, seriesRows } from "../model/export";
import { formatNumber, formatStep, formatTime, linearTicks, shorten, siteText, unitText } from "../model/format";
import { rowTop } from "../model/heat";
import { cellKind, columnAt, type Block, type Series } from "../model/series";
import { REDUCERS, type Mode, type Reducer } from "../model/url";
import type { Gesture } from "../model/zoom";
import { pinColour } from "../style";
import { downloadMenu, theme } from "./download";
import { lesson } from "./empty";
import type { MetricInfo } from "./info";
import { legend } from "./legend";
import type { Navigate } from "./navigate";
import type { Tooltip } from "./tooltip";

export interface MapEvents extends Navigate {
  metric(name: string): void;
  pin(site: string): void;
  hover(step: number | null, site: string | null): void;
  mode(mode: Mode): void;
  reduce(reducer: Reducer): void;
}

export interface MapContent {
  readonly series: Series;
  readonly spec: RunMetric;
  readonly range: readonly [number, number];
  /** Names the run where there are two. */
  readonly of: string;
  /** Another map whose colours this one shares. */
  readonly like: MapView | null;
}

const [LEAST_HEIGHT, MOST_HEIGHT, ROW, LABEL, LETTER] = [187, 408, 17, 14, 6.6];
const [NAME_LETTERS, SWATCHES, AXIS, EDGE] = [26, 50, 46, 10];
const KEYS = "Arrow keys move the step and the layer, Enter pins the layer, plus and minus zoom, 0 shows all steps.";

function heightOf(sites: number): number {
  return Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, sites * ROW));
}

export class MapView {
  readonly #metrics = el("select", { attrs: { "aria-label": "Metric on the map", "data-part": "metric" } });
  readonly #modes = el("select", { attrs: { "aria-label": "How to compare", "data-part": "mode" } });
  readonly #reducers = el("select", { title: "What a column shows that stands for several steps", attrs: { "aria-label": "What a column of several steps shows", "data-part": "reduce" } });
  readonly #formula = el("span", { class: "formula mono" });
  readonly #note = el("span", { class: "note", attrs: { "data-part": "note" } });
  readonly #reset = el("button", { class: "btn toggle", text: "Show all steps", attrs: { type: "button", "data-part": "reset" } });
  readonly #title = el("h2", { text: "Layer map" });
  readonly #names = el("div", { class: "names", attrs: { "data-part": "names" } });
  readonly #heat: HeatMap;
  readonly #profile = new Profile();
  readonly #axis = el("div", { class: "axis" }, el("div"), el("p", { text: "optimizer step" }));
  readonly #caption = el("div", { class: "axis caption" }, el("div"), el("p"));
  readonly #foot = el("div", { class: "foot" });
  readonly #lesson = el("div", { class: "lesson", attrs: { "data-part": "lesson" } });
  readonly #body = el("div", { class: "map" });
  readonly root = el("section", { class: "card", attrs: { "aria-label": "Map of the layers" } });
  #content: MapContent | null = null;
  #scale: ColourScale | null = null;
  #pins: readonly string[] = [];
  #step = 0;
  #row: number | null = null;
  #legendOf = "";
  #dark = false;
  /** How many letters fit beside the map. */
  #letters = 0;

  /** A `second` map shows the run compared with; the first one has the controls. */
  constructor(private readonly events: MapEvents, private readonly tooltip: Tooltip, info: MetricInfo, second = false) {
    this.#heat = new HeatMap({
      hover: (at) => this.#hovered(at),
      pick: (site, step) => {
        const name = this.sites[site];
        if (name !== undefined) events.pin(name);
        events.step(this.#snap(step));
      },
      zoom: (range) => events.zoom(range),
      wheel: (factor, step) => events.zoomBy(factor, step),
      key: (action) => this.#keyed(action),
    });
    this.#body.append(this.#names, this.#heat.root, this.#profile.root, el("div"), this.#axis, this.#caption);
    this.#reset.hidden = this.#lesson.hidden = this.#modes.hidden = true;
    this.#reset.addEventListener("click", () => events.zoom(null));
    this.#metrics.addEventListener("change", () => events.metric(this.#metrics.value));
    this.#modes.addEventListener("change", () => events.mode(this.#modes.value === "difference" ? "difference" : "beside"));
    setOptions(this.#reducers, REDUCERS.map((word) => ({ value: word, label: word })), "extreme");
    this.#reducers.addEventListener("change", () => events.reduce(REDUCERS.find((word) => word === this.#reducers.value) ?? "extreme"));
    const controls = second ? [] : [this.#metrics, info.button(() => this.#content?.spec ?? null), this.#modes];
    const download = downloadMenu("the map", {
      csv: () => (this.#content === null ? null : csv(seriesRows(this.#content.series))),
      svg: () => this.#svg(),
      name: () => fileName(this.#content?.series.run ?? "", this.#content?.spec.name ?? "", this.#content?.spec.compared ? "against" : "map"),
    });
    const bar = el("div", { class: "bar" }, this.#title, ...controls, this.#formula, this.#reset, ...(second ? [] : [this.#reducers]), this.#note, download);
    this.root.append(bar, this.#body, this.#lesson, this.#foot);
    if (!second) return;
    for (const part of this.root.querySelectorAll("[data-part]")) part.setAttribute("data-part", `${part.getAttribute("data-part")}-other`);
    this.root.setAttribute("aria-label", "Map of the layers of the other run");
  }

  /** How many columns are worth asking for. */
  get columns(): number {
    return Math.max(200, Math.round(this.#heat.width * (window.devicePixelRatio || 1)));
  }

  get sites(): readonly string[] {
    return this.#content?.series.sites ?? [];
  }

  /** Offers metrics, and keeps the place that a map of so many sites will take. */
  offer(options: readonly Option[], chosen: string, sites: number): void {
    setOptions(this.#metrics, options, chosen);
    this.#body.style.minHeight = `${heightOf(sites) + AXIS}px`;
    this.#names.style.minHeight = `${heightOf(sites)}px`;
  }

  showReducer(reducer: Reducer): void {
    this.#reducers.value = reducer;
  }

  /** Offers the ways to compare, or none. */
  showMode(mode: Mode | null): void {
    this.#modes.hidden = mode === null;
    setOptions(this.#modes, [{ value: "beside", label: "beside each other" }, { value: "difference", label: "difference" }], mode ?? "beside");
  }

  /** Offers the way back from a zoom. */
  showZoom(zoomed: boolean): void {
    this.#reset.hidden = !zoomed;
  }

  show(content: MapContent): void {
    this.#content = content;
    const { series, spec, of } = content;
    this.#lesson.hidden = true;
    this.#body.hidden = false;
    setText(this.#title, of === "" ? "Layer map" : `Layer map: ${of}`);
    setText(this.#formula, spec.formula);
    this.#formula.title = `${spec.name}: ${spec.formula}\nunit ${spec.unit}; ${spec.source}`;
    setText(this.#note, note(series));
    this.#heat.root.setAttribute("aria-label", `${spec.title} by layer and step. ${KEYS}`);
    this.#paint();
  }

  /** Paints what is shown already once more, in another theme. */
  themed(dark: boolean): void {
    this.#dark = dark;
    if (this.#heat.width > 0) this.#paint();
  }

  /** Shows other steps of what is there already, until the server has sent more. */
  stretch(range: readonly [number, number]): void {
    if (this.#content === null) return;
    this.#content = { ...this.#content, range };
    this.#paint();
  }

  /** Says why there is nothing; with an entry of the catalogue, also what makes a run hold the metric. */
  clear(message: string, of = "", entry: CatalogEntry | null = null): void {
    this.#content = null;
    this.#legendOf = "";
    if (of !== "") setText(this.#title, of);
    setText(this.#note, message);
    setText(this.#formula, entry?.formula ?? "");
    for (const part of [this.#names, this.#foot, this.#axis.children[0], this.#caption.children[0]]) part?.replaceChildren();
    setText(this.#caption.children[1] ?? this.#caption, "");
    this.#heat.clear();
    this.#profile.clear();
    this.#body.hidden = entry !== null;
    this.#lesson.hidden = entry === null;
    if (entry !== null) this.#lesson.replaceChildren(...lesson(entry));
  }

  showPins(pins: readonly string[]): void {
    this.#pins = pins;
    this.#heat.showPins(pins.map((pin) => this.sites.indexOf(pin)));
    this.#showNames();
  }

  showStep(step: number): void {
    this.#step = step;
    this.#heat.showStep(step);
    if (this.#content === null || this.#block === null || this.#scale === null) return;
    const { series, spec } = this.#content;
    const column = columnAt(series.first, step);
    this.#profile.paint(series, this.#block, column, this.#scale, spec.marks, this.#height);
    placeTicks(this.#caption, this.#profile.ticks);
    setText(this.#caption.children[1] ?? this.#caption, `${spec.title} at step ${steps(series, column)}`);
  }

  /** Shows what is pointed at in another view: a step, and a site where this map has it. */
  showHover(step: number | null, site: string | null): void {
    this.#heat.showHover(step);
    this.#showRow(site === null ? null : this.sites.indexOf(site));
  }

  #paint(): void {
    const [content, block] = [this.#content, this.#block];
    if (content === null || block === null) return;
    const { series, spec, range, like } = content;
    this.#scale = (like === null ? null : like.#scale) ?? colourScale(spec, block, this.#dark);
    this.#names.style.height = `${this.#height}px`;
    this.#profile.fit();
    this.#letters = Math.floor(this.#names.clientWidth / LETTER);
    this.#heat.paint(series, block, range, this.#scale, this.#height);
    const key = JSON.stringify([spec.name, spec.compared, this.#scale.low, this.#scale.high, this.#dark]);
    if (key !== this.#legendOf) this.#foot.replaceChildren(legend(spec, this.#scale, spec.compared));
    this.#legendOf = key;
    const ticks = linearTicks(range[0], range[1], Math.max(2, this.#heat.width / 110)).filter(Number.isInteger);
    placeTicks(this.#axis, ticks.map((tick) => ({ x: this.#heat.toX(tick), text: formatStep(tick) })));
    this.showPins(this.#pins);
    this.showStep(this.#step);
  }

  #showRow(site: number | null): void {
    this.#row = site;
    this.#heat.showRow(site);
    this.#profile.showRow(site, this.sites.length, this.#height);
  }

  #svg(): string | null {
    if (this.#content === null || this.#scale === null) return null;
    const { series, spec, range } = this.#content;
    const { words, low, high } = this.#scale;
    const colours = Array.from({ length: SWATCHES }, (_, i) => css(words[Math.round((i / (SWATCHES - 1)) * (words.length - 1))] ?? 0));
    const [sites, row] = [this.sites, this.#height / Math.max(1, this.sites.length)];
    const every = Math.max(1, Math.ceil(LABEL / row));
    const names = sites.map((site, i) => ({ text: shorten(siteText(site), NAME_LETTERS), y: rowTop(i, sites.length, this.#height) + row / 2 }));
    return mapSvg({
      title: `${this.#title.textContent}: ${series.run}, ${spec.title}`,
      caption: this.#note.textContent ?? "",
      names: names.filter((_, i) => i % every === 0),
      image: this.#heat.picture,
      width: this.#heat.width,
      height: this.#height,
      range,
      theme: theme(),
      ramp: { colours, low: formatNumber(low, 3), high: formatNumber(high, 3) },
    });
  }

  get #block(): Block | null {
    return this.#content?.series.blocks.values().next().value ?? null;
  }

  get #height(): number {
    return heightOf(this.sites.length);
  }

  #snap(step: number): number {
    const first = this.#content?.series.first;
    return first?.[columnAt(first, step)] ?? Math.round(step);
  }

  #showNames(): void {
    const sites = this.sites;
    const every = Math.max(1, Math.ceil((LABEL * sites.length) / this.#height));
    const middle = this.#height / Math.max(1, sites.length) / 2 - LABEL / 2;
    const chosen = new Set(this.#pins.map((pin) => sites.indexOf(pin)).filter((site) => site >= 0));
    const near = (site: number): boolean => [...chosen].some((pin) => pin !== site && Math.abs(pin - site) < every);
    const top = (site: number): number => Math.max(0, Math.min(this.#height - LABEL, rowTop(site, sites.length, this.#height) + middle));
    // Labels at the edges are moved inwards, where the next one may stand already.
    const free = (site: number): boolean => site % every === 0 && !near(site) && (site === 0 || top(0) - top(site) >= LABEL);
    const shown = sites.map((_, i) => i).filter((i) => chosen.has(i) || free(i)).reverse();
    keepChildren(
      this.#names,
      shown.map((site) => ({ site: sites[site] ?? "", top: top(site) })),
      ({ site }) => site,
      ({ site }) => this.#nameButton(site),
      (button, item) => this.#nameAt(button, item),
    );
  }

  #nameButton(site: string): HTMLElement {
    const button = el("button", { title: siteText(site), attrs: { type: "button" } }, el("i"), el("span"));
    button.addEventListener("click", () => this.events.pin(site));
    return button;
  }

  #nameAt(button: HTMLElement, { site, top }: { readonly site: string; readonly top: number }): void {
    const pin = this.#pins.indexOf(site);
    const [dot, text] = button.children as unknown as [HTMLElement, HTMLElement];
    button.className = pin < 0 ? "mono" : "mono pinned";
    button.setAttribute("aria-pressed", String(pin >= 0));
    button.style.top = `${top}px`;
    dot.hidden = pin < 0;
    dot.style.background = pin < 0 ? "" : pinColour(pin);
    setText(text, shorten(siteText(site), this.#letters - (pin >= 0 ? 4 : 2)));
  }

  #keyed(action: Gesture): boolean {
    const series = this.#content?.series;
    if (series === undefined) return false;
    const column = columnAt(series.first, this.#step);
    switch (action.kind) {
      case "zoom":
        return this.events.zoomBy(action.factor, this.#step);
      case "pan":
        return this.events.pan(action.by);
      case "reset":
        this.events.zoom(null);
        return true;
      case "pick": {
        const site = this.sites[this.#row ?? -1];
        if (site !== undefined) this.events.pin(site);
        return true;
      }
      case "row": {
        const before = this.#row ?? this.sites.indexOf(this.#pins[0] ?? "");
        this.#point(Math.max(0, Math.min(this.sites.length - 1, before + action.by)), column);
        return true;
      }
      default: {
        const wanted = action.kind === "end" ? (action.by < 0 ? 0 : series.columns - 1) : column + action.by;
        const next = Math.max(0, Math.min(series.columns - 1, wanted));
        const step = series.first[next];
        if (step !== undefined) this.events.step(step);
        if (this.#row !== null) this.#point(this.#row, next);
        return true;
      }
    }
  }

  /** Points at a cell as the pointer would. */
  #point(site: number, column: number): void {
    const step = this.#content?.series.first[column] ?? this.#step;
    this.#hovered({ site, step, ...this.#heat.place(site, step) });
  }

  #hovered(at: { readonly site: number; readonly step: number; readonly x: number; readonly y: number } | null): void {
    const [content, block] = [this.#content, this.#block];
    const column = content === null || at === null ? -1 : columnAt(content.series.first, at.step);
    this.#showRow(at?.site ?? null);
    if (content === null || block === null || at === null || column < 0) {
      this.tooltip.hide();
      this.events.hover(null, null);
      return;
    }
    const { series, spec } = content;
    const cell = at.site * series.columns + column;
    const kind = cellKind(block.bits[cell] ?? 0);
    const unit = kind === "value" ? unitText(spec.unit) : "";
    const value = kind === "missing" ? "nothing arrived" : `${formatNumber(block.values[cell] ?? NaN)} ${unit}`.trim();
    const lines = [`${spec.title}, step ${steps(series, column)}`, formatTime(series.wall[column] ?? 0)];
    const site = series.sites[at.site] ?? "";
    this.tooltip.show({ layer: siteText(site), value, lines }, at.x, at.y);
    this.events.hover(series.first[column] ?? at.step, site);
  }
}

function placeTicks(axis: HTMLElement, ticks: readonly { readonly x: number; readonly text: string }[]): void {
  const box = axis.children[0];
  if (box === undefined) return;
  const make = ({ text }: { readonly text: string }): HTMLElement => el("span", { text });
  keepChildren(box, ticks, ({ text }) => text, make, (label, { x }) => {
    label.style.left = `${x}px`;
    // What stands at the left edge must not run into the axis beside it.
    label.style.transform = x < EDGE ? "none" : "";
  });
}

function steps(series: Series, column: number): string {
  const [first, last] = [series.first[column], series.last[column]];
  if (first === undefined || last === undefined) return "\u2013";
  return first === last ? formatStep(first) : `${formatStep(first)}\u2013${formatStep(last)}`;
}

function note(series: Series): string {
  if (series.most <= 1) return "every reading shown";
  return `${formatStep(series.width)} steps per column: ${series.blocks.keys().next().value ?? ""} shown`;
}
