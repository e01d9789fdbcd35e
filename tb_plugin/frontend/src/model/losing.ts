// Where the gradient is lost: what is left of it from the loss down to each block, as one line per step.
import { formatStep, threeDigits } from "./format";
import { toNumber, type MetricMoment } from "./health";
import { MISSING_BITS } from "../schema";
import { cellKind, type Series } from "./series";

/** The metric that the server sums up from the log gains of the blocks. */
export const FROM_LOSS = "block.gain_from_loss";

/** Nats left behind each block, from the loss on; null where nothing arrived, NaN or infinite as it was read. */
export interface Left {
  readonly step: number;
  readonly nats: readonly (number | null)[];
}

export interface Drop {
  readonly site: string;
  /** What the block passed on, as a factor. */
  readonly factor: number;
}

/** The block whose own gain is furthest from 1, null where none was read. */
export function greatestDrop(sites: readonly string[], { nats }: Left): Drop | null {
  let best: { site: string; change: number } | null = null;
  let before = 0;
  for (const [i, site] of sites.entries()) {
    const value = nats[i] ?? null;
    if (isNumber(value) && (best === null || Math.abs(value - before) > Math.abs(best.change)))
      best = { site, change: value - before };
    before = isNumber(value) ? value : 0;
  }
  return best === null ? null : { site: best.site, factor: Math.exp(best.change) };
}

/** What is left in one run, from the loss to the input: its sites are in reverse of the forward pass. */
export interface RunLeft {
  readonly label: string;
  readonly sites: readonly string[];
  readonly left: Left;
}

/** A moment of a run; nothing where the run holds none. */
export function leftOf(label: string, moment: MetricMoment | undefined): RunLeft {
  const { step, sites, values } = moment ?? { step: null, sites: [], values: [] };
  const nats = values.map((value) => (value === null ? null : toNumber(value)));
  return { label, sites: [...sites].reverse(), left: { step: step ?? 0, nats: nats.reverse() } };
}

/** Whether there is something to draw. */
export function isNumber(value: number | null): value is number {
  return value !== null && Number.isFinite(value);
}

/** Whether start of another chain at a block, such as another player's: it has no gain, but those behind it have. */
export function isBorder({ nats }: Left, i: number): boolean {
  return nats[i] === null && typeof nats[i + 1] === "number";
}

/** In words: where most is lost or added, and how many blocks nothing arrives at. */
export function leftText({ sites, left }: RunLeft): string {
  if (sites.length === 0) return "no block gains";
  const drop = greatestDrop(sites, left);
  const count = (text: string, found: readonly unknown[]): string =>
    found.length === 0 ? "" : `${text} at ${formatStep(found.length)} of ${formatStep(sites.length)} blocks`;
  const said = drop === null ? "" : `largest change at ${drop.site}: \u00d7${threeDigits(drop.factor)}`;
  const gone = left.nats.filter((value, i) => value === null && !isBorder(left, i));
  const broken = left.nats.filter((value) => value !== null && !isNumber(value));
  return [`at step ${formatStep(left.step)}`, said, count("nothing arrives", gone), count("NaN or Inf", broken)]
    .filter(Boolean)
    .join("; ");
}

/** A few lines over the run, the oldest first. */
export function leftOver(series: Series): readonly Left[] {
  const block = series.blocks.values().next().value;
  return Array.from({ length: series.columns }, (_, column) => ({
    step: series.first[column] ?? 0,
    nats: Array.from(series.sites, (_, i) => {
      const at = (series.sites.length - 1 - i) * series.columns + column;
      return cellKind(block?.bits[at] ?? MISSING_BITS) === "missing" ? null : (block?.values[at] ?? null);
    }),
  }));
}
