// Which: the health table. Every number in it is one that was written.
import type { RunMetric } from "../api";
import { el, keepChildren, setOptions, setText } from "../dom";
import { csv, fileName } from "../model/export";
import {
  arrange,
  columnsOf,
  groupsOf,
  readAt,
  rowsOf,
  stepsRead,
  verdictOf,
  type Column,
  type Group,
  type Moment,
  type Row,
  type SortKey,
} from "../model/health";
import { formatStep } from "../model/format";
import type { Series } from "../model/series";
import type { Issue } from "../model/verdict";
import { downloadMenu } from "./download";
import { TableRow, type Trend } from "./row";
import { RowWindow } from "./window";

export interface TableEvents {
  /** Another kind of rows was chosen. */
  kind(): void;
  pin(site: string, metric: string): void;
}

const [LINE, HEAD, TALLEST, MANY] = [27, 29, 460, 100];
const NAMED: readonly { readonly key: SortKey; readonly title: string }[] = [
  { key: "site", title: "layer" },
  { key: "verdict", title: "verdict" },
];

export class HealthTable {
  readonly #kinds = el("select", { attrs: { "aria-label": "Rows", "data-part": "rows" } });
  readonly #filter = el("input", {
    class: "filter",
    attrs: { type: "search", placeholder: "filter layers", "aria-label": "Filter layers" },
  });
  readonly #note = el("span", { class: "note", attrs: { "data-part": "table-note" } });
  readonly #download = downloadMenu("the table", {
    csv: () => csv(this.#shown),
    name: () => fileName(this.#run, "health", String(this.#read)),
  });
  readonly #heads = el("tr");
  readonly #body = el("tbody");
  readonly #table = el("table", {}, el("thead", {}, this.#heads), this.#body);
  readonly #scroll = el(
    "div",
    { class: "scroll", attrs: { tabindex: "0", role: "region", "aria-label": "Table of the layers" } },
    this.#table,
  );
  readonly root = el(
    "section",
    { class: "card health", attrs: { "aria-label": "Health of the layers", "data-part": "health" } },
    el("div", { class: "bar" }, el("h2", { text: "Health" }), this.#kinds, this.#filter, this.#note, this.#download),
    this.#scroll,
  );
  #moment: Moment | null = null;
  #trend: Trend | null = null;
  #issues: readonly Issue[] = [];
  #pins: readonly string[] = [];
  #rows: readonly Row[] = [];
  /** The rows in view, by the element they are. */
  readonly #lines = new WeakMap<Element, TableRow>();
  readonly #window = new RowWindow<Row>(this.#scroll, this.#body, LINE, () => TALLEST, {
    key: ({ site }) => site,
    make: ({ site }) => this.#row(site).root,
    update: (root, row) => this.#lines.get(root)?.show(row, this.#columns, this.#trend),
  });
  #sort: SortKey = "verdict";
  #falling = true;
  #run = "";
  #metrics: readonly RunMetric[] = [];
  #groups: readonly Group[] = [];
  #columns: readonly Column[] = [];
  /** The step of the numbers, and of those in columns that were read at another one, by key. */
  #read = 0;
  #others: ReadonlyMap<string, string> = new Map();

  constructor(private readonly events: TableEvents) {
    this.root.hidden = true;
    this.#kinds.addEventListener("change", () => events.kind());
    this.#filter.addEventListener("input", () => this.#draw());
  }

  /** The rows chosen, null when the run holds nothing of any layer. */
  get group(): Group | null {
    return this.#groups.find(({ key }) => key === this.#kinds.value) ?? null;
  }

  showMeta(run: string, held: readonly RunMetric[], issues: readonly Issue[]): void {
    [this.#issues, this.#run, this.#metrics, this.#groups] = [issues, run, held, groupsOf(held)];
    const chosen = this.group ?? this.#groups[0];
    setOptions(
      this.#kinds,
      this.#groups.map(({ key, label }) => ({ value: key, label })),
      chosen?.key ?? "",
    );
    this.root.hidden = chosen === undefined;
    const most = Math.max(0, ...(chosen?.metrics ?? []).map(({ sites }) => sites));
    this.#scroll.style.minHeight = `${Math.min(TALLEST, HEAD + most * LINE)}px`;
  }

  show(group: Group, moment: Moment): void {
    this.#moment = moment;
    const columns = columnsOf(group, this.#metrics);
    // The rows it opens on hold every accused layer; who chooses a kind means that kind.
    this.#rows = rowsOf(group, moment, this.#issues, columns, group.key === this.#groups[0]?.key);
    // A question that no row answers is not asked.
    this.#columns = columns.filter(({ key }) => this.#rows.some(({ cells }) => cells[key] !== null));
    this.#read = readAt(group, moment);
    this.#others = new Map(
      this.#columns.flatMap(({ key }): [string, string][] => {
        const steps = stepsRead(key, this.#rows, moment);
        const [first = 0, last = 0] = [steps[0], steps.at(-1)];
        if (first === this.#read && last === this.#read) return [];
        return [[key, first === last ? `step ${formatStep(last)}` : `steps ${formatStep(first)}, ${formatStep(last)}`]];
      }),
    );
    this.#draw();
  }

  /** Takes the course of the leading metric; it is drawn with the numbers that are shown next. */
  showTrend(series: Series, log: boolean): void {
    this.#trend = { series, log };
  }

  showPins(pins: readonly string[]): void {
    this.#pins = pins;
    for (const root of this.#body.children) {
      const line = this.#lines.get(root);
      line?.mark(pins.indexOf(line.site));
    }
  }

  /** Heads and rows as they stand. */
  get #shown(): readonly (readonly (string | number | null)[])[] {
    const rows = this.#arranged.map((row) => [
      row.site,
      verdictOf(row),
      ...this.#columns.map(({ key }) => row.cells[key]?.value ?? null),
    ]);
    return [[...NAMED, ...this.#columns].map(({ title }) => title), ...rows];
  }

  get #arranged(): readonly Row[] {
    return arrange(this.#rows, this.#sort, this.#falling, this.#filter.value);
  }

  #sortBy(key: SortKey): void {
    this.#falling = key === this.#sort ? !this.#falling : key !== "site";
    this.#sort = key;
    this.#draw();
  }

  #draw(): void {
    this.#drawHeads();
    const coarse =
      this.#moment?.coarse === undefined ? "" : `, extreme of up to ${formatStep(this.#moment.coarse)} steps`;
    const rows = this.#arranged;
    const some = rows.length === this.#rows.length ? "" : `${formatStep(rows.length)} of `;
    const count = this.#rows.length > MANY ? `${some}${formatStep(this.#rows.length)} rows, ` : "";
    setText(this.#note, this.#moment === null ? "" : `${count}${this.#when(this.#moment)}${coarse}`);
    this.#table.style.setProperty("--n", String(Math.max(1, this.#columns.length)));
    this.#window.show(rows);
  }

  /** Numbers are those of a reading, and readings are not made at every step. */
  #when({ step }: Moment): string {
    return this.#read === step
      ? `at step ${formatStep(step)}`
      : `read at step ${formatStep(this.#read)}, the last reading by step ${formatStep(step)}`;
  }

  #drawHeads(): void {
    const trend = { key: "", title: "trend" };
    keepChildren(
      this.#heads,
      [...NAMED, ...this.#columns, trend],
      ({ key }) => key,
      ({ key, title }) => {
        if (key === "") return el("th", { text: title, attrs: { scope: "col" } });
        const button = el(
          "button",
          { attrs: { type: "button" } },
          el("span", { text: title }),
          el("span", { class: "when" }),
        );
        button.addEventListener("click", () => this.#sortBy(key));
        return el("th", { attrs: { scope: "col", "data-key": key } }, button);
      },
      (head, { key }) => {
        if (key === "") return;
        head.setAttribute("aria-sort", key === this.#sort ? (this.#falling ? "descending" : "ascending") : "none");
        const when = head.querySelector(".when");
        if (when !== null) setText(when, this.#others.get(key) ?? "");
      },
    );
  }

  #row(site: string): TableRow {
    const row = new TableRow(site);
    this.#lines.set(row.root, row);
    row.mark(this.#pins.indexOf(site));
    row.root.addEventListener("click", () => this.events.pin(site, this.#metricOf(site)));
    return row;
  }

  /** The metric that shows a row on the map. */
  #metricOf(site: string): string {
    const known = (this.group?.metrics ?? []).map(({ name }) => name);
    const read = [...known, ...Object.keys(this.#moment?.metrics ?? {})];
    return read.find((name) => this.#moment?.metrics[name]?.sites.includes(site)) ?? known[0] ?? "";
  }
}
