// The map itself: a painted canvas, a cursor, outlines of pinned rows, marks of accused ones, hover, click and drag.
import { el } from "../dom";
import { word } from "../model/colour";
import { placeAt, rowHeight, rowsBetween, rowTop } from "../model/depth";
import { paintHeat, shownCell, type Cell, type HeatView } from "../model/heat";
import { columnsBetween } from "../model/reach";
import { gesture, type Gesture } from "../model/zoom";
import { cssVariable, pinColour } from "../style";
import { onWheel } from "./wheel";

/** What is pointed at: the rows and the cell that one pixel shows, and where that is on the screen. */
export interface Pointed {
  readonly rows: readonly [number, number];
  readonly step: number;
  readonly cell: Cell;
  readonly x: number;
  readonly y: number;
}

export interface HeatEvents {
  hover(at: Pointed | null): void;
  pick(at: Pointed): void;
  /** Steps, and rows where the drag went over some of them; null stays as it is. */
  zoom(range: readonly [number, number] | null, rows: readonly [number, number] | null): void;
  /** Back to all steps and rows. */
  reset(): void;
  /** A factor for the range in view, around a step; returns whether anything changes. */
  wheel(factor: number, step: number): boolean;
  /** The same for the rows in view. */
  wheelRows(factor: number, row: number): boolean;
  key(action: Gesture): boolean;
}

const [DRAG_FROM, BOX_FROM, THIN, FINE] = [5, 26, 7, 3];

export class HeatMap {
  readonly #canvas = el("canvas");
  readonly #cursor = el("div", { class: "vline" });
  readonly #ghost = el("div", { class: "vline ghost" });
  readonly #rowLine = el("div", { class: "hline" });
  readonly #band = el("div", { class: "band" });
  readonly #pinRows = el("div");
  readonly #accused = el("div", { attrs: { "data-part": "accused" } });
  readonly root = el(
    "div",
    { class: "plot", attrs: { "data-part": "map", tabindex: "0", role: "application" } },
    this.#canvas,
    el("div", { class: "overlay" }, this.#pinRows, this.#accused, this.#rowLine, this.#band, this.#ghost, this.#cursor),
  );
  #view: HeatView | null = null;
  #size: readonly [number, number] = [1, 1];
  #width = 0;
  #dragFrom: readonly [number, number] | null = null;

  constructor(private readonly events: HeatEvents) {
    this.#band.hidden = this.#rowLine.hidden = this.#ghost.hidden = true;
    this.root.addEventListener("pointermove", (event) => this.#moved(event));
    this.root.addEventListener("pointerleave", () => this.#left());
    this.root.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.#dragFrom = [event.offsetX, event.offsetY];
      this.root.setPointerCapture(event.pointerId);
    });
    this.root.addEventListener("pointerup", (event) => this.#released(event));
    this.root.addEventListener("dblclick", () => events.reset());
    this.root.addEventListener("keydown", (event) => {
      const action = gesture(event.key, event.shiftKey);
      if (action !== null && !event.ctrlKey && !event.metaKey && !event.altKey && events.key(action))
        event.preventDefault();
    });
    this.root.addEventListener("blur", () => this.#left());
    onWheel(this.root, (factor, event) => {
      if (this.#view === null) return false;
      return event.shiftKey
        ? events.wheelRows(factor, this.rowAt(event.offsetY))
        : events.wheel(factor, this.#toStep(event.offsetX));
    });
  }

  get width(): number {
    return this.root.clientWidth;
  }

  paint(view: HeatView, height: number): void {
    const ratio = window.devicePixelRatio || 1;
    this.#width = this.width;
    const [width, deep] = [Math.max(1, Math.round(this.#width * ratio)), Math.max(1, Math.round(height * ratio))];
    this.#view = view;
    this.#size = [this.#width, height];
    // Setting a size clears a canvas, even where it stays the same.
    if (this.#canvas.width !== width) this.#canvas.width = width;
    if (this.#canvas.height !== deep) this.#canvas.height = deep;
    this.#canvas.style.cssText = `width:${this.#width}px;height:${height}px`;
    const context = this.#canvas.getContext("2d");
    if (context === null || view.depth.rows.length === 0) return;
    const image = context.createImageData(width, deep);
    const colours = { missing: colourWord(cssVariable("--missing")), empty: colourWord(cssVariable("--hover")) };
    paintHeat(new Uint32Array(image.data.buffer), width, deep, view, colours);
    context.putImageData(image, 0, 0);
  }

  clear(): void {
    this.#view = null;
    this.#canvas.width = this.#canvas.height = 0;
    this.#pinRows.replaceChildren();
    this.#accused.replaceChildren();
  }

  showStep(step: number): void {
    const x = this.toX(step + 0.5);
    this.#cursor.hidden = x < 0 || x > this.#size[0];
    this.#cursor.style.left = `${x}px`;
  }

  showHover(step: number | null): void {
    const x = step === null ? -1 : this.toX(step + 0.5);
    this.#ghost.hidden = x < 0 || x > this.#size[0];
    this.#ghost.style.left = `${x}px`;
  }

  /** Outlines the row of each pin, -1 for one without a row, and marks those that issues accuse. */
  showRows(pins: readonly number[], accused: readonly number[]): void {
    const depth = this.#view?.depth;
    if (depth === undefined) return;
    const [height, size] = [this.#size[1], rowHeight(depth, this.#size[1])];
    const place = (row: number): number | null => {
      const top = rowTop(depth, row, height);
      return row < 0 || top + size < 0 || top > height ? null : top;
    };
    this.#pinRows.replaceChildren(
      ...pins.flatMap((row, i) => {
        const top = place(row);
        if (top === null) return [];
        const box = el("div", { class: "pinrow" });
        // An outline around a thin row would hide it: a mark at its end says enough.
        const thin = size < THIN;
        box.style.cssText = `top:${thin ? top + size / 2 - 2 : top - 1}px;height:${thin ? 4 : size + 2}px;${thin ? "right:auto;width:14px;" : ""}border-color:${pinColour(i)}`;
        return [box];
      }),
    );
    this.#accused.replaceChildren(
      ...accused.flatMap((row) => {
        const top = place(row);
        if (top === null) return [];
        const mark = el("i", { class: "accuse" });
        mark.style.top = `${top + size / 2}px`;
        return [mark];
      }),
    );
  }

  /** Shows the row that is pointed at, here or in another view. */
  showRow(row: number | null): void {
    const depth = this.#view?.depth;
    const top = row === null || row < 0 || depth === undefined ? -1 : rowTop(depth, row - 0.5, this.#size[1]);
    this.#rowLine.hidden = top < 0 || top > this.#size[1];
    this.#rowLine.style.top = `${top}px`;
  }

  /** What a row shows at a step, as if it was pointed at. */
  at(row: number, step: number): Pointed | null {
    if (this.#view === null) return null;
    const box = this.root.getBoundingClientRect();
    const [x, y] = [this.toX(step + 0.5), rowTop(this.#view.depth, row - 0.5, this.#size[1])];
    return this.#pointed([row, row + 1], x, box.left + x, box.top + y);
  }

  toX(step: number): number {
    const range = this.#view?.range ?? [0, 1];
    return ((step - range[0]) / (range[1] - range[0])) * this.#size[0];
  }

  rowAt(y: number): number {
    return this.#view === null ? 0 : placeAt(this.#view.depth, y, this.#size[1]);
  }

  #toStep(x: number): number {
    const range = this.#view?.range ?? [0, 1];
    return range[0] + (x / this.#size[0]) * (range[1] - range[0]);
  }

  #pointed(rows: readonly [number, number], x: number, left: number, top: number): Pointed | null {
    if (this.#view === null) return null;
    const { series } = this.#view;
    const ratio = window.devicePixelRatio || 1;
    const pixel = Math.floor(Math.max(0, Math.min(this.#size[0] - 0.01, x)) * ratio);
    const columns = columnsBetween(series, this.#toStep(pixel / ratio), this.#toStep((pixel + 1) / ratio));
    if (columns[1] < 0) return null;
    const cell = shownCell(this.#view, rows, columns);
    const step = columns[0] > columns[1] ? Math.floor(this.#toStep(x)) : (series.first[cell.column] ?? this.#toStep(x));
    return { rows, step, cell, x: left, y: top };
  }

  #under(event: PointerEvent): Pointed | null {
    if (this.#view === null) return null;
    const ratio = window.devicePixelRatio || 1;
    const pixel = Math.floor(Math.max(0, Math.min(this.#size[1] - 0.01, event.offsetY)) * ratio);
    const rows = rowsBetween(this.#view.depth, pixel / ratio, (pixel + 1) / ratio, this.#size[1]);
    return this.#pointed(rows, event.offsetX, event.clientX, event.clientY);
  }

  /** The box that a drag spans: over all rows, unless it goes up or down far enough to mean some of them. */
  #box(
    event: PointerEvent,
  ): { left: number; right: number; top: number; bottom: number; wide: boolean; tall: boolean } | null {
    if (this.#dragFrom === null) return null;
    const [x, y] = this.#dragFrom;
    const [wide, tall] = [Math.abs(event.offsetX - x) >= DRAG_FROM, Math.abs(event.offsetY - y) >= BOX_FROM];
    if (!wide && !tall) return null;
    const [width, height] = this.#size;
    const span = (a: number, b: number, most: number): [number, number] => [
      Math.max(0, Math.min(a, b)),
      Math.min(most, Math.max(a, b)),
    ];
    const [left, right] = wide ? span(x, event.offsetX, width) : [0, width];
    const [top, bottom] = tall ? span(y, event.offsetY, height) : [0, height];
    return { left, right, top, bottom, wide, tall };
  }

  #moved(event: PointerEvent): void {
    if (this.#view === null) return;
    this.events.hover(this.#under(event));
    const box = this.#box(event);
    this.#band.hidden = box === null;
    if (box !== null)
      this.#band.style.cssText = `left:${box.left}px;width:${box.right - box.left}px;top:${box.top}px;height:${box.bottom - box.top}px`;
  }

  #released(event: PointerEvent): void {
    const box = this.#box(event);
    const pressed = this.#dragFrom !== null;
    this.#dragFrom = null;
    this.#band.hidden = true;
    if (this.#view === null || !pressed) return;
    const at = box === null ? this.#under(event) : null;
    if (at !== null) this.events.pick(at);
    if (box === null) return;
    const steps = box.wide ? ([this.#toStep(box.left), this.#toStep(box.right)] as const) : null;
    this.events.zoom(steps, box.tall ? [this.rowAt(box.bottom), this.rowAt(box.top)] : null);
  }

  #left(): void {
    this.events.hover(null);
  }
}

/** A map painted for elsewhere, as a data address; each reading is at least one pixel of a fine grid. */
export function heatPicture(
  view: HeatView,
  width: number,
  height: number,
  colours: { readonly missing: string; readonly empty: string },
): string {
  const canvas = el("canvas");
  [canvas.width, canvas.height] = [Math.round(width * FINE), Math.round(height * FINE)];
  const context = canvas.getContext("2d");
  const image = context?.createImageData(canvas.width, canvas.height);
  if (context == null || image === undefined) return "";
  const words = { missing: colourWord(colours.missing), empty: colourWord(colours.empty) };
  paintHeat(new Uint32Array(image.data.buffer), canvas.width, canvas.height, view, words);
  context.putImageData(image, 0, 0);
  return canvas.toDataURL("image/png");
}

function colourWord(colour: string): number {
  const full = /^#(.)(.)(.)$/.test(colour) ? colour.replace(/[^#]/g, "$&$&") : colour;
  const hex = Number.parseInt(full.slice(1), 16);
  return word((hex >> 16) & 255, (hex >> 8) & 255, hex & 255);
}
