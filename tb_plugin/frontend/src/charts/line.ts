// One small uPlot chart. It is built once and then fed, so that new steps do not blink.
import uPlot from "uplot";
import { el } from "../dom";
import type { AxisKind } from "../model/axis";
import { elapsedSteps, formatClock, formatDuration, formatNumber, formatStep } from "../model/format";
import { gesture, type Gesture } from "../model/zoom";
import { cssVariable } from "../style";
import { onWheel } from "./wheel";

/** Null breaks a line, undefined does not. */
type Points = readonly (number | null | undefined)[];

export interface Curve {
  readonly label: string;
  readonly colour: string;
  readonly values: Points;
  /** What was smoothed, kept faint behind it. */
  readonly raw?: Points;
  readonly low?: Points;
  readonly high?: Points;
  readonly dashed?: boolean;
  /** Places on the axis at which the value was NaN or infinite. */
  readonly broken: readonly number[];
}

export interface LineData {
  readonly kind: AxisKind;
  readonly xs: Float64Array;
  readonly curves: readonly Curve[];
  readonly log: boolean;
  readonly marks: readonly number[];
  /** Where something was noted on the axis. */
  readonly notes: readonly number[];
  readonly range: readonly [number, number];
}

export interface LineEvents {
  hover(index: number | null, left: number, top: number): void;
  /** Ends on the axis; null for all there is. */
  zoom(range: readonly [number, number] | null): void;
  /** A factor for the range in view, around a place on the axis; returns whether anything changes. */
  wheel(factor: number, x: number): boolean;
  key(action: Gesture): boolean;
}

const HEIGHT = 210;
const HIDDEN = -10;
const FEW = 40;
const FAINT = "48";

export class LineChart {
  readonly root = el("div", { class: "chart", attrs: { tabindex: "0", role: "application" } });
  /** The chosen step; below the canvas, so that moving it draws nothing anew. */
  readonly #cursor = el("div", { class: "vline" });
  #plot: uPlot | null = null;
  #data: LineData | null = null;
  #built = "";
  #at = NaN;

  constructor(private readonly events: LineEvents) {
    this.root.addEventListener("keydown", (event) => {
      const action = gesture(event.key, event.shiftKey);
      if (action !== null && !event.ctrlKey && !event.metaKey && !event.altKey && events.key(action))
        event.preventDefault();
    });
    onWheel(this.root, (factor, event) => {
      const plot = this.#plot;
      return (
        plot !== null &&
        events.wheel(factor, plot.posToVal(event.clientX - plot.over.getBoundingClientRect().left, "x"))
      );
    });
  }

  clear(message: string): void {
    this.#plot?.destroy();
    [this.#plot, this.#data, this.#built] = [null, null, ""];
    this.root.replaceChildren(el("p", { text: message }));
  }

  show(data: LineData, label: string): void {
    this.#data = data;
    this.root.setAttribute("aria-label", `${label}. Arrow keys move the step, plus and minus zoom, 0 shows all.`);
    const series: uPlot.Series[] = [{}];
    const columns: (Float64Array | Points)[] = [data.xs];
    const bands: uPlot.Band[] = [];
    const none = { show: false };
    for (const curve of data.curves) {
      if (curve.low !== undefined && curve.high !== undefined) {
        const edge = { stroke: "transparent", width: 0, points: none };
        series.push(edge, edge);
        columns.push(curve.high, curve.low);
        bands.push({
          series: [series.length - 2, series.length - 1],
          fill: `${curve.colour}${curve.raw === undefined ? "50" : "28"}`,
        });
      }
      if (curve.raw !== undefined) {
        series.push({ stroke: `${curve.colour}${FAINT}`, width: 1.2, points: none });
        columns.push(curve.raw);
      }
      const points = { show: () => (this.#data?.xs.length ?? FEW) < FEW && curve.dashed !== true, size: 5 };
      series.push({
        label: curve.label,
        stroke: curve.colour,
        width: 1.6,
        points,
        ...(curve.dashed ? { dash: [5, 4] } : {}),
      });
      columns.push(curve.values);
    }
    const aligned = columns as unknown as uPlot.AlignedData;
    const width = this.root.clientWidth;
    const form = JSON.stringify([series, bands, data.log, data.kind, cssVariable("--dim"), width]);
    if (this.#plot !== null && form === this.#built) {
      this.#plot.setData(aligned);
      return;
    }
    const before = this.#plot;
    this.#plot = new uPlot(this.#options(data, series, bands, width), aligned);
    this.#built = form;
    this.root.replaceChildren(this.#plot.root);
    before?.destroy();
    this.#plot.under.append(this.#cursor);
    this.#plot.over.addEventListener("dblclick", () => this.events.zoom(null));
    this.#plot.over.addEventListener("mouseleave", () => this.events.hover(null, 0, 0));
  }

  /** Shows the chosen step, wherever it lies on the axis. */
  showAt(x: number): void {
    this.#at = x;
    if (this.#plot !== null) this.#placeCursor(this.#plot);
  }

  /** Shows what another view points at. */
  showHover(x: number | null): void {
    const left = x === null || !Number.isFinite(x) ? HIDDEN : (this.#plot?.valToPos(x, "x") ?? HIDDEN);
    this.#plot?.setCursor({ left, top: left < 0 ? HIDDEN : 0 }, false);
  }

  #options(data: LineData, series: uPlot.Series[], bands: uPlot.Band[], width: number): uPlot.Options {
    const axis = {
      stroke: cssVariable("--dim"),
      font: "11px system-ui,sans-serif",
      grid: { stroke: cssVariable("--grid"), width: 1 },
      ticks: { stroke: cssVariable("--line"), width: 1, size: 4 },
    };
    const span = data.range[1] - data.range[0];
    const ticks: Partial<uPlot.Axis> = {
      step: { values: (_: uPlot, at: number[]) => at.map((step) => (Number.isInteger(step) ? formatStep(step) : "")) },
      relative: {
        incrs: elapsedSteps(),
        values: (_: uPlot, at: number[]) => at.map((second) => formatDuration(second)),
      },
      wall: { values: (_: uPlot, at: number[]) => at.map((second) => formatClock(second, span)) },
    }[data.kind];
    return {
      width,
      height: HEIGHT,
      padding: [8, 18, 0, 0],
      legend: { show: false },
      series,
      bands,
      scales: {
        x: { time: data.kind === "wall", range: () => [...(this.#data?.range ?? [0, 1])] as [number, number] },
        y: { distr: data.log ? 3 : 1 },
      },
      axes: [
        { ...axis, size: 26, ...ticks },
        {
          ...axis,
          size: 54,
          values: (_: uPlot, at: (number | null)[]) => at.map((t) => (t === null ? "" : formatNumber(t, 4))),
        },
      ],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      hooks: {
        draw: [(plot) => this.#drawMarks(plot), (plot) => this.#placeCursor(plot)],
        setCursor: [(plot) => this.#hovered(plot)],
        setSelect: [(plot) => this.#selected(plot)],
      },
    };
  }

  #hovered(plot: uPlot): void {
    const { idx, left, top } = plot.cursor;
    // New data moves the cursor too, also one that another view has set.
    if (idx === null || idx === undefined || left === undefined || left < 0 || !plot.over.matches(":hover")) return;
    const box = plot.over.getBoundingClientRect();
    this.events.hover(idx, box.left + left, box.top + (top ?? 0));
  }

  #selected(plot: uPlot): void {
    const { left, width } = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")] as const;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.events.zoom(range);
  }

  #drawMarks(plot: uPlot): void {
    const { ctx, bbox } = plot;
    const { marks, notes, curves } = this.#data ?? { marks: [], notes: [], curves: [] };
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = cssVariable("--faint");
    ctx.setLineDash([4, 4]);
    for (const mark of marks) {
      const y = plot.valToPos(mark, "y", true);
      ctx.beginPath();
      ctx.moveTo(bbox.left, y);
      ctx.lineTo(bbox.left + bbox.width, y);
      ctx.stroke();
    }
    ctx.strokeStyle = cssVariable("--accent");
    ctx.setLineDash([1, 3]);
    for (const note of notes) {
      const x = plot.valToPos(note, "x", true);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
    }
    ctx.fillStyle = cssVariable("--bad");
    for (const curve of curves) {
      for (const x of curve.broken) ctx.fillRect(plot.valToPos(x, "x", true) - 1, bbox.top + bbox.height - 7, 2, 7);
    }
    ctx.restore();
  }

  #placeCursor(plot: uPlot): void {
    const { min, max } = plot.scales["x"] ?? {};
    this.#cursor.hidden = !(this.#at >= (min ?? NaN) && this.#at <= (max ?? NaN));
    if (!this.#cursor.hidden) this.#cursor.style.left = `${plot.valToPos(this.#at, "x")}px`;
  }
}
