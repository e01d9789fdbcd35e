// Numbers and times as people read them.
import type { Unit } from "../schema";

const THIN = "\u202f";

/** A step as it stands on an axis; thin spaces between thousands. */
export function formatStep(step: number): string {
  return String(Math.round(step)).replace(/\B(?=(\d{3})+(?!\d))/g, THIN);
}

/** Six significant digits without trailing zeros; NaN and the infinities by name. */
export function formatNumber(value: number, digits = 6): string {
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "\u221e" : "\u2212\u221e";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text =
    size >= 1e-4 && size < 1e6
      ? String(Number(value.toPrecision(digits)))
      : value
          .toExponential(Math.max(0, Math.min(digits, 4) - 1))
          .replace(/\.?0+e/, "e")
          .replace("e+", "e");
  return text.replace("-", "\u2212");
}

/** Three significant digits, zeros at the end kept, so that numbers below each other can be compared. */
export function threeDigits(value: number): string {
  if (!Number.isFinite(value) || value === 0) return formatNumber(value);
  const size = Math.abs(value);
  const text =
    size >= 1e-3 && size < 99999.5
      ? size >= 999.5
        ? value.toFixed(0)
        : value.toPrecision(3)
      : value.toExponential(2).replace("e+", "e");
  return text.replace("-", "\u2212");
}

export function formatCount(value: number): string {
  for (const [size, unit] of [
    [1e9, "G"],
    [1e6, "M"],
    [1e3, "k"],
  ] as const) {
    if (value >= size) return `${Number((value / size).toPrecision(3))}${THIN}${unit}`;
  }
  return String(value);
}

/** The unit as it follows a number; nothing where the unit is that of another quantity, such as "gradient". */
export function unitText(unit: Unit): string {
  const spoken: readonly Unit[] = ["MB", "count", "nats", "s", "share", "steps/s"];
  return spoken.includes(unit) ? unit : "";
}

/** What is said where there is no value; a gain is missing where another chain of blocks begins, too. */
export function missingText(metric: string): string {
  return metric.includes("gain") ? "no gain" : "nothing arrived";
}

export function formatTime(seconds: number): string {
  return new Date(seconds * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium" });
}

/** A quantity and its unit, as they stand at an axis of a figure. */
export function quantityText({ title, unit }: { readonly title: string; readonly unit: Unit }): string {
  const said = unitText(unit);
  return said === "" ? title : `${title} (${said})`;
}

/** A time on an axis over so many seconds: the day where that tells ticks apart, else the time of day. */
export function formatClock(seconds: number, span: number): string {
  const time = new Date(seconds * 1000);
  const short: Intl.DateTimeFormatOptions = {
    hour: "2-digit",
    minute: "2-digit",
    ...(span < 300 ? { second: "2-digit" } : {}),
    hour12: false,
  };
  return span > 2 * 86400
    ? time.toLocaleDateString([], { month: "short", day: "numeric" })
    : time.toLocaleTimeString([], short);
}

export function formatDuration(seconds: number): string {
  const whole = Math.max(0, Math.round(seconds));
  if (whole < 10 && !Number.isInteger(seconds)) return `${Number(seconds.toPrecision(2))}${THIN}s`;
  if (whole < 60) return `${whole}${THIN}s`;
  if (whole < 3600) return `${Math.floor(whole / 60)}${THIN}min`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}${THIN}h ${Math.floor((whole % 3600) / 60)}${THIN}min`;
  return `${Math.floor(whole / 86400)}${THIN}d ${Math.floor((whole % 86400) / 3600)}${THIN}h`;
}

/** Keeps both ends of a long name, which is where names of layers differ. */
export function shorten(name: string, length: number): string {
  const letters = Array.from(name);
  if (letters.length <= length) return name;
  const tail = Math.ceil((length - 1) * 0.6);
  return `${letters.slice(0, length - 1 - tail).join("")}\u2026${letters.slice(-tail).join("")}`;
}

/** Round numbers between two ends, about `count` of them, on a linear axis. */
export function linearTicks(low: number, high: number, count: number): number[] {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = ([1, 2, 5, 10].find((f) => f * power >= rough) ?? 10) * power;
  const ticks: number[] = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++)
    ticks.push(Number((i * step).toPrecision(12)));
  return ticks;
}

/** Steps between ticks on an axis of elapsed seconds, so that they fall on whole minutes, hours and days. */
export function elapsedSteps(): number[] {
  const [minute, hour, day] = [60, 3600, 86400];
  const small = [0.001, 0.01, 0.1, 0.5, 1, 2, 5, 10, 15, 30];
  return [
    ...small,
    ...[1, 2, 5, 10, 15, 30].map((n) => n * minute),
    ...[1, 2, 3, 6, 12].map((n) => n * hour),
    ...[1, 2, 5, 10, 50].map((n) => n * day),
  ];
}

/** What a site is called: run-level metrics have the one site without a name. */
export function siteText(site: string): string {
  return site === "" ? "whole model" : site;
}

/** What the sites of a kind are, as a heading; a kind that this page does not know by name reads as it is written. */
export function kindText(kind: string): string {
  const spoken: Readonly<Record<string, string>> = {
    run: "Whole model",
    block: "Blocks",
    parameter: "Parameters",
    module: "Modules",
    head: "Attention heads",
    node: "Nodes",
  };
  return spoken[kind] ?? kind;
}
