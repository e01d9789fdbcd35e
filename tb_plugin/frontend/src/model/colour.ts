// From value to colour. Both ramps stay readable with any kind of colour blindness.
import type { MetricSpec } from "../schema";
import type { Block } from "./series";

type Rgb = readonly [number, number, number];

export interface ColourScale {
  readonly low: number;
  readonly high: number;
  readonly log: boolean;
  readonly diverging: boolean;
  /** The ramp as the 32-bit words of ImageData. */
  readonly words: Uint32Array;
  /** Where a value lies between the two ends, 0 to 1. */
  position(value: number): number;
}

// Odd, so that the neutral value has a colour of its own.
const LEVELS = 257;
const OCTAVES = 3;

// Blue damps, white keeps, red amplifies.
const DIVERGING: readonly Rgb[] = [[10, 48, 120], [33, 102, 190], [120, 175, 222], [0, 0, 0], [240, 150, 115], [203, 50, 56], [110, 5, 30]];
const SEQUENTIAL: readonly Rgb[] = [[20, 33, 82], [52, 70, 122], [92, 104, 126], [133, 137, 128], [176, 169, 115], [221, 205, 90], [253, 234, 100]];

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
 * Chooses ends that mean the same in every run where the metric allows it, and robust ones (1st and 99th percentile)
 * otherwise.
 */
export function colourScale(spec: MetricSpec, block: Block, dark: boolean): ColourScale {
  const diverging = isDiverging(spec);
  let log = spec.scale === "log";
  let [low, high] = [spec.low ?? 0, spec.high ?? 1];
  if (diverging) {
    const wide = OCTAVES * Math.LN2;
    [low, high] = log ? [2 ** -OCTAVES, 2 ** OCTAVES] : [spec.low ?? -wide, spec.high ?? wide];
  } else if (log || spec.low === null || spec.high === null) {
    [low, high] = robustRange(block, log);
    log = log && low > 0;
  }
  const neutral: Rgb = dark ? [226, 229, 233] : [255, 255, 255];
  const words = ramp(diverging ? DIVERGING.map((stop, i) => (i === 3 ? neutral : stop)) : SEQUENTIAL);
  const [from, to] = log ? [Math.log(low), Math.log(high)] : [low, high];
  const position = (value: number): number => {
    const at = ((log ? Math.log(value) : value) - from) / (to - from);
    return at > 0 ? Math.min(at, 1) : 0;
  };
  return { low, high, log, diverging, words, position };
}

export function colourOf(scale: ColourScale, value: number): number {
  return scale.words[Math.round(scale.position(value) * (LEVELS - 1))] ?? 0;
}

export function css(colour: number): string {
  return `rgb(${colour & 255} ${(colour >> 8) & 255} ${(colour >> 16) & 255})`;
}

function robustRange(block: Block, log: boolean): [number, number] {
  const stride = Math.max(1, Math.floor(block.values.length / 20000));
  const sample: number[] = [];
  for (let i = 0; i < block.values.length; i += stride) {
    const value = block.values[i] ?? NaN;
    if (Number.isFinite(value) && (!log || value > 0)) sample.push(value);
  }
  sample.sort((a, b) => a - b);
  const at = (q: number): number => sample[Math.round(q * (sample.length - 1))] ?? NaN;
  const [low, high] = [at(0.01), at(0.99)];
  if (high > low) return [low, high];
  const middle = Number.isFinite(low) ? low : 1;
  return log ? [middle / 10, middle * 10] : [middle - 1, middle + 1];
}
