// How: run-level metrics and the pinned layers over time.
import type { RunMeta, RunMetric } from "../api";
import { LineChart, type Curve, type LineData } from "../charts/line";
import { el, setOptions } from "../dom";
import { csv, fileName, lineSvg, seriesRows, type CsvCell } from "../model/export";
import { formatNumber, formatStep, unitText } from "../model/format";
import { joinSteps, spread } from "../model/join";
import { cellKind, columnAt, finiteRow, type Series } from "../model/series";
import { pinColour } from "../style";
import { downloadMenu, theme } from "./download";
import { runLabel } from "./header";
import type { MetricInfo } from "./info";
import type { Tooltip } from "./tooltip";

const RUN_COLOUR = "#2f7de1";
const OTHER_COLOUR = "#e0661a";

export interface LineCardEvents {
  /** The card has to be drawn again from the server. */
  changed(card: LineCard): void;
  hover(step: number | null, from: LineCard): void;
  zoom(range: readonly [number, number] | null): void;
  unpin(site: string): void;
}

interface Shown {
  readonly series: Series;
  readonly spec: RunMetric;
  readonly range: readonly [number, number];
  readonly pins: readonly string[];
  /** The run compared with. */
  readonly other: Series | null;
}

/** One chart. A run card chooses among run-level metrics; the pins card shows the map's metric at the pinned layers. */
export class LineCard {
  private readonly title = el("h2");
  private readonly select = el("select", { attrs: { "aria-label": "Metric of this chart" } });
  private readonly log = el("button", { class: "btn toggle", text: "log", attrs: { type: "button", title: "Logarithmic axis" } });
  private readonly keys = el("div", { class: "keys" });
  private readonly chart: LineChart;
  readonly root = el("section", { class: "card line" });
  metric = "";
  private wantsLog: boolean | null = null;
  private shown: Shown | null = null;
  private drawn: LineData | null = null;

  constructor(readonly kind: "run" | "pins", private readonly events: LineCardEvents, private readonly tooltip: Tooltip, info: MetricInfo) {
    this.chart = new LineChart({ hover: (index, x, y) => this.hovered(index, x, y), zoom: (range) => events.zoom(range) });
    const head = kind === "run" ? this.select : this.title;
    const download = downloadMenu("this chart", {
      csv: () => (this.shown === null ? null : csv(this.rows(this.shown))),
      svg: () => this.svg(),
      name: () => fileName(this.shown?.series.run ?? "", this.shown?.spec.name ?? ""),
    });
    this.root.append(el("div", { class: "bar" }, head, info.button(() => this.shown?.spec ?? null), this.log, download), this.chart.root, this.keys);
    this.select.addEventListener("change", () => {
      this.metric = this.select.value;
      this.wantsLog = null;
      events.changed(this);
    });
    this.log.addEventListener("click", () => {
      this.wantsLog = !this.isLog;
      this.redraw();
    });
  }

  /** Offers the run-level metrics; a card hides when all of them are `taken` by another. */
  showMeta(meta: RunMeta, preferred: readonly string[], taken = ""): void {
    const options = meta.metrics.filter((metric) => metric.kind === "run");
    const names = options.map(({ name }) => name);
    if (!names.includes(this.metric)) this.metric = preferred.find((name) => names.includes(name)) ?? names.find((name) => name !== taken) ?? "";
    this.root.hidden = this.metric === "";
    setOptions(this.select, options.map(({ name, title }) => ({ value: name, label: title })), this.metric);
  }

  get columns(): number {
    return Math.max(200, this.chart.root.clientWidth);
  }

  show(series: Series, spec: RunMetric, range: readonly [number, number], pins: readonly string[] = [], other: Series | null = null): void {
    this.shown = { series, spec, range, pins, other };
    this.redraw();
  }

  clear(message: string, title = ""): void {
    this.shown = null;
    this.log.hidden = true;
    this.title.textContent = title;
    this.keys.replaceChildren();
    this.chart.clear(message);
  }

  showStep(step: number): void {
    this.chart.showStep(step);
  }

  showHover(step: number | null): void {
    this.chart.showHover(step);
  }

  /** Draws what is shown already once more, for another theme or axis. */
  redraw(): void {
    if (this.shown === null) return;
    const { series, spec, range, pins, other } = this.shown;
    this.title.textContent = `Pinned layers: ${spec.title}`;
    this.log.hidden = false;
    this.log.setAttribute("aria-pressed", String(this.isLog));
    const colour = (site: string): string => (this.kind === "run" ? RUN_COLOUR : pinColour(pins.indexOf(site)));
    const curves = series.sites.map((site, i) => this.curve(series, i, colour(site)));
    const marks = spec.marks.filter((mark) => !this.isLog || mark > 0);
    if (this.chart.root.clientWidth === 0) return;
    let steps = series.first;
    if (other !== null && other.sites.length === 1 && curves[0] !== undefined) {
      const joined = joinSteps(series.first, other.first);
      steps = joined.steps;
      const mine = placed({ ...curves[0], label: runLabel(series.run) }, joined.own);
      curves.splice(0, 1, mine, placed({ ...this.curve(other, 0, OTHER_COLOUR), label: runLabel(other.run) }, joined.other));
    }
    this.drawn = { steps, curves, log: this.isLog, marks, range };
    this.chart.show(this.drawn);
    const keys = series.sites.map((site, i) => this.key(site, curves[i]?.colour ?? ""));
    this.keys.replaceChildren(...(this.kind === "run" ? [...(other === null ? [] : curves.map(runKey)), this.unit(series, spec)] : keys));
  }

  /** One table; with a second run, the run's name stands before each line. */
  private rows({ series, other }: Shown): readonly (readonly CsvCell[])[] {
    if (other === null) return seriesRows(series);
    const [head = [], ...own] = seriesRows(series);
    const named = (run: string, rows: readonly (readonly CsvCell[])[]): CsvCell[][] => rows.map((row) => [run, ...row]);
    return [["run", ...head], ...named(series.run, own), ...named(other.run, seriesRows(other).slice(1))];
  }

  private svg(): string | null {
    if (this.shown === null || this.drawn === null) return null;
    return lineSvg({ ...this.drawn, title: `${this.shown.series.run}: ${this.shown.spec.title}`, theme: theme() });
  }

  private get isLog(): boolean {
    return this.wantsLog ?? this.shown?.spec.scale === "log";
  }

  private curve(series: Series, site: number, colour: string): Curve {
    const [mean, min, max] = ["mean", "min", "max"].map((name) => series.blocks.get(name));
    if (mean === undefined) return { label: "", colour, values: [], broken: [] };
    const row = (block: typeof mean): (number | null)[] => finiteRow(series, block, site, this.isLog);
    const broken = Array.from(series.first).filter((_, c) => {
      const kind = cellKind(mean.bits[site * series.columns + c] ?? 0);
      return kind === "nan" || kind === "inf";
    });
    const line = { label: series.sites[site] ?? "", colour, values: row(mean), broken };
    return series.most > 1 && min !== undefined && max !== undefined ? { ...line, low: row(min), high: row(max) } : line;
  }

  private unit(series: Series, spec: RunMetric): HTMLElement {
    const unit = unitText(spec.unit) === "" ? "" : `in ${unitText(spec.unit)}`;
    const band = series.most > 1 ? `mean of ${formatStep(series.width)} steps, band from least to greatest` : "";
    const text = el("span", { text: [unit, band].filter(Boolean).join("; ") });
    text.style.cssText = "color:var(--dim);max-width:100%";
    return text;
  }

  private key(site: string, colour: string): HTMLElement {
    const swatch = el("i");
    swatch.style.background = colour;
    const button = el("button", { title: `Unpin ${site}`, attrs: { type: "button" } }, swatch, el("span", { class: "mono", text: site }));
    button.addEventListener("click", () => this.events.unpin(site));
    return button;
  }

  private hovered(index: number | null, x: number, y: number): void {
    const shown = this.shown;
    const mean = shown?.series.blocks.get("mean");
    if (index === null || shown === null || mean === undefined) {
      this.tooltip.hide();
      this.events.hover(null, this);
      return;
    }
    const { series, spec, other } = shown;
    const here = this.drawn?.steps[index] ?? 0;
    const column = columnAt(series.first, here);
    const at = (site: number): string => {
      const cell = site * series.columns + column;
      return cellKind(mean.bits[cell] ?? 0) === "missing" ? "nothing arrived" : formatNumber(mean.values[cell] ?? NaN);
    };
    const step = other === null ? (series.first[column] ?? 0) : here;
    const first = series.sites.length === 1 ? at(0) : "";
    const rest = series.sites.length === 1 ? [] : series.sites.map((site, i) => `${at(i)}  ${site}`);
    const theirs = other?.blocks.get("mean")?.values[columnAt(other.first, here)];
    if (other !== null && theirs !== undefined) rest.push(`${formatNumber(theirs)}  ${runLabel(other.run)}`);
    this.tooltip.show({ layer: spec.title, value: first, lines: [...rest, `step ${formatStep(step)}`] }, x, y);
    this.events.hover(step, this);
  }
}

function placed(curve: Curve, columns: Int32Array): Curve {
  const { low, high } = curve;
  const band = low === undefined || high === undefined ? {} : { low: spread(low, columns), high: spread(high, columns) };
  return { ...curve, ...band, values: spread(curve.values, columns) };
}

function runKey({ label, colour }: Curve): HTMLElement {
  const swatch = el("i");
  swatch.style.background = colour;
  const key = el("span", { title: label }, swatch, label);
  key.className = "runkey";
  return key;
}
