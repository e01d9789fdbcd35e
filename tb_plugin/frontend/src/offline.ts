// The answers that a snapshot file carries with it instead of a server; tensorboard_plugin_gradflow/snapshot.py writes them.
import type { Annotation, CatalogEntry, RunMeta, RunSummary } from "./api";
import type { Module } from "./model/architecture";
import type { MetricMoment, Moment } from "./model/health";
import { momentFrom } from "./model/health";
import type { Histograms } from "./model/ridge";
import { decodeSeries, pick, type Series } from "./model/series";
import type { Overview } from "./model/overview";
import type { Issue } from "./model/verdict";

export const SNAPSHOT_ID = "gradflow-snapshot";

interface KeptRun {
  readonly meta: RunMeta;
  readonly issues: readonly Issue[];
  /** The last reading of every metric, as written. */
  readonly moment: Readonly<Record<string, MetricMoment>>;
  /** Every metric in all reductions: gzip, then base64. */
  readonly series: Readonly<Record<string, string>>;
  readonly histograms: readonly Histograms[];
  readonly annotations: readonly Annotation[];
  readonly architecture: readonly Module[];
}

interface Kept {
  readonly runs: readonly RunSummary[];
  readonly overview: Overview;
  readonly catalog: readonly CatalogEntry[];
  readonly kept: Readonly<Record<string, KeptRun>>;
}

export class Offline {
  readonly #decoded = new Map<string, Promise<Series>>();

  constructor(private readonly data: Kept) {}

  get runs(): readonly RunSummary[] {
    return this.data.runs;
  }

  get overview(): Overview {
    return this.data.overview;
  }

  get catalog(): readonly CatalogEntry[] {
    return this.data.catalog;
  }

  run(run: string): KeptRun {
    const found = this.data.kept[run];
    if (found === undefined) throw new Error(`this file does not contain run ${run}`);
    return found;
  }

  async series(run: string, metric: string, reduce: string, sites: readonly string[]): Promise<Series> {
    const packed = this.run(run).series[metric];
    if (packed === undefined) throw new Error(`run ${run} has no metric ${metric}`);
    const key = `${run}\n${metric}`;
    const whole = this.#decoded.get(key) ?? unpack(packed);
    this.#decoded.set(key, whole);
    return pick(await whole, reduce.split(","), sites);
  }

  /** Exact at the last step; before it, what the kept columns hold. */
  async moment(run: string, step: number, metrics: readonly string[]): Promise<Moment> {
    const { meta, moment } = this.run(run);
    if (step >= (meta.last ?? 0))
      return {
        step,
        metrics: Object.fromEntries(metrics.flatMap((name) => (moment[name] ? [[name, moment[name]]] : []))),
      };
    const found = await Promise.all(metrics.map((name) => this.series(run, name, "extreme", [])));
    return momentFrom(found, step);
  }
}

let loaded: Offline | null | undefined;

/** What the page carries, null where a server answers. */
export function offline(): Offline | null {
  if (loaded === undefined) {
    const text = document.getElementById(SNAPSHOT_ID)?.textContent;
    loaded = text ? new Offline(JSON.parse(text) as Kept) : null;
  }
  return loaded;
}

async function unpack(packed: string): Promise<Series> {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return decodeSeries(await new Response(plain).arrayBuffer());
}
