// Every metric by topic, with plain names: one field finds it by name, formula or what it is read of.
import type { CatalogEntry, RunMetric } from "../api";
import { el } from "../dom";
import { findMetrics } from "../model/offer";

export class MetricSearch {
  readonly #field = el("input", {
    class: "filter",
    attrs: { type: "search", placeholder: "search: rank, dead, update ...", "aria-label": "Search metrics" },
  });
  readonly #list = el("div", { class: "found", attrs: { "data-part": "found" } });
  readonly root = el("dialog", {
    class: "card info search",
    attrs: { "data-part": "search", "aria-label": "Choose a metric" },
  });
  #held: readonly RunMetric[] = [];
  #catalog: readonly CatalogEntry[] = [];

  constructor(private readonly chosen: (name: string) => void) {
    const close = el("button", { class: "btn", text: "Close", attrs: { type: "button" } });
    close.addEventListener("click", () => this.root.close());
    this.root.append(
      el("div", { class: "bar" }, el("h2", { text: "Metric on the map" }), this.#field, close),
      this.#list,
    );
    this.#field.addEventListener("input", () => this.#draw());
    this.#field.addEventListener("keydown", (event) => {
      if (event.key !== "Enter") return;
      event.preventDefault();
      this.#list.querySelector("button")?.click();
    });
    this.root.addEventListener("click", (event) => {
      if (event.target === this.root) this.root.close();
    });
  }

  offer(held: readonly RunMetric[], catalog: readonly CatalogEntry[]): void {
    [this.#held, this.#catalog] = [held, catalog];
  }

  open(): void {
    this.#field.value = "";
    this.#draw();
    this.root.showModal();
    this.#field.focus();
  }

  #draw(): void {
    const topics = findMetrics(this.#held, this.#catalog, this.#field.value);
    const parts = topics.map(({ topic, metrics }) => {
      const items = metrics.map(({ metric, held }) => {
        const button = el(
          "button",
          { class: held ? "" : "absent", attrs: { type: "button", "data-name": metric.name } },
          el("b", { text: held ? metric.title : `${metric.title} (not in this run)` }),
          el("span", { class: "mono", text: metric.name }),
          el("span", { class: "mono formula", text: metric.formula }),
        );
        button.addEventListener("click", () => {
          this.root.close();
          this.chosen(metric.name);
        });
        return el("li", {}, button);
      });
      return el("section", {}, el("h3", { text: topic }), el("ul", {}, ...items));
    });
    this.#list.replaceChildren(...(parts.length === 0 ? [el("p", { text: "No metric with this name." })] : parts));
  }
}
