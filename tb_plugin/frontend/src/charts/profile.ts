// One step across the depth of the model: bars on the same rows as the map.
import { el, sharpContext } from "../dom";
import { css, type ColourScale } from "../model/colour";
import { formatNumber } from "../model/format";
import { rowTop } from "../model/heat";
import { cellKind, type Block, type Series } from "../model/series";
import { cssVariable } from "../style";

const TEXT_WIDTH = 58;
const TEXT_FROM = 11;
const PALEST = 0.34;
const KEEPS = 0.04;

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

  constructor() {
    this.#line.hidden = true;
  }

  clear(): void {
    this.#canvas.width = this.#canvas.height = 0;
    this.#canvas.style.cssText = "";
  }

  /** Shows the row that is pointed at. */
  showRow(site: number | null, sites: number, height: number): void {
    this.#line.hidden = site === null || site < 0;
    if (site !== null && site >= 0) this.#line.style.top = `${rowTop(site - 0.5, sites, height)}px`;
  }

  /** Takes the room there is; apart from painting, because to measure makes the browser lay out the page. */
  fit(): void {
    this.#width = this.root.clientWidth;
  }

  paint(series: Series, block: Block, column: number, scale: ColourScale, marks: readonly number[], height: number): void {
    const width = this.#width;
    if (width === 0) return;
    const context = sharpContext(this.#canvas, width, height);
    const [grid, faint, missing, dim, bad] = ["--grid", "--faint", "--missing", "--dim", "--bad"].map(cssVariable) as [string, string, string, string, string];
    const row = height / Math.max(1, series.sites.length);
    const plot = width - (row >= TEXT_FROM ? TEXT_WIDTH : 0);
    const origin = scale.diverging ? plot / 2 : 0;
    const thickness = Math.max(1, row > 4 ? row - 2 : row);
    context.fillStyle = grid;
    context.fillRect(0, 0, plot, height);
    if (row >= TEXT_FROM) {
      context.font = "11px ui-monospace,SFMono-Regular,Menlo,Consolas,monospace";
      context.textBaseline = "middle";
      context.textAlign = "right";
    }
    for (let site = 0; column >= 0 && site < series.sites.length; site++) {
      const at = site * series.columns + column;
      const value = block.values[at] ?? NaN;
      const kind = cellKind(block.bits[at] ?? 0);
      const top = rowTop(site, series.sites.length, height) + (row - thickness) / 2;
      if (kind === "value") {
        const x = scale.position(value) * plot;
        const keeps = scale.diverging && Math.abs(x - origin) < plot * KEEPS;
        context.fillStyle = keeps ? faint : css(barColour(scale, scale.position(value)));
        context.fillRect(Math.min(x, origin) - (scale.diverging ? 0.5 : 0), top, Math.max(1.5, Math.abs(x - origin)), thickness);
      } else {
        context.fillStyle = kind === "missing" ? missing : "#0c0c0e";
        context.fillRect(0, top, plot, thickness);
      }
      if (row >= TEXT_FROM) {
        context.fillStyle = kind === "value" ? dim : bad;
        context.fillText(kind === "missing" ? "missing" : formatNumber(value, 3), width - 2, top + thickness / 2 + 0.5);
      }
    }
    context.fillStyle = faint;
    this.ticks = [];
    for (const mark of scale.diverging ? [...marks, scale.log ? 1 : 0] : [scale.low, ...marks, scale.high]) {
      const x = scale.position(mark) * plot;
      if (x > 0 && x < plot) context.fillRect(Math.round(x), 0, 1, height);
      this.ticks.push({ x, text: formatNumber(mark, 2) });
    }
  }
}
