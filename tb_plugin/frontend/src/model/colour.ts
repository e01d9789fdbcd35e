// From value to colour. Both ramps stay readable with any kind of colour blindness.
import type { MetricSpec } from "../schema";
import type { Block } from "./series";

type Rgb = readonly [number, number, number];

export interface ColourScale {
  readonly low: number;
  readonly high: number;
  readonly log: boolean;
  readonly diverging: boolean;
  /** Whether the ends are those of this run's values, not those that mean the same in every run. */
  readonly robust: boolean;
  /** The ramp as the 32-bit words of ImageData. */
  readonly words: Uint32Array;
  /** Where a value lies between the two ends, 0 to 1. */
  position(value: number): number;
  /** How far a value lies from the neutral one, or from the median where the metric has no neutral value. */
  outness(value: number): number;
  /** The two values that lie so far out, the lower one first. */
  bounds(outness: number): readonly [number, number];
}

/** Which values the ends of the ramp stand for: two numbers, or a way to choose them. */
export type ColourRange = "auto" | "fixed" | "robust" | readonly [number, number];

export const COLOUR_RANGES = ["auto", "fixed", "robust", "typed"] as const;

// Odd, so that the neutral value has a colour of its own.
const LEVELS = 257;
const OCTAVES = 3;

// Blue damps, white keeps, red amplifies.
const DIVERGING: readonly Rgb[] = [
  [10, 48, 120],
  [33, 102, 190],
  [120, 175, 222],
  [0, 0, 0],
  [240, 150, 115],
  [203, 50, 56],
  [110, 5, 30],
];
// In the dark the neutral value recedes into the page, and both ends shine.
const DARK_DIVERGING: readonly Rgb[] = [
  [176, 222, 255],
  [92, 166, 240],
  [50, 96, 152],
  [46, 48, 52],
  [150, 70, 62],
  [236, 112, 98],
  [255, 204, 190],
];
const SEQUENTIAL: readonly Rgb[] = [
  [20, 33, 82],
  [52, 70, 122],
  [92, 104, 126],
  [133, 137, 128],
  [176, 169, 115],
  [221, 205, 90],
  [253, 234, 100],
];

export function word(red: number, green: number, blue: number): number {
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}

function ramp(stops: readonly Rgb[]): Uint32Array {
  const out = new Uint32Array(LEVELS);
  for (let i = 0; i < LEVELS; i++) {
    const at = (i / (LEVELS - 1)) * (stops.length - 1);
    const left = stops[Math.floor(at)] ?? [0, 0, 0];
    const right = stops[Math.ceil(at)] ?? left;
    const mix = (k: 0 | 1 | 2): number => Math.round(left[k] + (right[k] - left[k]) * (at % 1));
    out[i] = word(mix(0), mix(1), mix(2));
  }
  return out;
}

/** Whether a metric is a ratio around a neutral value, as gains are. */
export function isDiverging(spec: MetricSpec): boolean {
  const [low, high] = spec.marks;
  if (low === undefined || high === undefined) return false;
  return spec.scale === "log" ? low < 1 && high > 1 : low < 0 && high > 0;
}

/**
 * Chooses the ends of the ramp. `fixed` ends mean the same in every run, where the metric allows it; `robust` ones are the
 * 1st and the 99th percentile; `auto` is fixed, unless half of what is shown lies beyond one end.
 */
export function colourScale(spec: MetricSpec, block: Block, dark: boolean, range: ColourRange = "auto"): ColourScale {
  const key = JSON.stringify([spec.name, spec.scale, spec.marks, spec.low, spec.high, dark, range]);
  const before = made.get(block);
  const scale = before?.key === key ? before.scale : makeScale(spec, block, dark, range);
  made.set(block, { key, scale });
  return scale;
}

/** The last scale of each block: to stretch or to move a map takes none anew. */
const made = new WeakMap<Block, { readonly key: string; readonly scale: ColourScale }>();

function makeScale(spec: MetricSpec, block: Block, dark: boolean, range: ColourRange): ColourScale {
  const diverging = isDiverging(spec);
  const sample = sampleOf(block, spec.scale === "log");
  const fixed = fixedEnds(spec, diverging);
  const beyond = (low: number, high: number): boolean =>
    2 * Math.max(sample.filter((v) => v < low).length, sample.filter((v) => v > high).length) > sample.length;
  const typed = typeof range !== "string";
  const robust = !typed && (fixed === null || range === "robust" || (range === "auto" && beyond(...fixed)));
  const [low, high] = typed ? range : robust ? robustEnds(sample, spec, diverging) : (fixed ?? [0, 1]);
  const log = spec.scale === "log" && low > 0;
  const words = ramp(
    diverging
      ? dark
        ? DARK_DIVERGING
        : DIVERGING.map((stop, i) => (i === 3 ? ([255, 255, 255] as const) : stop))
      : SEQUENTIAL,
  );
  const place = (value: number): number => (log ? Math.log(value) : value);
  const [from, to] = [place(low), place(high)];
  const zero = spec.scale === "log" ? 1 : 0;
  // A neutral value outside of typed ends leaves half of the ramp unused, but never changes its side.
  const middle = diverging ? Math.min(to, Math.max(from, place(zero))) : NaN;
  const position = (value: number): number => {
    const at = place(value);
    const share = !diverging
      ? (at - from) / (to - from)
      : at < middle
        ? (0.5 * (at - from)) / (middle - from)
        : middle < to
          ? 0.5 + (0.5 * (at - middle)) / (to - middle)
          : 0.5;
    return share > 0 ? Math.min(share, 1) : 0;
  };
  const typical = diverging ? zero : (sample[sample.length >> 1] ?? 1);
  const ratio = spec.scale === "log" && typical > 0;
  const bounds = (out: number): readonly [number, number] =>
    ratio ? [typical / out, typical * out] : [typical - out, typical + out];
  const outness = ratio
    ? (value: number): number => (value >= typical ? value / typical : value > 0 ? typical / value : Infinity)
    : (value: number): number => Math.abs(value - typical);
  return { low, high, log, diverging, robust, words, position, outness, bounds };
}

export function colourOf(scale: ColourScale, value: number): number {
  return scale.words[Math.round(scale.position(value) * (LEVELS - 1))] ?? 0;
}

export function css(colour: number): string {
  return `rgb(${colour & 255} ${(colour >> 8) & 255} ${(colour >> 16) & 255})`;
}

function fixedEnds(spec: MetricSpec, diverging: boolean): [number, number] | null {
  if (diverging) {
    const wide = OCTAVES * Math.LN2;
    return spec.scale === "log" ? [2 ** -OCTAVES, 2 ** OCTAVES] : [spec.low ?? -wide, spec.high ?? wide];
  }
  return spec.scale === "log" || spec.low === null || spec.high === null ? null : [spec.low, spec.high];
}

/** Finite values in rising order, evenly chosen; on a log scale only those that it can show. */
function sampleOf(block: Block, log: boolean): readonly number[] {
  const stride = Math.max(1, Math.floor(block.values.length / 20000));
  const sample: number[] = [];
  for (let i = 0; i < block.values.length; i += stride) {
    const value = block.values[i] ?? NaN;
    if (Number.isFinite(value) && (!log || value > 0)) sample.push(value);
  }
  return sample.sort((a, b) => a - b);
}

function robustEnds(sample: readonly number[], spec: MetricSpec, diverging: boolean): [number, number] {
  const log = spec.scale === "log";
  const at = (q: number): number => sample[Math.round(q * (sample.length - 1))] ?? NaN;
  const [low, high] = [at(0.01), at(0.99)];
  if (diverging && sample.length > 0) {
    // As far to one side of the neutral value as to the other, so that its colour stays in the middle.
    const far = log ? Math.max(high, 1 / low, 1.01) : Math.max(Math.abs(low), Math.abs(high)) || 1;
    return log ? [1 / far, far] : [-far, far];
  }
  if (high > low) return [low, high];
  const middle = Number.isFinite(low) ? low : 1;
  return log ? [middle / 10, middle * 10] : [middle - 1, middle + 1];
}
