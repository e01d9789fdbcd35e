// The chosen runs side by side: small charts on the same axes, each with a chosen run behind it or as the difference to it.
import type { RunMetric } from "../api";
import { el, keepChildren, setOptions, setText, svg } from "../dom";
import { formatStep, threeDigits } from "../model/format";
import { against, axesOf, pathOf, type Axes, type Multiple } from "../model/multiples";
import { columnAt } from "../model/series";
import { runLabel } from "../model/labels";

export interface MultiplesEvents {
  /** Another metric is to be loaded. */
  load(): void;
  open(run: string): void;
}

const [WIDTH, HEIGHT] = [260, 92];

export class Multiples {
  readonly #metrics = el("select", { attrs: { "aria-label": "Metric to compare", "data-part": "multiples-metric" } });
  readonly #references = el("select", { attrs: { "aria-label": "Run to compare with", "data-part": "reference" } });
  readonly #difference = el("button", {
    class: "btn toggle",
    text: "difference",
    title: "Show each run relative to the reference run",
    attrs: { type: "button", "aria-pressed": "false", "data-part": "multiples-difference" },
  });
  readonly #note = el("span", { class: "note", attrs: { "data-part": "multiples-note" } });
  readonly #charts = el("div", { class: "multiples" });
  readonly root = el(
    "section",
    { class: "card", attrs: { "aria-label": "Chosen runs", "data-part": "multiples" } },
    el(
      "div",
      { class: "bar" },
      el("h2", { text: "Chosen runs" }),
      this.#metrics,
      el("label", {}, "against", this.#references),
      this.#difference,
      this.#note,
    ),
    this.#charts,
  );
  #shown: readonly Multiple[] = [];
  #spec: RunMetric | null = null;
  #axes: Axes = { steps: [0, 1], low: 0, high: 1 };
  #drawn: readonly Multiple[] = [];

  constructor(private readonly events: MultiplesEvents) {
    this.root.hidden = true;
    this.#metrics.addEventListener("change", () => events.load());
    this.#references.addEventListener("change", () => this.#draw());
    this.#difference.addEventListener("click", () => {
      this.#difference.setAttribute("aria-pressed", String(!this.#isDifference));
      this.#draw();
    });
    this.#charts.addEventListener("pointermove", (event) => {
      const box = (event.target as Element).closest("svg")?.getBoundingClientRect();
      if (box !== undefined) this.#point((event.clientX - box.left) / box.width);
    });
    this.#charts.addEventListener("pointerleave", () => this.#point(null));
  }

  get metric(): string {
    return this.#metrics.value;
  }

  /** Offers what any of the chosen runs holds. */
  offer(metrics: readonly RunMetric[]): void {
    const chosen =
      metrics.find(({ name }) => name === this.metric) ?? metrics.find(({ name }) => name === "loss") ?? metrics[0];
    setOptions(
      this.#metrics,
      metrics.map(({ name, title }) => ({ value: name, label: title })),
      chosen?.name ?? "",
    );
  }

  show(runs: readonly string[], spec: RunMetric | null, multiples: readonly Multiple[]): void {
    this.root.hidden = runs.length === 0;
    [this.#shown, this.#spec] = [multiples, spec];
    const before = this.#references.value;
    setOptions(
      this.#references,
      [{ value: "", label: "none" }, ...runs.map((run) => ({ value: run, label: runLabel(run) }))],
      runs.includes(before) ? before : "",
    );
    this.#draw();
  }

  get #isDifference(): boolean {
    return this.#difference.getAttribute("aria-pressed") === "true";
  }

  #draw(): void {
    const ratio = this.#spec?.scale === "log";
    const reference = this.#shown.find(({ run }) => run === this.#references.value) ?? null;
    const apart = reference !== null && this.#isDifference;
    this.#difference.disabled = reference === null;
    this.#drawn = apart ? this.#shown.map((item) => against(item, reference, ratio)) : this.#shown;
    this.#axes = axesOf(this.#drawn, ratio);
    const what = apart
      ? ratio
        ? `ratio to ${runLabel(reference.run)}`
        : `difference to ${runLabel(reference.run)}`
      : "same axes in every chart";
    setText(
      this.#note,
      this.#shown.length === 0
        ? "none of these runs has this metric"
        : `${what}; steps ${formatStep(this.#axes.steps[0])} to ${formatStep(this.#axes.steps[1])}, ${threeDigits(this.#axes.low)} to ${threeDigits(this.#axes.high)}`,
    );
    const behind = reference === null || apart ? "" : pathOf(reference, this.#axes, ratio, WIDTH, HEIGHT);
    const level = apart
      ? pathOf(
          { run: "", steps: [...this.#axes.steps], values: ratio ? [1, 1] : [0, 0] },
          this.#axes,
          ratio,
          WIDTH,
          HEIGHT,
        )
      : "";
    keepChildren(
      this.#charts,
      this.#drawn,
      ({ run }) => run,
      ({ run }) => this.#chart(run),
      (chart, item) => {
        const [first, second] = chart.querySelectorAll("path");
        first?.setAttribute("d", behind || level);
        second?.setAttribute("d", pathOf(item, this.#axes, ratio, WIDTH, HEIGHT));
      },
    );
    this.#point(null);
  }

  #chart(run: string): HTMLElement {
    const name = el("button", { class: "link", text: runLabel(run), title: run, attrs: { type: "button" } });
    name.addEventListener("click", () => this.events.open(run));
    const picture = svg(
      "svg",
      {
        viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": `${runLabel(run)} over the steps`,
      },
      svg("path", { class: "behind" }),
      svg("path", {}),
      svg("line", { y1: 0, y2: HEIGHT, x1: -9, x2: -9 }),
    );
    return el("div", { class: "multiple" }, el("div", { class: "top" }, name, el("output")), picture);
  }

  /** Shows every run's value at one step, the last where none is pointed at. */
  #point(share: number | null): void {
    const [first, last] = this.#axes.steps;
    const step = share === null ? last : first + share * (last - first);
    this.#drawn.forEach(({ steps, values }, i) => {
      const chart = this.#charts.children[i];
      const column = columnAt(Float64Array.from(steps), step);
      const place =
        share === null ? values.reduce<number>((found, value, i) => (value === null ? found : i), -1) : column;
      const known = values[place] ?? null;
      const at = ` at step ${formatStep(steps[place] ?? step)}`;
      const output = chart?.querySelector("output");
      if (output) setText(output, `${known === null ? "\u2013" : threeDigits(known)}${at}`);
      const x = share === null ? -9 : share * WIDTH;
      for (const end of ["x1", "x2"]) chart?.querySelector("line")?.setAttribute(end, String(x));
    });
  }
}
