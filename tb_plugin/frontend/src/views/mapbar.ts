// What can be chosen above the map.
import type { RunMetric } from "../api";
import { el, setOptions, setText, type Option } from "../dom";
import { formatStep } from "../model/format";
import { REDUCERS, type Mode, type Reducer } from "../model/url";
import type { MetricSpec } from "../schema";
import { downloadMenu, type Download } from "./download";
import type { MetricInfo } from "./info";

export interface MapBarEvents {
  metric(name: string): void;
  search(): void;
  mode(mode: Mode): void;
  reduce(reducer: Reducer): void;
  level(level: number): void;
  tall(tall: boolean): void;
  allSteps(): void;
  allRows(): void;
  spec(): MetricSpec | null;
}

export class MapBar {
  readonly #metrics = el("select", { attrs: { "aria-label": "Metric on the map", "data-part": "metric" } });
  readonly #modes = el("select", { attrs: { "aria-label": "How to compare", "data-part": "mode" } });
  readonly #reducers = el("select", {
    title: "Value shown for a column of several steps",
    attrs: { "aria-label": "Value shown for a column of several steps", "data-part": "reduce" },
  });
  readonly #levels = el("select", {
    title: "Number of rows to fold the layers to",
    attrs: { "aria-label": "Fold the layers", "data-part": "fold" },
  });
  readonly #tall = el("button", {
    class: "btn toggle",
    text: "Tall",
    title: "Use the full window height",
    attrs: { type: "button", "data-part": "tall" },
  });
  readonly #formula = el("span", { class: "formula mono" });
  /** What the map leaves out; it stands below the map, where its length moves nothing. */
  readonly noteRoot = el("span", { class: "note", attrs: { "data-part": "note" } });
  readonly #allSteps = el("button", {
    class: "btn toggle",
    text: "Show all steps",
    attrs: { type: "button", "data-part": "reset" },
  });
  readonly #allRows = el("button", {
    class: "btn toggle",
    text: "Show all rows",
    attrs: { type: "button", "data-part": "reset-rows" },
  });
  readonly #title = el("h2", { text: "Layer map" });
  readonly root: HTMLElement;

  constructor(events: MapBarEvents, info: MetricInfo, download: Download, second: boolean) {
    this.#allSteps.hidden = this.#allRows.hidden = this.#modes.hidden = this.#levels.hidden = this.#tall.hidden = true;
    this.#allSteps.addEventListener("click", () => events.allSteps());
    this.#allRows.addEventListener("click", () => events.allRows());
    this.#metrics.addEventListener("change", () => events.metric(this.#metrics.value));
    this.#modes.addEventListener("change", () =>
      events.mode(this.#modes.value === "difference" ? "difference" : "beside"),
    );
    setOptions(
      this.#reducers,
      REDUCERS.map((word) => ({ value: word, label: word })),
      "extreme",
    );
    this.#reducers.addEventListener("change", () =>
      events.reduce(REDUCERS.find((word) => word === this.#reducers.value) ?? "extreme"),
    );
    this.#levels.addEventListener("change", () => events.level(Number(this.#levels.value)));
    this.#tall.addEventListener("click", () => events.tall(this.#tall.getAttribute("aria-pressed") !== "true"));
    const search = el("button", {
      class: "btn icon what",
      text: "\u2315",
      title: "Search metrics by topic",
      attrs: { type: "button", "aria-label": "Search metrics", "data-part": "search-metric" },
    });
    search.addEventListener("click", () => events.search());
    const own = second ? [] : [this.#metrics, search, info.button(() => events.spec()), this.#modes];
    const rest = second ? [] : [this.#reducers, this.#levels, this.#tall];
    this.root = el(
      "div",
      { class: "bar" },
      this.#title,
      ...own,
      this.#formula,
      this.#allSteps,
      this.#allRows,
      ...rest,
      downloadMenu("the map", download),
    );
  }

  offer(options: readonly Option[], chosen: string): void {
    setOptions(this.#metrics, options, chosen);
  }

  showReducer(reducer: Reducer): void {
    this.#reducers.value = reducer;
  }

  showMode(mode: Mode | null): void {
    this.#modes.hidden = mode === null;
    setOptions(
      this.#modes,
      [
        { value: "beside", label: "side by side" },
        { value: "difference", label: "difference" },
      ],
      mode ?? "beside",
    );
  }

  showZoom(zoomed: boolean): void {
    this.#allSteps.hidden = !zoomed;
  }

  /** Offers the levels to fold to, and the way back to all rows. */
  showRows(
    levels: readonly { readonly level: number; readonly rows: number }[],
    level: number,
    sites: number,
    zoomed: boolean,
    tall: boolean,
  ): void {
    this.#levels.hidden = levels.length === 0;
    const all = { value: "0", label: `all ${formatStep(sites)} rows` };
    setOptions(
      this.#levels,
      [all, ...levels.map((item) => ({ value: String(item.level), label: `folded to ${formatStep(item.rows)}` }))],
      String(level),
    );
    this.#allRows.hidden = !zoomed;
    this.#tall.hidden = sites < 20;
    this.#tall.setAttribute("aria-pressed", String(tall));
  }

  show(title: string, spec: RunMetric): void {
    setText(this.#title, title);
    setText(this.#formula, spec.formula);
    this.#formula.title = `${spec.name}: ${spec.formula}\nunit ${spec.unit}; ${spec.source}`;
  }

  note(text: string): void {
    setText(this.noteRoot, text);
    this.noteRoot.title = text;
  }

  clear(title: string, message: string): void {
    setText(this.#title, title);
    setText(this.#formula, "");
    this.note(message);
    this.#levels.hidden = this.#allRows.hidden = this.#tall.hidden = true;
  }
}
