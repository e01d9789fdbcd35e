// The part of TensorBoard's address that belongs to this panel: #gradflow&p.gradflow.run=a&p.gradflow.pin=x

import { AXES, type AxisKind } from "./axis";
import { COLOUR_RANGES, type ColourRange } from "./colour";
import type { RowRange } from "./depth";
import type { Fold } from "./tree";

const PREFIX = "p.gradflow.";

export type Mode = "beside" | "difference";

/** How many steps become one column of the map. */
export type Reducer = "extreme" | "max" | "min" | "mean";

export const REDUCERS: readonly Reducer[] = ["extreme", "max", "min", "mean"];

/** How histograms are drawn: as ridges, as a heat map, or as small heat maps of all parameters. */
export type HistogramForm = "" | "heat" | "all";

export const HISTOGRAM_FORMS: readonly HistogramForm[] = ["", "heat", "all"];

export interface UrlState {
  readonly run?: string;
  readonly metric?: string;
  /** The run to compare with, and how. */
  readonly other?: string;
  readonly mode?: Mode;
  /** The runs chosen in the table of all runs. */
  readonly compare?: readonly string[];
  readonly step?: number;
  readonly pins?: readonly string[];
  readonly reduce?: Reducer;
  readonly phase?: string;
  /** How the lines are drawn: their axis, their smoothing, the charts in their order, and those whose log switch was turned. */
  readonly axis?: AxisKind;
  readonly smooth?: number;
  readonly charts?: readonly string[];
  readonly log?: Readonly<Record<string, boolean>>;
  /** Which rows of the map are folded and in view, and what its colours stand for. */
  readonly fold?: Fold;
  readonly rows?: RowRange;
  readonly colour?: ColourRange;
  readonly histograms?: HistogramForm;
  /** First and last step in view. */
  readonly zoom?: readonly [number, number];
}

export function parseHash(hash: string): UrlState {
  const found = new Map<string, string>();
  for (const part of hash.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    if (at > 0 && part.startsWith(PREFIX)) found.set(part.slice(PREFIX.length, at), unescape(part.slice(at + 1)));
  }
  const text = (key: string): string => found.get(key) ?? "";
  const [run, metric, step, other, phase, smooth] = ["run", "metric", "step", "other", "phase", "smooth"].map(text);
  const axis = AXES.find(({ kind }) => kind !== "step" && kind === text("axis"))?.kind;
  const reduce = REDUCERS.find((word) => word !== "extreme" && word === text("reduce"));
  const histograms = HISTOGRAM_FORMS.find((form) => form === text("histograms"));
  const charts = parseCharts(text("charts"));
  const [pins, compare, log] = [parseList(text("pins")), parseList(text("compare")), parseSwitches(text("log"))];
  return {
    ...(run ? { run } : {}),
    ...(metric ? { metric } : {}),
    ...(other ? { other } : {}),
    ...(phase ? { phase } : {}),
    ...(text("mode") === "difference" ? { mode: "difference" as const } : {}),
    ...(/^\d+$/.test(step ?? "") ? { step: Number(step) } : {}),
    ...parseZoom(text("zoom")),
    ...parseRows(text("rows")),
    ...parseFold(text("fold")),
    ...parseColour(text("colour")),
    ...(histograms ? { histograms } : {}),
    ...(reduce === undefined ? {} : { reduce }),
    ...(axis === undefined ? {} : { axis }),
    ...(/^0\.\d+$/.test(smooth ?? "") ? { smooth: Number(smooth) } : {}),
    ...(compare.length === 0 ? {} : { compare }),
    ...(pins.length === 0 ? {} : { pins }),
    ...(charts === null ? {} : { charts }),
    ...(Object.keys(log).length === 0 ? {} : { log }),
  };
}

/** The key-value pairs to store; an empty value removes its key, and what is so by default is not stored. */
export function toStorage(state: UrlState): readonly (readonly [string, string])[] {
  const list = (words: readonly string[] | undefined): string =>
    words === undefined || words.length === 0 ? "" : JSON.stringify(words);
  const values: Readonly<Record<string, string>> = {
    run: state.run ?? "",
    metric: state.metric ?? "",
    other: state.other ?? "",
    mode: state.other && state.mode === "difference" ? state.mode : "",
    step: state.step === undefined ? "" : String(state.step),
    zoom: state.zoom === undefined ? "" : state.zoom.join("-"),
    rows: state.rows === undefined ? "" : state.rows.map((row) => Number(row.toFixed(2))).join("-"),
    fold:
      state.fold === undefined || (state.fold.level === 0 && state.fold.turned.length === 0)
        ? ""
        : JSON.stringify([state.fold.level, ...state.fold.turned]),
    colour:
      state.colour === undefined || state.colour === "auto"
        ? ""
        : typeof state.colour === "string"
          ? state.colour
          : state.colour.join("~"),
    histograms: state.histograms ?? "",
    pins: list(state.pins),
    compare: list(state.compare),
    reduce: state.reduce === undefined || state.reduce === "extreme" ? "" : state.reduce,
    phase: state.phase ?? "",
    axis: state.axis === undefined || state.axis === "step" ? "" : state.axis,
    smooth: state.smooth ? String(state.smooth) : "",
    charts: state.charts === undefined ? "" : JSON.stringify(state.charts),
    log: Object.keys(state.log ?? {}).length === 0 ? "" : JSON.stringify(state.log),
  };
  return Object.entries(values).map(([key, value]) => [`${PREFIX}${key}`, value]);
}

function unescape(text: string): string {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

function parseZoom(text: string): { readonly zoom?: readonly [number, number] } {
  const [, first, last] = (/^(\d{1,15})-(\d{1,15})$/.exec(text) ?? []).map(Number);
  return first !== undefined && last !== undefined && last - first >= 2 ? { zoom: [first, last] } : {};
}

function parseRows(text: string): { readonly rows?: RowRange } {
  const [low, high] = (/^(\d{1,7}(?:\.\d+)?)-(\d{1,7}(?:\.\d+)?)$/.exec(text) ?? []).slice(1).map(Number);
  return low !== undefined && high !== undefined && high > low ? { rows: [low, high] } : {};
}

function parseFold(text: string): { readonly fold?: Fold } {
  const parsed = parseJson(text);
  if (!Array.isArray(parsed) || !Number.isInteger(parsed[0])) return {};
  return {
    fold: {
      level: Number(parsed[0]),
      turned: parsed.slice(1).filter((item): item is string => typeof item === "string"),
    },
  };
}

function parseColour(text: string): { readonly colour?: ColourRange } {
  const word = COLOUR_RANGES.find((value) => value === text && value !== "typed");
  if (word !== undefined && word !== "typed") return { colour: word };
  const [low, high] = text === "" ? [] : text.split("~").map(Number);
  return low !== undefined && high !== undefined && low < high ? { colour: [low, high] } : {};
}

function parseList(text: string): readonly string[] {
  const parsed = parseJson(text);
  return Array.isArray(parsed) ? parsed.filter((item): item is string => typeof item === "string") : [];
}

/** An empty list is a choice too: no chart at all. */
function parseCharts(text: string): readonly string[] | null {
  const parsed = parseJson(text);
  return Array.isArray(parsed) && parsed.every((item) => typeof item === "string") ? parsed : null;
}

function parseSwitches(text: string): Readonly<Record<string, boolean>> {
  const parsed = parseJson(text);
  if (typeof parsed !== "object" || parsed === null || Array.isArray(parsed)) return {};
  return Object.fromEntries(
    Object.entries(parsed).filter((pair): pair is [string, boolean] => typeof pair[1] === "boolean"),
  );
}

function parseJson(text: string): unknown {
  try {
    return JSON.parse(text);
  } catch {
    return null;
  }
}
