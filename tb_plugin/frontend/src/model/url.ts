// The part of TensorBoard's address that belongs to this panel: #gradflow&p.gradflow.run=a&p.gradflow.pin=x

const PREFIX = "p.gradflow.";

export type Mode = "beside" | "difference";

export interface UrlState {
  readonly run?: string;
  readonly metric?: string;
  /** The run to compare with, and how. */
  readonly other?: string;
  readonly mode?: Mode;
  readonly step?: number;
  readonly pins?: readonly string[];
  /** First and last step in view. */
  readonly zoom?: readonly [number, number];
}

export function parseHash(hash: string): UrlState {
  const found = new Map<string, string>();
  for (const part of hash.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    if (at > 0 && part.startsWith(PREFIX)) found.set(part.slice(PREFIX.length, at), unescape(part.slice(at + 1)));
  }
  const [run, metric, step, pins, other, mode, zoom] = ["run", "metric", "step", "pins", "other", "mode", "zoom"].map((key) => found.get(key));
  return {
    ...(run ? { run } : {}),
    ...(metric ? { metric } : {}),
    ...(other ? { other } : {}),
    ...(mode === "difference" ? { mode } : {}),
    ...(step !== undefined && /^\d+$/.test(step) ? { step: Number(step) } : {}),
    ...parseZoom(zoom ?? ""),
    ...(pins ? { pins: parsePins(pins) } : {}),
  };
}

/** The key-value pairs to store; an empty value removes its key. */
export function toStorage(state: UrlState): readonly (readonly [string, string])[] {
  return [
    [`${PREFIX}run`, state.run ?? ""],
    [`${PREFIX}metric`, state.metric ?? ""],
    [`${PREFIX}other`, state.other ?? ""],
    [`${PREFIX}mode`, state.other && state.mode === "difference" ? state.mode : ""],
    [`${PREFIX}step`, state.step === undefined ? "" : String(state.step)],
    [`${PREFIX}zoom`, state.zoom === undefined ? "" : state.zoom.join("-")],
    [`${PREFIX}pins`, state.pins === undefined || state.pins.length === 0 ? "" : JSON.stringify(state.pins)],
  ];
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

function parsePins(text: string): readonly string[] {
  try {
    const parsed: unknown = JSON.parse(text);
    return Array.isArray(parsed) ? parsed.filter((pin): pin is string => typeof pin === "string") : [];
  } catch {
    return [];
  }
}
