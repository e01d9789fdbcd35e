// All runs as one table: which is sick, how the loss went, and with which hyperparameters.
import { el, keepChildren, setText, svg } from "../dom";
import { csv, fileName } from "../model/export";
import { formatCount, formatNumber, formatStep, threeDigits } from "../model/format";
import { sparkline, toNumber } from "../model/health";
import {
  arrangeRuns,
  columnsOf,
  PARAMETER,
  problemsOf,
  valueIn,
  type Overview,
  type OverviewColumn,
  type OverviewRun,
} from "../model/overview";
import { sentence } from "../model/verdict";
import { downloadMenu } from "./download";
import { runLabel } from "../model/labels";
import { RowWindow } from "./window";

export interface OverviewEvents {
  open(run: string): void;
  /** Other runs are to be compared. */
  chosen(runs: readonly string[]): void;
}

const [SPARK_WIDTH, SPARK_HEIGHT, LINE] = [110, 22, 32];
const MEANT: Readonly<Record<string, string>> = {
  first: "Median of the first five finite losses",
  last: "Median of the last five finite losses; NaN or Inf if the last one is",
};

export class OverviewTable {
  readonly #filter = el("input", {
    class: "filter",
    attrs: { type: "search", placeholder: "filter: name, verdict, lr=0.1", "aria-label": "Filter the table of runs" },
  });
  readonly #note = el("span", { class: "note", attrs: { "data-part": "runs-note" } });
  readonly #heads = el("tr");
  readonly #body = el("tbody");
  readonly #table = el("table", {}, el("thead", {}, this.#heads), this.#body);
  readonly #scroll = el(
    "div",
    { class: "scroll", attrs: { tabindex: "0", role: "region", "aria-label": "Table of the runs" } },
    this.#table,
  );
  readonly root = el(
    "section",
    { class: "card runs", attrs: { "aria-label": "All runs", "data-part": "runs" } },
    el(
      "div",
      { class: "bar" },
      el("h1", { text: "All runs" }),
      this.#filter,
      this.#note,
      downloadMenu("all runs", { csv: () => csv(this.#cells), name: () => fileName("runs") }),
    ),
    this.#scroll,
  );
  readonly #window = new RowWindow<OverviewRun>(
    this.#scroll,
    this.#body,
    LINE,
    () => Math.max(320, window.innerHeight - 190),
    {
      key: (run) =>
        `${run.run}\n${runLabel(run.run)}\n${run.version}\n${run.state}\n${run.pending ?? ""}\n${this.#columns.map(({ key }) => key).join("\n")}`,
      make: (run) => this.#row(run),
      update: (row, { run }) => {
        const box = row.querySelector("input");
        if (box !== null) box.checked = this.#chosen.includes(run);
      },
    },
  );
  #overview: Overview = { total: 0, runs: [] };
  #columns: readonly OverviewColumn[] = [];
  #shown: readonly OverviewRun[] = [];
  #chosen: readonly string[] = [];
  #sort = "verdict";
  #falling = true;

  constructor(private readonly events: OverviewEvents) {
    this.#filter.addEventListener("input", () => this.#draw());
  }

  show(overview: Overview, chosen: readonly string[]): void {
    [this.#overview, this.#chosen, this.#columns] = [overview, chosen, columnsOf(overview.runs)];
    this.#table.style.setProperty("--n", String(this.#columns.filter(({ key }) => key.startsWith(PARAMETER)).length));
    this.#draw();
  }

  get #cells(): readonly (readonly (string | number | null)[])[] {
    const columns = this.#columns.filter(({ key }) => key !== "trend");
    const word = (run: OverviewRun, key: string): string | number | null =>
      key === "verdict" ? (run.verdict?.issue_type ?? run.said?.headline ?? null) : valueIn(run, key);
    return [columns.map(({ title }) => title), ...this.#shown.map((run) => columns.map(({ key }) => word(run, key)))];
  }

  #draw(): void {
    const { runs, total } = this.#overview;
    this.#shown = arrangeRuns(runs, this.#sort, this.#falling, this.#filter.value);
    const damaged = runs.reduce((sum, run) => sum + (run.damaged ?? 0), 0);
    const parts = [
      this.#shown.length < runs.length
        ? `${formatStep(this.#shown.length)} of ${formatStep(runs.length)} runs`
        : `${formatStep(runs.length)} runs`,
    ];
    if (total > runs.length) parts.push(`the most recent of ${formatStep(total)}`);
    if (this.#overview.pending) parts.push(`reading ${formatStep(this.#overview.pending)} of them`);
    if (damaged > 0) parts.push(`${formatStep(damaged)} damaged records skipped`);
    setText(this.#note, parts.join("; "));
    this.#drawHeads();
    this.#window.show(this.#shown);
  }

  #drawHeads(): void {
    keepChildren(
      this.#heads,
      [{ key: "", title: "compare", numeric: false }, ...this.#columns],
      ({ key }) => key,
      ({ key, title, numeric }) => {
        const cell = el("th", { class: numeric ? "num" : "", attrs: { scope: "col", "data-key": key } });
        if (key === "") cell.append(el("span", { text: title }));
        else {
          const button = el("button", { text: title, title: MEANT[key] ?? "", attrs: { type: "button" } });
          button.addEventListener("click", () => {
            this.#falling = key === this.#sort ? !this.#falling : key === "steps" || key === "verdict";
            this.#sort = key;
            this.#draw();
          });
          cell.append(button);
        }
        return cell;
      },
      (head, { key }) => {
        if (key !== "")
          head.setAttribute("aria-sort", key === this.#sort ? (this.#falling ? "descending" : "ascending") : "none");
      },
    );
  }

  #row(run: OverviewRun): HTMLTableRowElement {
    const name = runLabel(run.run);
    const box = el("input", { attrs: { type: "checkbox", "aria-label": `Compare ${name}` } });
    box.addEventListener("change", () => {
      this.#chosen = box.checked ? [...this.#chosen, run.run] : this.#chosen.filter((item) => item !== run.run);
      this.events.chosen(this.#chosen);
    });
    return el(
      "tr",
      {},
      el("td", {}, el("label", { class: "tick" }, box)),
      ...this.#columns.map((column) => this.#cell(run, column, name)),
    );
  }

  #cell(run: OverviewRun, { key, numeric }: OverviewColumn, name: string): HTMLElement {
    const cell = el(key === "run" ? "th" : "td", {
      class: numeric ? "num" : "",
      ...(key === "run" ? { attrs: { scope: "row" } } : {}),
    });
    if (key === "run") {
      const facts = [run.run, run.model ?? "", run.parameters ? `${formatCount(run.parameters)} parameters` : ""]
        .filter(Boolean)
        .join("\n");
      const button = el("button", { class: "link", text: name, title: facts, attrs: { type: "button" } });
      button.addEventListener("click", () => this.events.open(run.run));
      cell.append(button);
    } else if (key === "verdict") {
      const count = problemsOf(run);
      cell.append(
        run.pending
          ? el("span", { class: "more", text: "\u2026", title: "not read yet" })
          : run.verdict === null
            ? soundness(run)
            : el("span", {
                class: `badge sev-${run.verdict.severity}`,
                text: run.verdict.issue_type,
                title: `${run.verdict.severity} since step ${formatStep(run.verdict.step)}`,
              }),
      );
      if (count > 1)
        cell.append(
          el("span", { class: "more", text: ` +${formatStep(count - 1)}`, title: `${formatStep(count)} problems` }),
        );
    } else if (key === "trend") {
      const path = svg("path", { d: trendOf(run) });
      cell.append(
        svg("svg", { width: SPARK_WIDTH, height: SPARK_HEIGHT, role: "img", "aria-label": "loss over the run" }, path),
      );
    } else {
      const value = valueIn(run, key);
      const text =
        value === null
          ? "\u2013"
          : typeof value === "number"
            ? numberText(key, value)
            : key === "layer" && value === ""
              ? "whole model"
              : value;
      setText(cell, text);
      cell.title = value === null ? "" : String(value);
      if (key === "layer") cell.classList.add("mono");
      if (typeof value === "number" && !Number.isFinite(value)) cell.classList.add("broken");
    }
    return cell;
  }
}

const SHOWN = { good: "ok", warn: "off", bad: "off", none: "more" } as const;

/** What is said of a run without a problem. */
function soundness({ said }: OverviewRun): HTMLElement {
  const { tone, headline, detail } = said ?? { tone: "none", headline: "", detail: "" };
  return el("span", { class: SHOWN[tone], text: sentence(headline), title: sentence(detail) });
}

/** A setting as it was written, a measurement in three digits. */
function numberText(key: string, value: number): string {
  return key === "steps" ? formatStep(value) : key.startsWith(PARAMETER) ? formatNumber(value) : threeDigits(value);
}

function trendOf({ trend }: OverviewRun): string {
  let [path, open] = ["", false];
  for (const point of sparkline(
    trend.map(([, value]) => toNumber(value)),
    false,
    SPARK_WIDTH,
    SPARK_HEIGHT,
  )) {
    if (point !== null) path += `${open ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    open = point !== null;
  }
  return path;
}
