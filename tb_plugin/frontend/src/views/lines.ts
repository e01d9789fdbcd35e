// How: one chart, of a run-level metric or of the pinned layers over time.
import type { Annotation, RunMetric } from "../api";
import { LineChart, type Curve, type LineData } from "../charts/line";
import { el, FILLING, keepChildren, setText, type Option, setOptions } from "../dom";
import { axisValues, stepToX, xToStep, type AxisKind } from "../model/axis";
import { csv, fileName, seriesRows, type CsvCell } from "../model/export";
import { lineFigure, type Font } from "../model/figure";
import { formatNumber, formatStep, formatTime, linearTicks, quantityText, siteText, unitText } from "../model/format";
import { joinSteps, spread } from "../model/join";
import { cellKind, columnAt, finiteRow, type Series } from "../model/series";
import { smooth } from "../model/smooth";
import type { Gesture } from "../model/zoom";
import { cssVariable, onPaper, pinColour } from "../style";
import { downloadMenu } from "./download";
import { runLabel } from "../model/labels";
import type { MetricInfo } from "./info";
import type { Navigate } from "./navigate";
import type { Tooltip } from "./tooltip";

export interface LineCardEvents extends Navigate {
  /** Another metric was chosen. */
  chosen(card: LineCard): void;
  /** The switch for a logarithmic axis was turned. */
  log(metric: string, on: boolean): void;
  hover(step: number | null, from: LineCard): void;
  unpin(site: string): void;
  remove(card: LineCard): void;
}

export interface LineStyle {
  readonly axis: AxisKind;
  readonly smooth: number;
  readonly log: Readonly<Record<string, boolean>>;
}

export interface LineContent {
  readonly series: Series;
  readonly spec: RunMetric;
  readonly range: readonly [number, number];
  readonly pins: readonly string[];
  /** The run compared with. */
  readonly other: Series | null;
  readonly annotations: readonly Annotation[];
  /** When both runs began, in seconds since the epoch. */
  readonly started: readonly [number, number];
}

export class LineCard {
  readonly #title = el("h2");
  readonly #select = el("select", { attrs: { "aria-label": "Metric of this chart" } });
  readonly #log = el("button", {
    class: "btn toggle",
    text: "log",
    attrs: { type: "button", title: "Logarithmic axis", "data-part": "log" },
  });
  readonly #keys = el("div", { class: "keys" });
  readonly #hint = el("span", { class: "hint" });
  readonly #chart: LineChart;
  readonly root = el("section", { class: `card line ${FILLING}` });
  metric = "";
  #content: LineContent | null = null;
  #drawn: LineData | null = null;
  #own: Float64Array = new Float64Array();
  #others: Float64Array = new Float64Array();
  #step = 0;

  constructor(
    readonly kind: "run" | "pins",
    private readonly style: () => LineStyle,
    private readonly events: LineCardEvents,
    private readonly tooltip: Tooltip,
    info: MetricInfo,
  ) {
    this.#chart = new LineChart({
      hover: (index, x, y) => this.#hovered(index, x, y),
      zoom: (range) => events.zoom(range === null ? null : [this.#toStep(range[0]), this.#toStep(range[1])]),
      wheel: (factor, x) => events.zoomBy(factor, this.#toStep(x)),
      key: (action) => this.#keyed(action),
    });
    const head = kind === "run" ? this.#select : this.#title;
    const download = downloadMenu("this chart", {
      csv: () => (this.#content === null ? null : csv(rows(this.#content))),
      svg: (font) => this.#svg(font),
      name: () => fileName(this.#content?.series.run ?? "", this.#content?.spec.name ?? ""),
    });
    this.root.append(
      el(
        "div",
        { class: "bar" },
        head,
        info.button(() => this.#content?.spec ?? null),
        this.#log,
        download,
        removeButton(() => events.remove(this)),
      ),
      this.#chart.root,
      this.#keys,
    );
    this.root.dataset["part"] = `line-${kind}`;
    this.#select.addEventListener("change", () => {
      this.metric = this.#select.value;
      events.chosen(this);
    });
    this.#log.addEventListener("click", () => {
      if (this.#content !== null) events.log(this.#content.spec.name, !this.#isLog);
    });
  }

  /** Offers metrics, the chosen one among them. */
  offer(options: readonly Option[], chosen: string): void {
    this.metric = chosen;
    setOptions(this.#select, options, chosen);
  }

  get columns(): number {
    return Math.max(200, this.#chart.root.clientWidth);
  }

  show(content: LineContent): void {
    this.root.classList.remove(FILLING);
    this.#content = content;
    this.redraw();
  }

  clear(message: string, title = ""): void {
    this.root.classList.remove(FILLING);
    this.#content = this.#drawn = null;
    this.#log.hidden = true;
    setText(this.#title, title);
    this.#keys.replaceChildren();
    this.#chart.clear(message);
  }

  showStep(step: number): void {
    this.#step = step;
    this.#chart.showAt(this.#toX(step));
  }

  showHover(step: number | null): void {
    this.#chart.showHover(step === null ? null : this.#toX(step));
  }

  /** Shows other steps of what is there already, until the server has sent more. */
  stretch(range: readonly [number, number]): void {
    if (this.#content === null) return;
    this.#content = { ...this.#content, range };
    this.redraw();
  }

  /** Draws what is shown already once more, for another theme, axis or smoothing. */
  redraw(): void {
    if (this.#content === null || this.#chart.root.clientWidth === 0) return;
    const content = this.#content;
    const { series, spec, pins, other, started } = content;
    const { axis } = this.style();
    setText(this.#title, `Pinned layers: ${spec.title}`);
    this.#log.hidden = false;
    this.#log.setAttribute("aria-pressed", String(this.#isLog));
    this.#own = axisValues(series, axis, started[0]);
    this.#others = other === null ? this.#own : axisValues(other, axis, started[1]);
    const colour = (site: string): string =>
      this.kind === "run" ? cssVariable("--run") : pinColour(pins.indexOf(site));
    let xs = this.#own;
    let curves = series.sites.map((site, i) => this.#curve(series, i, colour(site), this.#own));
    if (other !== null) {
      const joined = joinSteps(this.#own, this.#others);
      xs = joined.steps;
      const theirs = other.sites.map((site, i) => {
        const curve = this.#curve(other, i, this.kind === "run" ? cssVariable("--other") : colour(site), this.#others);
        return placed({ ...curve, dashed: this.kind === "pins" }, joined.other);
      });
      curves = [...curves.map((curve) => placed(curve, joined.own)), ...theirs];
    }
    const marks = spec.marks.filter((mark) => !this.#isLog || mark > 0);
    this.#drawn = {
      kind: axis,
      xs,
      curves,
      log: this.#isLog,
      marks,
      notes: content.annotations.map(({ step }) => this.#toX(step)),
      range: this.#ends(xs),
    };
    this.#chart.show(this.#drawn, `${spec.title}${this.kind === "pins" ? " of the pinned layers" : ""} over time`);
    this.#showKeys(curves);
    this.showStep(this.#step);
  }

  #ends(xs: Float64Array): readonly [number, number] {
    const { series, range } = this.#content ?? { series: null, range: [0, 1] as const };
    if (this.style().axis === "step" || series === null) return range;
    const inside = range[0] > (series.first[0] ?? 0) || range[1] < (series.last.at(-1) ?? 0);
    const [first, last] = inside ? [this.#toX(range[0]), this.#toX(range[1])] : [xs[0] ?? 0, xs.at(-1) ?? 1];
    return last > first ? [first, last] : [first - 1, first + 1];
  }

  #toX(step: number): number {
    if (this.style().axis === "step" || this.#content === null) return step;
    return stepToX(this.#content.series.first, this.#own, step);
  }

  #toStep(x: number): number {
    if (this.style().axis === "step" || this.#content === null) return x;
    return xToStep(this.#content.series.first, this.#own, x);
  }

  get #isLog(): boolean {
    const spec = this.#content?.spec;
    return spec !== undefined && (this.style().log[spec.name] ?? spec.scale === "log");
  }

  #curve(series: Series, site: number, colour: string, xs: Float64Array): Curve {
    const [mean, min, max] = ["mean", "min", "max"].map((name) => series.blocks.get(name));
    if (mean === undefined) return { label: "", colour, values: [], broken: [] };
    const row = (block: typeof mean): (number | null)[] => finiteRow(series, block, site, this.#isLog);
    const broken = Array.from(xs).filter((_, c) => {
      const kind = cellKind(mean.bits[site * series.columns + c] ?? 0);
      return kind === "nan" || kind === "inf";
    });
    const [raw, weight] = [row(mean), this.style().smooth];
    const name = siteText(series.sites[site] ?? "");
    const twice = this.#content?.other !== null;
    const label = !twice ? name : this.kind === "run" ? runLabel(series.run) : `${runLabel(series.run)}: ${name}`;
    const line = { label, colour, broken, values: smooth(raw, weight), ...(weight > 0 ? { raw } : {}) };
    return series.most > 1 && min !== undefined && max !== undefined
      ? { ...line, low: row(min), high: row(max) }
      : line;
  }

  #svg(font: Font): string | null {
    if (this.#content === null || this.#drawn === null) return null;
    const { series, spec } = this.#content;
    const { kind, range, curves } = this.#drawn;
    const time = { step: formatStep, relative: (x: number) => formatNumber(x, 4), wall: formatTime }[kind];
    const xLabel = { step: "optimizer step", relative: "seconds since start", wall: "time of day" }[kind];
    const paper = new Map(["--run", "--other"].map((name) => [cssVariable(name), onPaper(name)]));
    return lineFigure(
      {
        ...this.#drawn,
        name: `${spec.title}: ${series.run}`,
        xLabel,
        xTicks: linearTicks(...range, 5)
          .filter(Number.isInteger)
          .map((at) => ({ at, text: time(at) })),
        yLabel: quantityText(spec),
        curves: curves.map((curve) => ({
          ...curve,
          colour: paper.get(curve.colour) ?? curve.colour,
          label: curves.length > 1 || this.kind === "pins" ? curve.label : "",
        })),
      },
      font,
    );
  }

  #showKeys(curves: readonly Curve[]): void {
    const content = this.#content;
    if (content === null) return;
    const own = this.kind === "run" && content.other === null ? [] : curves;
    keepChildren(
      this.#keys,
      [
        ...own.map((curve, i) => ({
          curve,
          site: i < content.series.sites.length && this.kind === "pins" ? (content.series.sites[i] ?? "") : null,
        })),
        null,
      ],
      (item) => (item === null ? "hint" : `${item.site === null ? "run" : "pin"}\n${item.curve.label}`),
      (item) => (item === null ? this.#hint : this.#key(item.curve.label, item.site)),
      (node, item) => {
        const swatch = node.querySelector("i");
        if (item !== null && swatch !== null)
          swatch.style.cssText = `border-top:3px ${item.curve.dashed ? "dashed" : "solid"} ${item.curve.colour}`;
      },
    );
    setText(this.#hint, hint(content, this.style().smooth, this.kind));
  }

  #key(label: string, site: string | null): HTMLElement {
    const text = el("span", { class: "mono", text: label });
    if (site === null) return el("span", { class: "runkey", title: label }, el("i"), text);
    const button = el("button", { title: `Unpin ${siteText(site)}`, attrs: { type: "button" } }, el("i"), text);
    button.addEventListener("click", () => this.events.unpin(site));
    return button;
  }

  #keyed(action: Gesture): boolean {
    const first = this.#content?.series.first;
    if (first === undefined || ["row", "pick", "scroll", "stretch"].includes(action.kind)) return false;
    if (action.kind === "zoom") return this.events.zoomBy(action.factor, this.#step);
    if (action.kind === "pan") return this.events.pan(action.by);
    if (action.kind === "reset") this.events.zoom(null);
    else if (action.kind === "step" || action.kind === "end") {
      const column =
        action.kind === "end" ? (action.by < 0 ? 0 : first.length - 1) : columnAt(first, this.#step) + action.by;
      const step = first[Math.max(0, Math.min(first.length - 1, column))];
      if (step !== undefined) this.events.step(step);
    }
    return true;
  }

  #hovered(index: number | null, x: number, y: number): void {
    const [content, drawn] = [this.#content, this.#drawn];
    const here = index === null ? undefined : drawn?.xs[index];
    if (content === null || drawn === null || here === undefined) {
      this.tooltip.hide();
      this.events.hover(null, this);
      return;
    }
    const { series, spec, other } = content;
    const column = Math.max(0, columnAt(this.#own, here));
    const values = valuesAt(series, column, "");
    if (other !== null) values.push(...valuesAt(other, columnAt(this.#others, here), `${runLabel(other.run)}: `));
    const single = values.length === 1 ? values[0] : undefined;
    const smoothed = single !== undefined && this.style().smooth > 0 ? drawn.curves[0]?.values[index ?? 0] : undefined;
    const lines = single === undefined ? values.map(({ text, name }) => `${text}  ${name}`) : [];
    if (typeof smoothed === "number") lines.push(`smoothed ${formatNumber(smoothed)}`);
    const [first, last] = [series.first[column] ?? 0, series.last[column] ?? 0];
    lines.push(
      `step ${formatStep(first)}${last > first ? `\u2013${formatStep(last)}, mean` : ""}`,
      formatTime(series.wall[column] ?? 0),
    );
    for (const { text } of content.annotations.filter(({ step, last: end }) => step <= last && end >= first))
      lines.push(`\u25c6 ${text}`);
    const layer = this.kind === "pins" && single !== undefined ? `${single.name}: ${spec.title}` : spec.title;
    this.tooltip.show({ layer, value: single?.text ?? "", lines }, x, y);
    this.events.hover(first, this);
  }
}

export function removeButton(remove: () => void): HTMLButtonElement {
  const button = el("button", {
    class: "btn icon what",
    text: "\u00d7",
    title: "Remove this chart",
    attrs: { type: "button", "aria-label": "Remove this chart", "data-part": "remove" },
  });
  button.addEventListener("click", remove);
  return button;
}

function valuesAt(series: Series, column: number, prefix: string): { text: string; name: string }[] {
  const mean = series.blocks.get("mean");
  if (mean === undefined || column < 0) return [];
  return series.sites.map((site, i) => {
    const cell = i * series.columns + column;
    const text = cellKind(mean.bits[cell] ?? 0) === "missing" ? "no value" : formatNumber(mean.values[cell] ?? NaN);
    return { text, name: `${prefix}${siteText(site)}` };
  });
}

/** One table; with a second run, the run's name stands before each line. */
function rows({ series, other }: LineContent): readonly (readonly CsvCell[])[] {
  if (other === null) return seriesRows(series);
  const [head = [], ...own] = seriesRows(series);
  const named = (run: string, lines: readonly (readonly CsvCell[])[]): CsvCell[][] =>
    lines.map((line) => [run, ...line]);
  return [["run", ...head], ...named(series.run, own), ...named(other.run, seriesRows(other).slice(1))];
}

function hint({ series, spec, other }: LineContent, weight: number, kind: "run" | "pins"): string {
  const unit = unitText(spec.unit) === "" ? "" : `in ${unitText(spec.unit)}`;
  const band = series.most > 1 ? `mean of ${formatStep(series.width)} steps, band from minimum to maximum` : "";
  const both = kind === "pins" && other !== null ? "dashed: the other run" : "";
  return [unit, band, weight > 0 ? `smoothed by ${weight}` : "", both].filter(Boolean).join("; ");
}

function placed(curve: Curve, columns: Int32Array): Curve {
  const { low, high, raw } = curve;
  const band =
    low === undefined || high === undefined ? {} : { low: spread(low, columns), high: spread(high, columns) };
  return {
    ...curve,
    ...band,
    ...(raw === undefined ? {} : { raw: spread(raw, columns) }),
    values: spread(curve.values, columns),
  };
}
