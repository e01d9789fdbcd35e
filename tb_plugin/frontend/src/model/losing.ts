// Where the gradient is lost: what is left of it from the loss down to each block, as one line per step.
import { toNumber, type MetricMoment } from "./health";
import { cellKind, type Series } from "./series";

/** The metric that the server sums up from the log gains of the blocks. */
export const FROM_LOSS = "block.gain_from_loss";

/** Nats left behind each block, from the loss on; null where no gradient arrived. */
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
    if (value !== null && (best === null || Math.abs(value - before) > Math.abs(best.change)))
      best = { site, change: value - before };
    before = value ?? 0;
  }
  return best === null ? null : { site: best.site, factor: Math.exp(best.change) };
}

/** From the loss to the input: the sites of a moment, in reverse of the forward pass. */
export function leftAt({ step, sites, values }: MetricMoment): {
  readonly sites: readonly string[];
  readonly left: Left;
} {
  const nats = values.map((value) => (value === null || !Number.isFinite(toNumber(value)) ? null : toNumber(value)));
  return { sites: [...sites].reverse(), left: { step: step ?? 0, nats: nats.reverse() } };
}

/** A few lines over the run, the oldest first. */
export function leftOver(series: Series): readonly Left[] {
  const block = series.blocks.values().next().value;
  return Array.from({ length: series.columns }, (_, column) => ({
    step: series.first[column] ?? 0,
    nats: Array.from(series.sites, (_, i) => {
      const at = (series.sites.length - 1 - i) * series.columns + column;
      return cellKind(block?.bits[at] ?? 0) === "value" ? (block?.values[at] ?? null) : null;
    }),
  }));
}
