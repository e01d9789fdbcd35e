// Where: any per-site metric over depth and time, with the profile of one step beside it.
import type { RunMeta, RunMetric } from "../api";
import { HeatMap } from "../charts/heatmap";
import { Profile } from "../charts/profile";
import { el, setOptions } from "../dom";
import { colourScale, css, type ColourScale } from "../model/colour";
import { csv, fileName, mapSvg, seriesRows } from "../model/export";
import { formatNumber, formatStep, formatTime, linearTicks, shorten, unitText } from "../model/format";
import { rowTop } from "../model/heat";
import { cellKind, columnAt, type Block, type Series } from "../model/series";
import type { Mode } from "../model/url";
import { pinColour } from "../style";
import { downloadMenu, theme } from "./download";
import type { MetricInfo } from "./info";
import { legend } from "./legend";
import type { Tooltip } from "./tooltip";

export interface MapEvents {
  metric(name: string): void;
  step(step: number): void;
  pin(site: string): void;
  hover(step: number | null): void;
  zoom(range: readonly [number, number] | null): void;
  mode(mode: Mode): void;
}

const [LEAST_HEIGHT, MOST_HEIGHT, ROW, LABEL, LETTER] = [187, 408, 17, 14, 6.6];
const [NAME_LETTERS, SWATCHES] = [26, 50];

export class MapView {
  private readonly metrics = el("select", { attrs: { "aria-label": "Metric on the map", "data-part": "metric" } });
  private readonly modes = el("select", { attrs: { "aria-label": "How to compare", "data-part": "mode" } });
  private readonly formula = el("span", { class: "formula mono" });
  private readonly note = el("span", { class: "note", attrs: { "data-part": "note" } });
  private readonly reset = el("button", { class: "btn toggle", text: "Show all steps", attrs: { type: "button", "data-part": "reset" } });
  private readonly title = el("h2", { text: "Gain map" });
  private readonly names = el("div", { class: "names", attrs: { "data-part": "names" } });
  private readonly heat: HeatMap;
  private readonly profile = new Profile();
  private readonly axis = el("div", { class: "axis" });
  private readonly caption = el("div", { class: "axis caption" });
  private readonly foot = el("div");
  private readonly body = el("div", { class: "map" });
  readonly root = el("section", { class: "card", attrs: { "aria-label": "Map of the layers" } });
  private series: Series | null = null;
  private spec: RunMetric | null = null;
  private scale: ColourScale | null = null;
  private range: readonly [number, number] = [0, 1];
  private pins: readonly string[] = [];
  private step = 0;
  private of = "";
  private like: MapView | null = null;

  /** A `second` map shows the run compared with; the first one has the controls. */
  constructor(private readonly events: MapEvents, private readonly tooltip: Tooltip, info: MetricInfo, second = false) {
    this.heat = new HeatMap({
      hover: (at) => this.hovered(at),
      pick: (site, step) => {
        const name = this.series?.sites[site];
        if (name !== undefined) events.pin(name);
        events.step(this.snap(step));
      },
      zoom: (range) => events.zoom(range),
    });
    this.body.append(this.names, this.heat.root, this.profile.root, el("div"), this.axis, this.caption);
    this.reset.hidden = true;
    this.reset.addEventListener("click", () => events.zoom(null));
    this.body.style.minHeight = "235px";
    this.foot.style.minHeight = "44px";
    this.metrics.addEventListener("change", () => events.metric(this.metrics.value));
    this.modes.addEventListener("change", () => events.mode(this.modes.value === "difference" ? "difference" : "beside"));
    const controls = second ? [] : [this.metrics, info.button(() => this.spec), this.modes];
    const download = downloadMenu("the map", {
      csv: () => (this.series === null ? null : csv(seriesRows(this.series))),
      svg: () => this.svg(),
      name: () => fileName(this.series?.run ?? "", this.spec?.name ?? "", this.spec?.compared ? "against" : "map"),
    });
    this.root.append(el("div", { class: "bar" }, this.title, ...controls, this.formula, this.reset, this.note, download), this.body, this.foot);
    if (!second) return;
    for (const part of this.root.querySelectorAll("[data-part]")) part.setAttribute("data-part", `${part.getAttribute("data-part")}-other`);
    this.root.setAttribute("aria-label", "Map of the layers of the other run");
  }

  /** Shows the step that another view points at. */
  showHover(step: number | null): void {
    this.heat.showHover(step);
  }

  /** How many columns are worth asking for. */
  get columns(): number {
    return Math.max(200, Math.round(this.heat.width * (window.devicePixelRatio || 1)));
  }

  get sites(): readonly string[] {
    return this.series?.sites ?? [];
  }

  showMeta(meta: RunMeta, chosen: string): void {
    const wide = meta.metrics.filter((metric) => metric.kind !== "run");
    setOptions(this.metrics, wide.map(({ name, title, kind }) => ({ value: name, label: `${title} (${kind})` })), chosen);
  }

  /** Offers the ways to compare, or none. */
  showMode(mode: Mode | null): void {
    this.modes.hidden = mode === null;
    setOptions(this.modes, [{ value: "beside", label: "beside each other" }, { value: "difference", label: "difference" }], mode ?? "beside");
  }

  /** Offers the way back from a zoom. */
  showZoom(zoomed: boolean): void {
    this.reset.hidden = !zoomed;
  }

  /** `of` names the run where there are two; `like` is another map whose colours this one shares. */
  show(series: Series, spec: RunMetric, range: readonly [number, number], dark: boolean, of = "", like: MapView | null = null): void {
    [this.series, this.spec, this.range, this.of, this.like] = [series, spec, range, of, like];
    const kind = spec.name === "block.gain" ? "Gain map" : "Layer map";
    this.title.textContent = of === "" ? kind : `${kind}: ${of}`;
    this.formula.textContent = spec.formula;
    this.formula.title = `${spec.name}: ${spec.formula}\nunit ${spec.unit}; ${spec.source}`;
    this.note.textContent = note(series);
    const height = this.height;
    const block = this.block;
    if (block === null) return;
    this.scale = like?.scale ?? colourScale(spec, block, dark);
    this.names.style.height = `${height}px`;
    this.heat.paint(series, block, range, this.scale, height);
    this.foot.replaceChildren(legend(spec, this.scale, spec.compared));
    this.showAxis();
    this.showPins(this.pins);
    this.showStep(this.step);
  }

  /** Paints what is shown already once more. */
  themed(dark: boolean): void {
    if (this.series !== null && this.spec !== null && this.heat.width > 0) this.show(this.series, this.spec, this.range, dark, this.of, this.like);
  }

  clear(message: string, of = ""): void {
    this.series = null;
    if (of !== "") this.title.textContent = of;
    this.note.textContent = message;
    this.formula.textContent = "";
    this.names.replaceChildren();
    this.foot.replaceChildren();
    this.axis.replaceChildren();
    this.heat.clear();
  }

  showPins(pins: readonly string[]): void {
    this.pins = pins;
    this.heat.showPins(pins.map((pin) => this.sites.indexOf(pin)));
    this.showNames();
  }

  showStep(step: number): void {
    this.step = step;
    this.heat.showStep(step);
    if (this.series === null || this.block === null || this.scale === null || this.spec === null) return;
    const column = columnAt(this.series.first, step);
    this.profile.paint(this.series, this.block, column, this.scale, this.spec.marks, this.height);
    this.caption.replaceChildren(
      ...this.profile.ticks.map(({ x, text }) => tickLabel(x, text)),
      el("p", { text: `${this.spec.title} at step ${steps(this.series, column)}` }),
    );
  }

  private svg(): string | null {
    if (this.series === null || this.spec === null || this.scale === null) return null;
    const { words, low, high } = this.scale;
    const colours = Array.from({ length: SWATCHES }, (_, i) => css(words[Math.round((i / (SWATCHES - 1)) * (words.length - 1))] ?? 0));
    const [sites, row] = [this.sites, this.height / Math.max(1, this.sites.length)];
    const every = Math.max(1, Math.ceil(LABEL / row));
    const names = sites.map((site, i) => ({ text: shorten(site, NAME_LETTERS), y: rowTop(i, sites.length, this.height) + row / 2 }));
    return mapSvg({
      title: `${this.title.textContent}: ${this.series.run}, ${this.spec.title}`,
      caption: this.note.textContent ?? "",
      names: names.filter((_, i) => i % every === 0),
      image: this.heat.picture,
      width: this.heat.width,
      height: this.height,
      range: this.range,
      theme: theme(),
      ramp: { colours, low: formatNumber(low, 3), high: formatNumber(high, 3) },
    });
  }

  private get block(): Block | null {
    return this.series?.blocks.values().next().value ?? null;
  }

  private get height(): number {
    return Math.max(LEAST_HEIGHT, Math.min(MOST_HEIGHT, this.sites.length * ROW));
  }

  private snap(step: number): number {
    const column = this.series === null ? -1 : columnAt(this.series.first, step);
    return column < 0 ? Math.round(step) : (this.series?.first[column] ?? step);
  }

  private showNames(): void {
    const sites = this.sites;
    const every = Math.max(1, Math.ceil((LABEL * sites.length) / this.height));
    const middle = this.height / Math.max(1, sites.length) / 2 - LABEL / 2;
    const chosen = new Set(this.pins.map((pin) => sites.indexOf(pin)).filter((site) => site >= 0));
    const near = (site: number): boolean => [...chosen].some((pin) => pin !== site && Math.abs(pin - site) < every);
    const top = (site: number): number => Math.max(0, Math.min(this.height - LABEL, rowTop(site, sites.length, this.height) + middle));
    // Labels at the edges are moved inwards, where the next one may stand already.
    const free = (site: number): boolean => site % every === 0 && !near(site) && (site === 0 || top(0) - top(site) >= LABEL);
    const shown = sites.map((_, i) => i).filter((i) => chosen.has(i) || free(i));
    this.names.replaceChildren(...shown.map((site) => this.nameButton(sites[site] ?? "", top(site))));
  }

  private nameButton(site: string, top: number): HTMLElement {
    const pin = this.pins.indexOf(site);
    const attrs = { type: "button", "aria-pressed": String(pin >= 0) };
    const button = el("button", { title: site, class: pin < 0 ? "mono" : "mono pinned", attrs });
    if (pin >= 0) {
      const dot = el("i");
      dot.style.background = pinColour(pin);
      button.append(dot);
    }
    button.append(shorten(site, Math.floor(this.names.clientWidth / LETTER) - (pin >= 0 ? 4 : 2)));
    button.style.top = `${top}px`;
    button.addEventListener("click", () => this.events.pin(site));
    return button;
  }

  private showAxis(): void {
    const ticks = linearTicks(this.range[0], this.range[1], Math.max(2, this.heat.width / 110)).filter(Number.isInteger);
    this.axis.replaceChildren(
      ...ticks.map((tick) => tickLabel(this.heat.toX(tick), formatStep(tick))),
      el("p", { text: "optimizer step" }),
    );
  }

  private hovered(at: { readonly site: number; readonly step: number; readonly x: number; readonly y: number } | null): void {
    const [series, block] = [this.series, this.block];
    const column = series === null || at === null ? -1 : columnAt(series.first, at.step);
    if (series === null || block === null || at === null || column < 0) {
      this.tooltip.hide();
      this.events.hover(null);
      return;
    }
    const cell = at.site * series.columns + column;
    const kind = cellKind(block.bits[cell] ?? 0);
    const unit = kind === "value" && this.spec !== null ? unitText(this.spec.unit) : "";
    const value = kind === "missing" ? "nothing arrived" : `${formatNumber(block.values[cell] ?? NaN)} ${unit}`.trim();
    const lines = [`${this.spec?.title ?? ""}, step ${steps(series, column)}`, formatTime(series.wall[column] ?? 0)];
    this.tooltip.show({ layer: series.sites[at.site] ?? "", value, lines }, at.x, at.y);
    this.events.hover(series.first[column] ?? at.step);
  }
}

function tickLabel(x: number, text: string): HTMLElement {
  const label = el("span", { text });
  label.style.left = `${x}px`;
  return label;
}

function steps(series: Series, column: number): string {
  const [first, last] = [series.first[column], series.last[column]];
  if (first === undefined || last === undefined) return "\u2013";
  return first === last ? formatStep(first) : `${formatStep(first)}\u2013${formatStep(last)}`;
}

function note(series: Series): string {
  if (series.most <= 1) return "every reading shown";
  return `${formatStep(series.width)} steps per column: extreme shown`;
}
