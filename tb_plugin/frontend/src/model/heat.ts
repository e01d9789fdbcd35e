// Paints a series into pixels; knows no canvas, so that it can be tested.
import { colourOf, word, type ColourScale } from "./colour";
import { cellKind, columnAt, type Block, type Series } from "./series";

export interface HeatColours {
  readonly missing: number;
  readonly empty: number;
}

const BLACK = word(12, 12, 14);
const STRIPE = word(250, 250, 250);
const STRIPES_EVERY = 6;
const STRIPE_WIDTH = 1.5;

/** The row of pixels that a site begins at, counted from the top; the first site lies at the bottom. */
export function rowTop(site: number, sites: number, height: number): number {
  return ((sites - 1 - site) * height) / sites;
}

export function siteAt(y: number, sites: number, height: number): number {
  return Math.min(sites - 1, Math.max(0, sites - 1 - Math.floor((y * sites) / height)));
}

export function paintHeat(
  pixels: Uint32Array,
  width: number,
  height: number,
  series: Series,
  block: Block,
  range: readonly [number, number],
  scale: ColourScale,
  colours: HeatColours,
): void {
  const columnOf = new Int32Array(width);
  for (let x = 0; x < width; x++) {
    columnOf[x] = columnAt(series.first, range[0] + ((x + 0.5) / width) * (range[1] - range[0]));
  }
  for (let y = 0; y < height; y++) {
    const row = siteAt(y + 0.5, series.sites.length, height) * series.columns;
    for (let x = 0; x < width; x++) {
      const column = columnOf[x] ?? -1;
      pixels[y * width + x] = column < 0 ? colours.empty : cell(block, row + column, x, y, scale, colours.missing);
    }
  }
}

function cell(block: Block, at: number, x: number, y: number, scale: ColourScale, missing: number): number {
  const kind = cellKind(block.bits[at] ?? 0);
  if (kind === "value") return colourOf(scale, block.values[at] ?? 0);
  if (kind === "missing") return missing;
  return (x + y) % STRIPES_EVERY < STRIPE_WIDTH ? STRIPE : BLACK;
}
