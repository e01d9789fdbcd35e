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
}

export function parseHash(hash: string): UrlState {
  const found = new Map<string, string>();
  for (const part of hash.replace(/^#/, "").split("&")) {
    const at = part.indexOf("=");
    if (at > 0 && part.startsWith(PREFIX)) found.set(part.slice(PREFIX.length, at), unescape(part.slice(at + 1)));
  }
  const [run, metric, step, pins, other, mode] = ["run", "metric", "step", "pins", "other", "mode"].map((key) => found.get(key));
  return {
    ...(run ? { run } : {}),
    ...(metric ? { metric } : {}),
    ...(other ? { other } : {}),
    ...(mode === "difference" ? { mode } : {}),
    ...(step !== undefined && /^\d+$/.test(step) ? { step: Number(step) } : {}),
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

function parsePins(text: string): readonly string[] {
  try {
    const parsed: unknown = JSON.parse(text);
    return Array.isArray(parsed) ? parsed.filter((pin): pin is string => typeof pin === "string") : [];
  } catch {
    return [];
  }
}
