// The vertical axis of a map: which rows are in view, and where they lie. Row 0 lies at the bottom.
import type { ColourRange } from "./colour";
import { isFolded, UNFOLDED, type Branch, type Fold, type Row } from "./tree";

export interface Depth {
  readonly rows: readonly Row[];
  /** The rows [low, high) are in view; parts of rows count. */
  readonly low: number;
  readonly high: number;
}

export type RowRange = readonly [number, number];

/** What is shown of the layers, and in which colours; both maps of a comparison share it. */
export interface DepthState {
  readonly fold: Fold;
  /** The rows in view, null for all. */
  readonly rows: RowRange | null;
  readonly colour: ColourRange;
  /** Whether the map takes the whole window. */
  readonly tall: boolean;
}

export const ALL_ROWS: DepthState = { fold: UNFOLDED, rows: null, colour: "auto", tall: false };

const LEAST_ROWS = 3;

export function depthOf(rows: readonly Row[], range: RowRange | null): Depth {
  const [low, high] = range ?? [0, rows.length];
  const length = Math.max(Math.min(LEAST_ROWS, rows.length), Math.min(rows.length, high - low));
  const first = Math.max(0, Math.min(rows.length - length, low));
  return { rows, low: first, high: first + length };
}

/** A range `factor` times as long, with the row `at` where it was; null once every row is in view. */
export function zoomRows({ rows, low, high }: Depth, at: number, factor: number): RowRange | null {
  const length = Math.max(LEAST_ROWS, (high - low) * factor);
  if (length >= rows.length) return null;
  const share = Math.max(0, Math.min(1, (at - low) / (high - low)));
  return inside(at - share * length, length, rows.length);
}

/** Whole rows of a range; null where that is all of them. */
export function within({ rows }: Depth, range: RowRange): RowRange | null {
  const { low, high } = depthOf(rows, [Math.floor(range[0]), Math.ceil(range[1])]);
  return high - low >= rows.length ? null : [low, high];
}

export function panRows({ rows, low, high }: Depth, by: number): RowRange {
  return inside(low + by, high - low, rows.length);
}

/** The range that shows a row, unchanged where it does already. */
export function reveal(depth: Depth, row: number): RowRange {
  const { low, high } = depth;
  return row < low ? panRows(depth, row - low) : row + 1 > high ? panRows(depth, row + 1 - high) : [low, high];
}

function inside(low: number, length: number, rows: number): RowRange {
  const first = Math.max(0, Math.min(rows - length, low));
  return [first, first + length];
}

/** Where a row begins, counted in pixels from the top; a fraction of a row is a place inside it. */
export function rowTop({ low, high }: Depth, row: number, height: number): number {
  return ((high - row - 1) / (high - low)) * height;
}

export function rowHeight({ low, high }: Depth, height: number): number {
  return height / Math.max(1e-9, high - low);
}

/** The row at a distance from the top, as a place on the axis: 2.5 is the middle of row 2. */
export function placeAt({ low, high }: Depth, y: number, height: number): number {
  return high - (y / height) * (high - low);
}

/** The rows [from, to) that share the pixel between two distances from the top; at least one. */
export function rowsBetween(depth: Depth, top: number, bottom: number, height: number): readonly [number, number] {
  const most = depth.rows.length;
  // A row that only touches the edge of a pixel by the rounding of its place does not belong to it.
  const [low, high] = [placeAt(depth, bottom, height) + 1e-6, placeAt(depth, top, height) - 1e-6];
  const from = Math.max(0, Math.min(most - 1, Math.floor(low)));
  return [from, Math.max(from + 1, Math.min(most, Math.ceil(high)))];
}

export interface Label {
  readonly key: string;
  readonly text: string;
  readonly row: number;
  /** How many rows it stands for; 1 for a row of its own. */
  readonly rows: number;
  /** Distance from the top of its middle. */
  readonly y: number;
  readonly forced: boolean;
}

/** A folded or open branch that can be turned over, and the pixels it takes. */
export interface Handle {
  readonly key: string;
  readonly folded: boolean;
  readonly sites: number;
  readonly top: number;
  readonly height: number;
}

const HANDLE = 24;

/** For each site the row that shows it. */
export function rowOfSites(rows: readonly Row[], sites: number): Int32Array {
  const out = new Int32Array(sites).fill(-1);
  rows.forEach(({ from, to }, row) => out.fill(row, from, to));
  return out;
}

/**
 * Names for what is in view, none closer to the next than `gap`: rows where there is room, else the branches they belong
 * to. `forced` rows have theirs first.
 */
export function labelsOf(
  depth: Depth,
  branches: readonly Branch[],
  rowOf: Int32Array,
  forced: ReadonlySet<number>,
  height: number,
  gap: number,
): readonly Label[] {
  const { rows, low, high } = depth;
  const size = rowHeight(depth, height);
  // What begins in view has its name there, moved inwards at the edges.
  const middle = (row: number, count: number): number => {
    const [top, bottom] = [
      Math.max(0, rowTop(depth, row + count - 1, height)),
      Math.min(height, rowTop(depth, row - 1, height)),
    ];
    return top > height || bottom < 0 ? -1 : Math.max(gap / 2, Math.min(height - gap / 2, (top + bottom) / 2));
  };
  const inView = (y: number): boolean => y >= 0;
  const taken: Label[] = [];
  const free = (y: number): boolean => taken.every((label) => Math.abs(label.y - y) >= gap);
  for (const row of [...forced].sort((a, b) => a - b)) {
    const y = middle(row, 1);
    if (inView(y) && free(y))
      taken.push({ key: rows[row]?.key ?? "", text: rows[row]?.name ?? "", row, rows: 1, y, forced: true });
  }
  const out: Label[] = [];
  const fits = (y: number): boolean => free(y) && Math.abs((out.at(-1)?.y ?? Infinity) - y) >= gap;
  const walk = (list: readonly Branch[]): void => {
    for (const branch of list) {
      const [row, end] = [rowOf[branch.from] ?? 0, (rowOf[branch.to - 1] ?? 0) + 1];
      if (end <= low || row >= high) continue;
      const count = end - row;
      if (count > 1 && count * size >= 2 * gap) {
        walk(branch.inner);
        continue;
      }
      const y = middle(row, count);
      if (inView(y) && fits(y))
        out.push({
          key: branch.key,
          text: count > 1 ? branch.key.replace(/\.$/, "") : (rows[row]?.name ?? ""),
          row,
          rows: count,
          y,
          forced: false,
        });
    }
  };
  walk(branches);
  return [...taken, ...out];
}

/** The innermost branches that are open, and the folded ones, as far as they are large enough to be hit. */
export function handlesOf(
  depth: Depth,
  branches: readonly Branch[],
  rowOf: Int32Array,
  fold: Fold,
  height: number,
): readonly Handle[] {
  const out: Handle[] = [];
  let free = Infinity;
  const walk = (list: readonly Branch[], level: number): void => {
    for (const { key, from, to, inner } of list) {
      if (inner.length === 0) continue;
      const [row, end] = [rowOf[from] ?? 0, (rowOf[to - 1] ?? 0) + 1];
      if (end <= depth.low || row >= depth.high) continue;
      const [top, bottom] = [
        Math.max(0, rowTop(depth, end - 1, height)),
        Math.min(height, rowTop(depth, row - 1, height)),
      ];
      const folded = isFolded(fold, key, level);
      const deeper = !folded && inner.some((item) => item.inner.length > 0);
      const before = out.length;
      if (deeper) walk(inner, level + 1);
      if (out.length > before) continue;
      const tall = Math.max(HANDLE, bottom - top);
      const at = Math.max(0, Math.min(height - tall, (top + bottom - tall) / 2));
      if ((!folded && bottom - top < HANDLE) || at + tall > free + 0.5) continue;
      free = at;
      out.push({ key, folded, sites: to - from, top: at, height: tall });
    }
  };
  walk(branches, 1);
  return out;
}
