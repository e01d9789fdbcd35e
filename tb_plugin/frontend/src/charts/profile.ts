// One step across the depth of the model: bars on the same rows as the map.
import { el, sharpContext } from "../dom";
import { css, type ColourScale } from "../model/colour";
import { formatNumber, threeDigits } from "../model/format";
import { rowHeight, rowsBetween, rowTop, type Depth } from "../model/depth";
import { shownCell, type HeatView } from "../model/heat";
import { cssVariable } from "../style";

const TEXT_WIDTH = 58;
const TEXT_FROM = 11;
const PALEST = 0.34;
const KEEPS = 0.04;
const TICK = 34;

/** The map's colour, but never so pale that a bar on its own cannot be seen. */
function barColour(scale: ColourScale, at: number): number {
  const seen = scale.diverging ? (at < 0.5 ? Math.min(at, PALEST) : Math.max(at, 1 - PALEST)) : at;
  return scale.words[Math.round(seen * (scale.words.length - 1))] ?? 0;
}

export class Profile {
  readonly #canvas = el("canvas");
  readonly #line = el("div", { class: "hline" });
  readonly root = el("div", { class: "profile", attrs: { "data-part": "profile" } }, this.#canvas, this.#line);

  /** Where which value lies on the axis below; known after painting. */
  ticks: { x: number; text: string }[] = [];
  #width = 0;

  get width(): number {
    return this.#width;
  }

  constructor() {
    this.#line.hidden = true;
  }

  clear(): void {
    this.#canvas.width = this.#canvas.height = 0;
    this.#canvas.style.cssText = "";
  }

  /** Shows the row that is pointed at. */
  showRow(row: number | null, depth: Depth, height: number): void {
    const top = row === null || row < 0 ? -1 : rowTop(depth, row - 0.5, height);
    this.#line.hidden = top < 0 || top > height;
    this.#line.style.top = `${top}px`;
  }

  /** Takes the room there is; apart from painting, because to measure makes the browser lay out the page. */
  fit(): void {
    this.#width = this.root.clientWidth;
  }

  paint(view: HeatView, column: number, marks: readonly number[], height: number): void {
    const width = this.#width;
    if (width === 0) return;
    const { depth, scale } = view;
    const context = sharpContext(this.#canvas, width, height);
    const [grid, faint, missing, dim, bad] = ["--grid", "--faint", "--missing", "--dim", "--bad"].map(cssVariable) as [
      string,
      string,
      string,
      string,
      string,
    ];
    const row = rowHeight(depth, height);
    const plot = width - (row >= TEXT_FROM ? TEXT_WIDTH : 0);
    const origin = scale.diverging ? scale.position(scale.log ? 1 : 0) * plot : 0;
    context.fillStyle = grid;
    context.fillRect(0, 0, plot, height);
    if (row >= TEXT_FROM) {
      context.font = "11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace";
      context.textBaseline = "middle";
      context.textAlign = "right";
    }
    const bars = Math.ceil(row >= 1 ? depth.high - Math.floor(depth.low) : height);
    for (let i = 0; column >= 0 && i < bars; i++) {
      const first = Math.floor(depth.low) + i;
      const rows =
        row >= 1 ? ([first, Math.min(first + 1, depth.rows.length)] as const) : rowsBetween(depth, i, i + 1, height);
      if (rows[0] >= depth.rows.length) break;
      const { kind, value, site } = shownCell(view, rows, [column, column]);
      if (site < 0 && row < TEXT_FROM) continue;
      const deep = Math.max(1, row >= 1 ? (row > 4 ? row - 2 : row) : 1);
      const top = row >= 1 ? rowTop(depth, first, height) + (row - deep) / 2 : i;
      if (kind === "value") {
        const x = scale.position(value) * plot;
        const keeps = scale.diverging && Math.abs(x - origin) < plot * KEEPS;
        context.fillStyle = keeps ? faint : css(barColour(scale, scale.position(value)));
        context.fillRect(
          Math.min(x, origin) - (scale.diverging ? 0.5 : 0),
          top,
          Math.max(1.5, Math.abs(x - origin)),
          deep,
        );
      } else {
        context.fillStyle = site < 0 ? grid : kind === "missing" ? missing : "#0c0c0e";
        context.fillRect(0, top, plot, deep);
      }
      if (row >= TEXT_FROM) {
        context.fillStyle = kind === "value" || kind === "missing" ? dim : bad;
        context.fillText(
          site < 0 ? "not read" : kind === "missing" ? "nothing" : threeDigits(value),
          width - 2,
          top + deep / 2 + 0.5,
        );
      }
    }
    context.fillStyle = faint;
    this.ticks = [];
    for (const mark of scale.diverging ? [scale.log ? 1 : 0, ...marks] : [scale.low, scale.high, ...marks]) {
      const x = scale.position(mark) * plot;
      // Where the ramp is long, the marks around its middle come too close to be read.
      if ((x <= 0 || x >= plot) && mark !== scale.low && mark !== scale.high) continue;
      if (x > 0 && x < plot) context.fillRect(Math.round(x), 0, 1, height);
      if (this.ticks.some((tick) => Math.abs(tick.x - x) < TICK)) continue;
      this.ticks.push({ x, text: formatNumber(mark, 2) });
    }
  }
}
