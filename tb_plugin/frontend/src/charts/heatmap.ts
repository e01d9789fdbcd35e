// The map itself: a painted canvas, a cursor, outlines of pinned rows, hover, click and drag.
import { el } from "../dom";
import { word, type ColourScale } from "../model/colour";
import { paintHeat, rowTop, siteAt } from "../model/heat";
import type { Block, Series } from "../model/series";
import { gesture, type Gesture } from "../model/zoom";
import { cssVariable, pinColour } from "../style";
import { onWheel } from "./wheel";

export interface HeatEvents {
  hover(at: { readonly site: number; readonly step: number; readonly x: number; readonly y: number } | null): void;
  pick(site: number, step: number): void;
  zoom(range: readonly [number, number] | null): void;
  /** A factor for the range in view, around a step; returns whether anything changes. */
  wheel(factor: number, step: number): boolean;
  key(action: Gesture): boolean;
}

const DRAG_FROM = 5;

export class HeatMap {
  readonly #canvas = el("canvas");
  readonly #cursor = el("div", { class: "vline" });
  readonly #ghost = el("div", { class: "vline ghost" });
  readonly #rowLine = el("div", { class: "hline" });
  readonly #band = el("div", { class: "band" });
  readonly #pinRows = el("div");
  readonly root = el(
    "div",
    { class: "plot", attrs: { "data-part": "map", tabindex: "0", role: "application" } },
    this.#canvas,
    el("div", { class: "overlay" }, this.#pinRows, this.#rowLine, this.#band, this.#ghost, this.#cursor),
  );
  #sites = 0;
  #range: readonly [number, number] = [0, 1];
  #size: readonly [number, number] = [1, 1];
  #dragFrom: number | null = null;

  constructor(private readonly events: HeatEvents) {
    this.#band.hidden = this.#rowLine.hidden = this.#ghost.hidden = true;
    this.root.addEventListener("pointermove", (event) => this.#moved(event));
    this.root.addEventListener("pointerleave", () => this.#left());
    this.root.addEventListener("pointerdown", (event) => {
      if (event.button !== 0) return;
      this.#dragFrom = event.offsetX;
      this.root.setPointerCapture(event.pointerId);
    });
    this.root.addEventListener("pointerup", (event) => this.#released(event));
    this.root.addEventListener("dblclick", () => events.zoom(null));
    this.root.addEventListener("keydown", (event) => {
      const action = gesture(event.key, event.shiftKey);
      if (action !== null && !event.ctrlKey && !event.metaKey && !event.altKey && events.key(action)) event.preventDefault();
    });
    this.root.addEventListener("blur", () => this.#left());
    onWheel(this.root, (factor, event) => this.#sites > 0 && events.wheel(factor, this.#toStep(event.offsetX)));
  }

  get width(): number {
    return this.root.clientWidth;
  }

  /** What is painted, as a data address. */
  get picture(): string {
    return this.#canvas.toDataURL("image/png");
  }

  paint(series: Series, block: Block, range: readonly [number, number], scale: ColourScale, height: number): void {
    const ratio = window.devicePixelRatio || 1;
    const [width, deep] = [Math.max(1, Math.round(this.width * ratio)), Math.max(1, Math.round(height * ratio))];
    this.#sites = series.sites.length;
    this.#range = range;
    this.#size = [this.width, height];
    // Setting a size clears a canvas, even where it stays the same.
    if (this.#canvas.width !== width) this.#canvas.width = width;
    if (this.#canvas.height !== deep) this.#canvas.height = deep;
    this.#canvas.style.cssText = `width:${this.width}px;height:${height}px`;
    const context = this.#canvas.getContext("2d");
    if (context === null || this.#sites === 0) return;
    const image = context.createImageData(width, deep);
    const colours = { missing: colourWord("--missing"), empty: colourWord("--hover") };
    paintHeat(new Uint32Array(image.data.buffer), width, deep, series, block, range, scale, colours);
    context.putImageData(image, 0, 0);
  }

  clear(): void {
    this.#sites = 0;
    this.#canvas.width = this.#canvas.height = 0;
    this.#pinRows.replaceChildren();
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

  showPins(pins: readonly number[]): void {
    const height = this.#size[1] / Math.max(1, this.#sites);
    this.#pinRows.replaceChildren(
      ...pins.flatMap((site, i) => {
        if (site < 0) return [];
        const row = el("div", { class: "pinrow" });
        row.style.cssText = `top:${rowTop(site, this.#sites, this.#size[1]) - 1}px;height:${Math.max(4, height + 2)}px;border-color:${pinColour(i)}`;
        return [row];
      }),
    );
  }

  /** Shows the row that is pointed at, here or in another view. */
  showRow(site: number | null): void {
    this.#rowLine.hidden = site === null || site < 0;
    if (site !== null && site >= 0) this.#rowLine.style.top = `${rowTop(site - 0.5, this.#sites, this.#size[1])}px`;
  }

  /** Where a cell is on the screen. */
  place(site: number, step: number): { readonly x: number; readonly y: number } {
    const box = this.root.getBoundingClientRect();
    return { x: box.left + this.toX(step + 0.5), y: box.top + rowTop(site - 0.5, this.#sites, this.#size[1]) };
  }

  toX(step: number): number {
    return ((step - this.#range[0]) / (this.#range[1] - this.#range[0])) * this.#size[0];
  }

  #toStep(x: number): number {
    return this.#range[0] + (x / this.#size[0]) * (this.#range[1] - this.#range[0]);
  }

  #moved(event: PointerEvent): void {
    if (this.#sites === 0) return;
    const site = siteAt(event.offsetY, this.#sites, this.#size[1]);
    this.events.hover({ site, step: this.#toStep(event.offsetX), x: event.clientX, y: event.clientY });
    if (this.#dragFrom === null || Math.abs(event.offsetX - this.#dragFrom) < DRAG_FROM) return;
    this.#band.hidden = false;
    this.#band.style.left = `${Math.min(this.#dragFrom, event.offsetX)}px`;
    this.#band.style.width = `${Math.abs(event.offsetX - this.#dragFrom)}px`;
  }

  #released(event: PointerEvent): void {
    const from = this.#dragFrom;
    this.#dragFrom = null;
    this.#band.hidden = true;
    if (from === null || this.#sites === 0) return;
    if (Math.abs(event.offsetX - from) < DRAG_FROM) {
      this.events.pick(siteAt(event.offsetY, this.#sites, this.#size[1]), this.#toStep(event.offsetX));
    } else {
      const ends = [from, event.offsetX].map((x) => this.#toStep(Math.max(0, Math.min(this.#size[0], x)))).sort((a, b) => a - b);
      this.events.zoom([ends[0] ?? 0, ends[1] ?? 1]);
    }
  }

  #left(): void {
    this.events.hover(null);
  }
}

function colourWord(variable: string): number {
  const hex = Number.parseInt(cssVariable(variable).slice(1), 16);
  return word((hex >> 16) & 255, (hex >> 8) & 255, hex & 255);
}
