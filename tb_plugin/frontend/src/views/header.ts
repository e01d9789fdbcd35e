// Which run, what it is, at which step, and whether the page follows it.
import type { RunMeta, RunState, RunSummary } from "../api";
import { runLabel } from "../model/labels";
import { el, setOptions, setText } from "../dom";
import { formatCount, formatDuration, formatStep, formatTime } from "../model/format";

export interface HeaderEvents {
  run(name: string): void;
  /** An empty name ends the comparison. */
  compare(name: string): void;
  /** null follows the last step. */
  step(step: number | null): void;
  live(on: boolean): void;
  /** The table of all runs. */
  overview(): void;
  /** An empty word stands for training. */
  phase(word: string): void;
}

const MANY_RUNS = 6;
const STATES: Readonly<Record<RunState, readonly [string, string]>> = {
  running: ["Live", "The run is in progress"],
  closed: ["Finished", "The run was closed after its last step"],
  silent: [
    "Not closed",
    "Nothing was written for longer than usual, and the run was not closed: its process may have ended",
  ],
};

export class Header {
  readonly #runs = el("select", { class: "run", attrs: { "aria-label": "Run", "data-part": "run" } });
  readonly #others = el("select", { attrs: { "aria-label": "Compare with", "data-part": "compare" } });
  readonly #filter = el("input", {
    class: "filter",
    attrs: { type: "search", placeholder: "filter runs", "aria-label": "Filter runs" },
  });
  readonly #phases = el("select", { attrs: { "aria-label": "Phase", "data-part": "phase" } });
  readonly #phaseBox = el("label", {}, "Phase", this.#phases);
  readonly #facts = el("div", { class: "facts" });
  readonly #slider = el("input", { attrs: { type: "range", step: "1", "aria-label": "Step" } });
  readonly #output = el("output", { attrs: { "data-part": "step" } });
  readonly #state = el("span", { text: "Live" });
  readonly #live = el(
    "button",
    { class: "btn live", attrs: { type: "button", "data-part": "live" } },
    el("i"),
    this.#state,
  );
  readonly #all = el("button", {
    class: "btn",
    text: "\u2630 All runs",
    attrs: { type: "button", "data-part": "all-runs" },
  });
  readonly root = el(
    "header",
    {},
    this.#all,
    el("label", {}, "Run", this.#runs),
    this.#filter,
    el("label", {}, "Compare", this.#others),
    this.#phaseBox,
    this.#facts,
    el("div", { class: "stepper" }, "Step", this.#arrow(-1), this.#slider, this.#arrow(1), this.#output),
    this.#live,
  );
  #steps: readonly [number, number] = [0, 0];
  #offered: readonly [readonly RunSummary[], string, string] = [[], "", ""];

  constructor(
    private readonly events: HeaderEvents,
    live: boolean,
  ) {
    this.#runs.addEventListener("change", () => events.run(this.#runs.value));
    this.#slider.addEventListener("input", () => this.#move(Number(this.#slider.value)));
    this.#others.addEventListener("change", () => events.compare(this.#others.value));
    this.#phases.addEventListener("change", () => events.phase(this.#phases.value));
    this.#filter.addEventListener("input", () => this.showRuns(...this.#offered));
    this.#all.hidden = true;
    this.#all.addEventListener("click", () => events.overview());
    this.#filter.hidden = this.#phaseBox.hidden = true;
    this.#live.setAttribute("aria-pressed", String(live));
    this.#live.addEventListener("click", () => {
      const on = this.#live.getAttribute("aria-pressed") !== "true";
      this.#live.setAttribute("aria-pressed", String(on));
      events.live(on);
    });
  }

  /** Offers the runs whose name holds the filter's text, and those chosen whatever their name. */
  showRuns(runs: readonly RunSummary[], chosen: string, other: string): void {
    this.#offered = [runs, chosen, other];
    this.#filter.hidden = runs.length < MANY_RUNS;
    this.#all.hidden = runs.length < 2;
    const text = this.#filter.value.trim().toLowerCase();
    const found = runs.filter(({ run }) => run === chosen || run === other || run.toLowerCase().includes(text));
    const options = found.map(({ run }) => ({ value: run, label: runLabel(run) }));
    setOptions(this.#runs, options, chosen);
    setOptions(
      this.#others,
      [{ value: "", label: "with \u2026" }, ...options.filter(({ value }) => value !== chosen)],
      other,
    );
    this.#others.disabled = runs.length < 2;
    this.#showState(runs.find(({ run }) => run === chosen)?.state ?? "running");
  }

  #showState(state: RunState): void {
    this.#live.dataset["state"] = state;
    setText(this.#state, STATES[state][0]);
    this.#live.title = `${STATES[state][1]}. When pressed, this page loads new steps every few seconds while it is visible`;
  }

  showMeta(meta: RunMeta, phase: string): void {
    this.#phaseBox.hidden = meta.phases.length < 2;
    setOptions(
      this.#phases,
      meta.phases.map((word) => ({ value: word, label: word })),
      phase || (meta.phases[0] ?? ""),
    );
    const session = meta.sessions.at(-1);
    const facts: string[] = [];
    if (session?.model) facts.push(session.model);
    if (session?.parameters) facts.push(`${formatCount(session.parameters)} parameters`);
    if (session?.world_size !== undefined && session.world_size > 1) facts.push(`${session.world_size} processes`);
    if (meta.last !== null) facts.push(`${formatStep(meta.last)} ${meta.last === 1 ? "step" : "steps"}`);
    if (meta.started !== null) facts.push(formatDuration(meta.updated - meta.started));
    if (meta.sessions.length > 1) facts.push(`${meta.sessions.length} sessions`);
    if (meta.too_new > 0) facts.push("written by a newer gradflow-export: update it");
    setText(this.#facts, facts.join("  \u00b7  "));
    const started = meta.started === null ? [] : [`started ${formatTime(meta.started)}`];
    this.#facts.title = [...facts, ...started].join("\n");
    this.#steps = [meta.first ?? 0, meta.last ?? 0];
    this.#slider.min = String(this.#steps[0]);
    this.#slider.max = String(this.#steps[1]);
  }

  showStep(step: number): void {
    this.#slider.value = String(step);
    setText(this.#output, formatStep(step));
  }

  #move(step: number): void {
    const [first, last] = this.#steps;
    this.events.step(step >= last ? null : Math.max(first, step));
  }

  #arrow(by: 1 | -1): HTMLButtonElement {
    const button = el("button", {
      class: "btn icon",
      text: by < 0 ? "\u2039" : "\u203a",
      attrs: { type: "button", "aria-label": by < 0 ? "Previous step" : "Next step" },
    });
    button.addEventListener("click", () => this.#move(Number(this.#slider.value) + by));
    return button;
  }
}
