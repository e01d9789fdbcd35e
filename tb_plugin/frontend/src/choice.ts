// What is chosen, and what follows from it and from what is known of the runs; knows no view and no server.
import type { Annotation, CatalogEntry, RunMeta, RunMetric, RunSummary } from "./api";
import { firstMetric } from "./model/offer";
import type { Mode, Reducer, UrlState } from "./model/url";
import type { Issue } from "./model/verdict";
import type { Range } from "./model/zoom";
import { ALL_ROWS, type DepthState } from "./model/depth";

export class Choice {
  run = "";
  /** A run that a link named and that is not there, empty for none. */
  missing = "";
  /** The run compared with, empty for none. */
  other = "";
  mode: Mode = "beside";
  metric = "";
  /** Whether somebody asked for the metric, by a choice or a link. */
  asked = true;
  reduce: Reducer = "extreme";
  /** Empty for training. */
  phase = "";
  /** The steps in view, null for all. */
  range: Range | null = null;
  /** null follows the last step. */
  step: number | null = null;
  /** The step of an issue that is to be looked at, until it is known when it was read; null for none. */
  landing: number | null = null;
  /** Whether the step of this run was chosen, by a link or by what the verdict is about. */
  placed = false;
  pins: readonly string[] = [];
  /** Rows, folds and colours of the maps. */
  depth: DepthState = ALL_ROWS;
  runs: readonly RunSummary[] = [];
  meta: RunMeta | null = null;
  catalog: readonly CatalogEntry[] = [];
  annotations: readonly Annotation[] = [];

  constructor(private readonly mostPins: number) {}

  restore(wanted: UrlState): void {
    [this.run, this.metric, this.step, this.pins] = [
      wanted.run ?? "",
      wanted.metric ?? "",
      wanted.step ?? null,
      wanted.pins ?? [],
    ];
    [this.other, this.mode, this.range] = [wanted.other ?? "", wanted.mode ?? "beside", wanted.zoom ?? null];
    [this.reduce, this.phase] = [wanted.reduce ?? "extreme", wanted.phase ?? ""];
    this.placed = wanted.step !== undefined;
    this.depth = {
      ...ALL_ROWS,
      fold: wanted.fold ?? ALL_ROWS.fold,
      rows: wanted.rows ?? null,
      colour: wanted.colour ?? "auto",
    };
  }

  /** What belongs into the address. */
  get state(): UrlState {
    const { run, metric, other, mode, pins, reduce, phase, range, step } = this;
    const { fold, rows, colour } = this.depth;
    const map = { fold, colour, ...(rows === null ? {} : { rows }) };
    return {
      run,
      metric,
      other,
      mode,
      pins,
      reduce,
      phase,
      ...map,
      ...(range === null ? {} : { zoom: range }),
      ...(step === null ? {} : { step }),
    };
  }

  /** Another run, seen as a whole. */
  openRun(run: string): void {
    [this.run, this.range, this.step, this.pins, this.phase] = [run, null, null, [], ""];
    if (this.other === run) this.other = "";
    [this.meta, this.asked, this.placed, this.missing, this.landing] = [null, false, false, "", null];
    this.depth = { ...ALL_ROWS, tall: this.depth.tall };
  }

  pinIssue(issue: Issue, most: number): void {
    const concerned = issue.layers.slice(0, most);
    this.pins = [...new Set([...concerned, ...this.pins])].filter((pin) => pin !== "").slice(0, this.mostPins);
    this.land(issue.step);
    if (this.range !== null && (issue.step < this.range[0] || issue.step > this.range[1])) this.range = null;
  }

  land(step: number): void {
    this.step = this.landing = step;
  }

  togglePin(site: string): void {
    this.pins = this.pins.includes(site)
      ? this.pins.filter((pin) => pin !== site)
      : [...this.pins, site].slice(-this.mostPins);
  }

  zoom(range: Range | null): void {
    this.range =
      range === null || range[1] - range[0] < 2 ? null : [Math.max(0, Math.floor(range[0])), Math.ceil(range[1])];
  }

  setPhase(word: string): void {
    this.phase = word === this.meta?.phases[0] ? "" : word;
    if (this.spec(this.metric) === undefined) this.metric = firstMetric(this.held, this.metric);
  }

  /** What the run holds in the chosen phase. */
  get held(): readonly RunMetric[] {
    return (this.meta?.metrics ?? []).filter((metric) => this.inPhase(metric));
  }

  inPhase({ phases }: RunMetric): boolean {
    return this.phase === "" || phases.includes(this.phase);
  }

  spec(metric: string): RunMetric | undefined {
    return this.held.find(({ name }) => name === metric);
  }

  catalogued(metric: string): CatalogEntry | undefined {
    return this.catalog.find(({ name }) => name === metric);
  }

  otherRun(run: string): RunSummary | undefined {
    return this.other === run ? undefined : this.runs.find((item) => item.run === this.other);
  }

  /** All steps there are, the end of the last one included. */
  get whole(): Range {
    const shown = [this.meta, this.otherRun(this.run)];
    const first = Math.min(...shown.map((run) => run?.first ?? Infinity));
    const last = Math.max(...shown.map((run) => run?.last ?? 0)) + 1;
    return Number.isFinite(first) ? [first, Math.max(last, first + 1)] : [0, 1];
  }

  /** The steps on every axis. */
  get extent(): Range {
    return this.range ?? this.whole;
  }

  /** The step that every view shows: the one chosen, or where that is not in view, the nearest that is. */
  get currentStep(): number {
    const step = this.chosenStep;
    return this.range === null ? step : Math.max(this.range[0], Math.min(this.range[1] - 1, step));
  }

  get chosenStep(): number {
    return this.step ?? this.meta?.last ?? 0;
  }

  /** Another step, null for the last; returns the steps in view, moved where they do not hold it. */
  moveTo(wanted: number | null): Range | null {
    [this.step, this.landing] = [wanted, null];
    if (this.range === null) return null;
    const [step, [first, end]] = [this.chosenStep, this.range];
    const by = Math.min(0, step - first) + Math.max(0, step + 1 - end);
    return by === 0 ? this.range : [first + by, end + by];
  }
}
