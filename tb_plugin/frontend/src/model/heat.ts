// Paints a series into pixels; knows no canvas, so that it can be tested. A pixel that several rows or columns share shows
// the reading furthest out, so that one that deviates is seen at any size.
import { colourOf, word, type ColourScale } from "./colour";
import { rowsBetween, type Depth } from "./depth";
import { columnsBetween } from "./reach";
import { cellKind, type Block, type CellKind, type Series } from "./series";

export interface HeatColours {
  readonly missing: number;
  /** Where nothing was read, with thin lines of the other. */
  readonly empty: number;
}

/** What is drawn, over which steps and rows. */
export interface HeatView {
  readonly series: Series;
  readonly block: Block;
  readonly range: readonly [number, number];
  readonly depth: Depth;
  readonly scale: ColourScale;
}

/** The cell that stands for others; a site of -1 where none was read. */
export interface Cell {
  readonly site: number;
  readonly column: number;
  readonly kind: CellKind;
  readonly value: number;
}

const BLACK = word(12, 12, 14);
const STRIPE = word(250, 250, 250);
const STRIPES_EVERY = 6;
const STRIPE_WIDTH = 1.5;
const UNREAD_EVERY = 7;
const [UNREAD, MISSING, VALUE, BROKEN] = [0, 1, 2, 3];

export function paintHeat(
  pixels: Uint32Array,
  width: number,
  height: number,
  view: HeatView,
  colours: HeatColours,
): void {
  const { series, block, range, depth, scale } = view;
  const { columns } = series;
  const [fromColumn, toColumn] = [new Int32Array(width), new Int32Array(width)];
  const step = (x: number): number => range[0] + (x / width) * (range[1] - range[0]);
  for (let x = 0; x < width; x++) {
    const between = columnsBetween(series, step(x), step(x + 1));
    fromColumn[x] = between[0];
    toColumn[x] = between[1];
  }
  const [state, best, shown] = [new Uint8Array(width), new Float64Array(width), new Float64Array(width)];
  // What lies between these is not further out than what is shown; nothing lies between NaN.
  const [least, most] = [new Float64Array(width), new Float64Array(width)];
  const { values, bits } = block;
  const { outness, bounds } = scale;
  const consider = (x: number, at: number, value: number): void => {
    const code = bits[at] ?? 0;
    const now = state[x] ?? 0;
    if (now === BROKEN) return;
    if ((code & 0x7f800000) === 0x7f800000) {
      state[x] = cellKind(code) === "missing" ? Math.max(now, MISSING) : BROKEN;
      return;
    }
    const out = outness(value);
    if (now === VALUE && out <= (best[x] ?? 0)) return;
    state[x] = VALUE;
    best[x] = out;
    shown[x] = value;
    const ends = bounds(out);
    least[x] = ends[0];
    most[x] = ends[1];
  };
  const collect = (site: number): void => {
    const row = site * columns;
    for (let x = 0; x < width; x++) {
      const last = toColumn[x] ?? -1;
      for (let c = Math.max(0, fromColumn[x] ?? 0); c <= last; c++) {
        const value = values[row + c] as number;
        if (!(value >= (least[x] as number) && value <= (most[x] as number))) consider(x, row + c, value);
      }
    }
  };
  // Most pixels show one reading, or the same as the pixel before: nothing has to be compared for these.
  const paintOne = (site: number): void => {
    const row = site * columns;
    for (let x = 0; x < width; x++) {
      const from = fromColumn[x] ?? 0;
      const to = toColumn[x] ?? -1;
      if (x > 0 && from === fromColumn[x - 1] && to === toColumn[x - 1]) {
        state[x] = state[x - 1] ?? UNREAD;
        shown[x] = shown[x - 1] ?? NaN;
        line[x] = line[x - 1] ?? 0;
        continue;
      }
      if (from === to && from >= 0) {
        const code = bits[row + from] ?? 0;
        const finite = (code & 0x7f800000) !== 0x7f800000;
        state[x] = finite ? VALUE : cellKind(code) === "missing" ? MISSING : BROKEN;
        shown[x] = values[row + from] ?? NaN;
      } else for (let c = Math.max(0, from); c <= to; c++) consider(x, row + c, values[row + c] ?? NaN);
      line[x] = wordAt(x);
    }
  };
  const wordAt = (x: number): number => {
    const now = state[x] ?? UNREAD;
    return now === VALUE ? colourOf(scale, shown[x] ?? 0) : now === MISSING ? colours.missing : colours.empty;
  };
  let [before, until] = [-1, -1];
  const line = new Uint32Array(width);
  for (let y = 0; y < height; y++) {
    const [from, to] = rowsBetween(depth, y, y + 1, height);
    if (from !== before || to !== until) {
      [before, until] = [from, to];
      state.fill(UNREAD);
      least.fill(NaN);
      const only = to - from === 1 ? depth.rows[from] : undefined;
      if (only !== undefined && only.to - only.from === 1) paintOne(only.from);
      else {
        for (let row = from; row < to; row++) {
          const part = depth.rows[row];
          for (let site = part?.from ?? 0; site < (part?.to ?? 0); site++) collect(site);
        }
        for (let x = 0; x < width; x++) line[x] = wordAt(x);
      }
    }
    const at = y * width;
    pixels.set(line, at);
    for (let x = 0; x < width; x++) {
      const now = state[x];
      if (now === BROKEN) pixels[at + x] = (x + y) % STRIPES_EVERY < STRIPE_WIDTH ? STRIPE : BLACK;
      else if (now === UNREAD && (x + height - y) % UNREAD_EVERY === 0) pixels[at + x] = colours.missing;
    }
  }
}

/** Of the sites in these rows and the columns [from, to], the cell that is shown: broken first, then the furthest out. */
export function shownCell(
  { series, block, depth, scale }: Omit<HeatView, "range">,
  rows: readonly [number, number],
  columns: readonly [number, number],
): Cell {
  let found: Cell = { site: -1, column: columns[1], kind: "missing", value: NaN };
  let [state, best] = [UNREAD, 0];
  for (let row = rows[0]; row < rows[1]; row++) {
    const { from, to } = depth.rows[row] ?? { from: 0, to: 0 };
    for (let site = from; site < to; site++) {
      for (let column = Math.max(0, columns[0]); column <= columns[1]; column++) {
        const at = site * series.columns + column;
        const kind = cellKind(block.bits[at] ?? 0);
        const value = block.values[at] ?? NaN;
        const now = kind === "value" ? VALUE : kind === "missing" ? MISSING : BROKEN;
        const out = now === VALUE ? scale.outness(value) : 0;
        if (now < state || (now === state && !(now === VALUE && out > best))) continue;
        [state, best, found] = [now, out, { site, column, kind, value }];
      }
    }
  }
  return found;
}
