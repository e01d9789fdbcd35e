// One small uPlot chart with a step axis that all charts share.
import uPlot from "uplot";
import { el } from "../dom";
import { formatNumber, formatStep } from "../model/format";
import { cssVariable } from "../style";

/** Null breaks a line, undefined does not. */
type Points = readonly (number | null | undefined)[];

export interface Curve {
  readonly label: string;
  readonly colour: string;
  readonly values: Points;
  readonly low?: Points;
  readonly high?: Points;
  /** Steps at which the value was NaN or infinite. */
  readonly broken: readonly number[];
}

export interface LineData {
  readonly steps: Float64Array;
  readonly curves: readonly Curve[];
  readonly log: boolean;
  readonly marks: readonly number[];
  readonly range: readonly [number, number];
}

export interface LineEvents {
  hover(index: number | null, left: number, top: number): void;
  zoom(range: readonly [number, number] | null): void;
}

const HEIGHT = 210;
const HIDDEN = -10;

export class LineChart {
  readonly root = el("div", { class: "chart" });
  private plot: uPlot | null = null;
  private step = NaN;

  constructor(private readonly events: LineEvents) {}

  clear(message: string): void {
    this.plot?.destroy();
    this.plot = null;
    this.root.replaceChildren(el("p", { text: message }));
  }

  show(data: LineData): void {
    this.plot?.destroy();
    this.root.replaceChildren();
    const series: uPlot.Series[] = [{}];
    const columns: (Float64Array | Points)[] = [data.steps];
    const bands: uPlot.Band[] = [];
    for (const curve of data.curves) {
      if (curve.low !== undefined && curve.high !== undefined) {
        const edge = { stroke: "transparent", width: 0, points: { show: false } };
        series.push(edge, edge);
        columns.push(curve.high, curve.low);
        bands.push({ series: [series.length - 2, series.length - 1], fill: `${curve.colour}50` });
      }
      series.push({ label: curve.label, stroke: curve.colour, width: 1.6, points: { show: data.steps.length < 40, size: 5 } });
      columns.push(curve.values);
    }
    this.plot = new uPlot(this.options(data, series, bands), columns as unknown as uPlot.AlignedData, this.root);
    this.plot.over.addEventListener("dblclick", () => this.events.zoom(null));
    this.plot.over.addEventListener("mouseleave", () => this.events.hover(null, 0, 0));
  }

  showStep(step: number): void {
    this.step = step;
    this.plot?.redraw(false, false);
  }

  /** Shows the step that another view points at. */
  showHover(step: number | null): void {
    const left = step === null ? HIDDEN : (this.plot?.valToPos(step, "x") ?? HIDDEN);
    this.plot?.setCursor({ left, top: left < 0 ? HIDDEN : 0 }, false);
  }

  private options(data: LineData, series: uPlot.Series[], bands: uPlot.Band[]): uPlot.Options {
    const axis = {
      stroke: cssVariable("--dim"),
      font: "11px system-ui,sans-serif",
      grid: { stroke: cssVariable("--grid"), width: 1 },
      ticks: { stroke: cssVariable("--line"), width: 1, size: 4 },
    };
    return {
      width: this.root.clientWidth,
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      legend: { show: false },
      series,
      bands,
      scales: { x: { time: false, range: [data.range[0], data.range[1]] }, y: { distr: data.log ? 3 : 1 } },
      axes: [
        { ...axis, size: 26, values: (_: uPlot, ticks: number[]) => ticks.map((t) => (Number.isInteger(t) ? formatStep(t) : "")) },
        { ...axis, size: 54, values: (_: uPlot, ticks: (number | null)[]) => ticks.map((t) => (t === null ? "" : formatNumber(t, 4))) },
      ],
      cursor: { y: false, drag: { x: true, y: false, setScale: false }, points: { size: 7 } },
      hooks: {
        draw: [(plot) => this.drawMarks(plot, data)],
        setCursor: [(plot) => this.hovered(plot)],
        setSelect: [(plot) => this.selected(plot)],
      },
    };
  }

  private hovered(plot: uPlot): void {
    const box = plot.over.getBoundingClientRect();
    const { idx, left, top } = plot.cursor;
    if (idx === null || idx === undefined || left === undefined || left < 0) return;
    this.events.hover(idx, box.left + left, box.top + (top ?? 0));
  }

  private selected(plot: uPlot): void {
    const { left, width } = plot.select;
    if (width < 4) return;
    const range = [plot.posToVal(left, "x"), plot.posToVal(left + width, "x")] as const;
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.events.zoom(range);
  }

  private drawMarks(plot: uPlot, data: LineData): void {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.beginPath();
    ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
    ctx.clip();
    ctx.strokeStyle = cssVariable("--faint");
    ctx.setLineDash([4, 4]);
    for (const mark of data.marks) this.rule(ctx, bbox.left, plot.valToPos(mark, "y", true), bbox.width, 0);
    ctx.setLineDash([]);
    ctx.fillStyle = cssVariable("--bad");
    for (const curve of data.curves) {
      for (const step of curve.broken) ctx.fillRect(plot.valToPos(step, "x", true) - 1, bbox.top + bbox.height - 7, 2, 7);
    }
    ctx.strokeStyle = cssVariable("--cursor");
    ctx.lineWidth = window.devicePixelRatio || 1;
    if (Number.isFinite(this.step)) this.rule(ctx, plot.valToPos(this.step, "x", true), bbox.top, 0, bbox.height);
    ctx.restore();
  }

  private rule(ctx: CanvasRenderingContext2D, x: number, y: number, width: number, height: number): void {
    ctx.beginPath();
    ctx.moveTo(x, y);
    ctx.lineTo(x + width, y + height);
    ctx.stroke();
  }
}
