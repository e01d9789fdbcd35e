// How a parameter's entries are distributed, histogram over histogram.

import type { CsvCell } from "./export";

export interface Histogram {
  readonly step: number;
  readonly edges: readonly number[];
  readonly counts: readonly number[];
  /** Entries that are NaN or infinite; they are in no bin. */
  readonly nonfinite: number;
}

/** The answer of /histograms. */
export interface Histograms {
  readonly metric: string;
  readonly site: string;
  /** How many there are in the range; fewer may be shown. */
  readonly total: number;
  readonly histograms: readonly Histogram[];
}

/** One site in the answer of /histograms without a site. */
export interface SiteHistograms {
  readonly site: string;
  readonly total: number;
  readonly histograms: readonly Histogram[];
}

export interface Ridge {
  readonly step: number;
  readonly entries: number;
  readonly nonfinite: number;
  readonly baseline: number;
  /** The outline as an SVG path, empty where every entry is NaN or infinite. */
  readonly path: string;
}

export interface Ridgeline {
  readonly low: number;
  readonly high: number;
  readonly ridges: readonly Ridge[];
}

/** Lays ridges over one common axis, the oldest at the top, each scaled to its own peak density. */
export function ridgeline(histograms: readonly Histogram[], width: number, gap: number, peak: number): Ridgeline {
  const drawn = histograms.filter((item) => item.counts.some((count) => count > 0));
  const low = Math.min(...drawn.map(({ edges }) => edges[0] ?? 0));
  const high = Math.max(...drawn.map(({ edges }) => edges.at(-1) ?? 0));
  const [from, to] = drawn.length === 0 ? [0, 1] : high > low ? [low, high] : [low - 1, high + 1];
  const x = (value: number): number => ((value - from) / (to - from)) * width;
  const ridges = histograms.map(({ step, edges, counts, nonfinite }, i) => {
    const baseline = peak + i * gap;
    const entries = counts.reduce((sum, count) => sum + count, 0);
    const density = counts.map(
      (count, bin) => count / Math.max(Number.MIN_VALUE, (edges[bin + 1] ?? 0) - (edges[bin] ?? 0)),
    );
    const most = Math.max(...density);
    let path = "";
    if (entries > 0) {
      const points = density.map(
        (value, bin) =>
          `L${x(edges[bin] ?? 0).toFixed(1)} ${(baseline - (value / most) * peak).toFixed(1)}H${x(edges[bin + 1] ?? 0).toFixed(1)}`,
      );
      path = `M${x(edges[0] ?? 0).toFixed(1)} ${baseline}${points.join("")}V${baseline}`;
    }
    return { step, entries, nonfinite, baseline, path };
  });
  return { low: from, high: to, ridges };
}

export interface HeatColumn {
  readonly step: number;
  readonly nonfinite: number;
  /** Bins from the lowest up: where they lie, and their density as a share of the greatest in the column. */
  readonly bins: readonly { readonly top: number; readonly height: number; readonly share: number }[];
}

/** The same histograms side by side: values upwards, time to the right. */
export function heatColumns(
  histograms: readonly Histogram[],
  height: number,
): { readonly low: number; readonly high: number; readonly columns: readonly HeatColumn[] } {
  const { low, high } = ridgeline(histograms, 1, 1, 1);
  const y = (value: number): number => height - ((value - low) / (high - low)) * height;
  const columns = histograms.map(({ step, nonfinite, edges, counts }) => {
    const density = counts.map(
      (count, bin) => count / Math.max(Number.MIN_VALUE, (edges[bin + 1] ?? 0) - (edges[bin] ?? 0)),
    );
    const most = density.reduce((a, b) => Math.max(a, b), Number.MIN_VALUE);
    const bins = density.flatMap((value, bin) => {
      const [top, bottom] = [y(edges[bin + 1] ?? 0), y(edges[bin] ?? 0)];
      return value === 0 ? [] : [{ top, height: Math.max(0.5, bottom - top), share: value / most }];
    });
    return { step, nonfinite, bins };
  });
  return { low, high, columns };
}

/** A heat map as pixels: a column for each histogram, `rows` from the highest value down. */
export interface HeatPixels {
  readonly low: number;
  readonly high: number;
  /** 0 to 255 by column, then row: the density as a share of the greatest in the column; entries are never 0. */
  readonly shares: Uint8Array;
  /** Whether a column has entries that are NaN or infinite. */
  readonly broken: readonly boolean[];
}

export function heatPixels(histograms: readonly Histogram[], rows: number): HeatPixels {
  const { low, high, columns } = heatColumns(histograms, rows);
  const shares = new Uint8Array(columns.length * rows);
  columns.forEach(({ bins }, column) => {
    for (const { top, height, share } of bins) {
      const from = Math.min(rows - 1, Math.max(0, Math.floor(top + 1e-6)));
      const to = Math.max(from + 1, Math.min(rows, Math.ceil(top + height - 1e-6)));
      const shade = Math.max(24, Math.round(255 * Math.sqrt(share)));
      for (let row = from; row < to; row++) {
        const at = column * rows + row;
        shares[at] = Math.max(shares[at] ?? 0, shade);
      }
    }
  });
  return { low, high, shares, broken: columns.map(({ nonfinite }) => nonfinite > 0) };
}

/** The site to begin with: the first pinned one that has histograms or holds one that has, else the first. */
export function firstSite(sites: readonly string[], pins: readonly string[]): string {
  for (const pin of pins) {
    const found = sites.find((site) => site === pin) ?? sites.find((site) => site.startsWith(`${pin}.`));
    if (found !== undefined) return found;
  }
  return sites[0] ?? "";
}

/** Every bin of every histogram shown, one line each. */
export function histogramRows({ metric, site, histograms }: Histograms): readonly (readonly CsvCell[])[] {
  const rows: CsvCell[][] = [["metric", "site", "step", "from", "to", "count", "nonfinite"]];
  for (const { step, edges, counts, nonfinite } of histograms) {
    counts.forEach((count, bin) =>
      rows.push([metric, site, step, edges[bin] ?? null, edges[bin + 1] ?? null, count, nonfinite]),
    );
  }
  return rows;
}
