// What a metric is: unit, formula, source, thresholds, all from the catalogue.
import { el } from "../dom";
import { formatNumber } from "../model/format";
import type { MetricSpec } from "../schema";

export class MetricInfo {
  readonly root = el("dialog", {
    class: "card info",
    attrs: { "data-part": "info", "aria-label": "About this metric" },
  });

  constructor() {
    this.root.addEventListener("click", (event) => {
      if (event.target === this.root) this.root.close();
    });
  }

  /** A button that opens the pop-up about the metric shown at that moment. */
  button(spec: () => MetricSpec | null): HTMLButtonElement {
    const button = el("button", {
      class: "btn icon what",
      text: "?",
      title: "What is this?",
      attrs: { type: "button", "aria-label": "About this metric" },
    });
    button.addEventListener("click", () => {
      const shown = spec();
      if (shown !== null) this.#show(shown);
    });
    return button;
  }

  #show(spec: MetricSpec): void {
    const facts: readonly (readonly [string, string])[] = [
      ["good is", goodLooks(spec)],
      ["unit", spec.unit === "1" ? "1 (a plain number)" : spec.unit],
      ["formula", spec.formula],
      ["range", range(spec)],
      ["thresholds", spec.marks.length === 0 ? "none" : spec.marks.map((mark) => formatNumber(mark)).join(" and ")],
      ["source", spec.source],
      ["cost", spec.cost],
      ["drawn", spec.scale === "log" ? "on a logarithmic scale" : "on a linear scale"],
    ];
    const close = el("button", { class: "btn", text: "Close", attrs: { type: "button" } });
    close.addEventListener("click", () => this.root.close());
    const list = el("dl", {}, ...facts.flatMap(([term, text]) => [el("dt", { text: term }), el("dd", { text })]));
    this.root.replaceChildren(el("h2", { text: spec.title }), el("p", { class: "mono", text: spec.name }), list, close);
    this.root.showModal();
  }
}

/** What a healthy reading looks like, as far as the thresholds of the catalogue say it. */
function goodLooks({ marks, scale, unit, kind }: MetricSpec): string {
  const [low, high] = marks;
  if (low !== undefined && high !== undefined)
    return `between ${formatNumber(low)} and ${formatNumber(high)}${scale === "log" && low < 1 && high > 1 ? "; 1 leaves the signal unchanged, values below damp it, values above amplify it" : ""}`;
  if (low !== undefined && unit === "share" && low > 0.5) return `well below ${formatNumber(100 * low)} %`;
  if (low !== undefined) return `the order of ${formatNumber(low)}`;
  return kind === "run"
    ? "no threshold: look at the trend, and for sudden changes"
    : "no threshold: look for layers that differ from their neighbors, and for changes over time";
}

function range({ low, high }: MetricSpec): string {
  if (low === null && high === null) return "any number";
  if (high === null) return `at least ${formatNumber(low ?? 0)}`;
  return low === null ? `at most ${formatNumber(high)}` : `${formatNumber(low)} to ${formatNumber(high)}`;
}
