// The first page where there is more than one run: a table of all, and below it the runs that were chosen in it.
import { fetchMeta, fetchOverview, fetchSeries, type RunMeta, type RunMetric, type RunSummary } from "./api";
import { el } from "./dom";
import type { Overview } from "./model/overview";
import { multipleOf } from "./model/multiples";
import { nameRuns } from "./model/labels";
import { Multiples } from "./views/multiples";
import { OverviewTable } from "./views/overview";

export interface OverviewPageEvents {
  open(run: string): void;
  error(message: string): void;
  /** Other runs are chosen. */
  changed(): void;
}

/** Milliseconds until a table with what is known is worth more than to wait for all of it. */
export const [SOON, PATIENCE] = [200, 1000];
const COLUMNS = 260;

export class OverviewPage {
  readonly #table: OverviewTable;
  readonly #multiples: Multiples;
  readonly root: HTMLElement;
  chosen: readonly string[] = [];
  #version = "";
  #metas = new Map<string, Promise<RunMeta>>();
  #job = 0;
  #asked = 0;

  constructor(private readonly events: OverviewPageEvents) {
    this.#table = new OverviewTable({
      open: (run) => events.open(run),
      chosen: (runs) => {
        this.chosen = runs;
        events.changed();
        void this.#guard(() => this.#compare());
      },
    });
    this.#multiples = new Multiples({
      load: () => void this.#guard(() => this.#compare()),
      open: (run) => events.open(run),
    });
    this.root = el("main", { class: "overview" }, this.#table.root, this.#multiples.root);
  }

  /** Shows the table that was answered just now, or loads it anew where any run has something new. */
  async refresh(runs: readonly RunSummary[], answered: Overview | null): Promise<void> {
    const versions = runs.map(({ run, version, state }) => `${run} ${version} ${state}`).join("\n");
    if (versions === this.#version) return;
    const job = ++this.#asked;
    let overview = answered ?? (await fetchOverview(PATIENCE));
    nameRuns(overview.runs);
    while (overview.pending && job === this.#asked) {
      this.#table.show(overview, this.chosen);
      overview = await fetchOverview(PATIENCE);
      nameRuns(overview.runs);
    }
    if (job !== this.#asked) return;
    this.#version = versions;
    this.#metas.clear();
    const there = new Set(overview.runs.map(({ run }) => run));
    this.chosen = this.chosen.filter((run) => there.has(run));
    this.#table.show(overview, this.chosen);
    await this.#compare();
  }

  async #compare(): Promise<void> {
    const job = ++this.#job;
    const runs = this.chosen;
    if (runs.length === 0) return this.#multiples.show([], null, []);
    const metas = await Promise.all(runs.map((run) => this.#meta(run)));
    const metrics = new Map<string, RunMetric>();
    for (const { metrics: held } of metas)
      for (const metric of held)
        if (metric.kind === "run" && !metrics.has(metric.name)) metrics.set(metric.name, metric);
    if (job !== this.#job) return;
    this.#multiples.offer([...metrics.values()]);
    const spec = metrics.get(this.#multiples.metric) ?? null;
    const holding = metas.filter(({ metrics: held }) => held.some(({ name }) => name === spec?.name));
    const found = await Promise.all(
      holding.map(({ run }) =>
        fetchSeries({ run, metric: spec?.name ?? "", phase: "", columns: COLUMNS, reduce: "mean", range: null }),
      ),
    );
    if (job === this.#job) this.#multiples.show(runs, spec, found.map(multipleOf));
  }

  #meta(run: string): Promise<RunMeta> {
    const known = this.#metas.get(run) ?? fetchMeta(run);
    this.#metas.set(run, known);
    return known;
  }

  async #guard(work: () => Promise<void>): Promise<void> {
    try {
      await work();
    } catch (error) {
      this.events.error(`Could not load: ${error instanceof Error ? error.message : String(error)}`);
    }
  }
}
