// Which: the health table. Every number in it is one that was written.
import type { RunMetric } from "../api";
import { el, keepChildren, setOptions, setText, svg } from "../dom";
import { csv, fileName } from "../model/export";
import { arrange, columnsOf, groupsOf, rowsOf, sparkline, type Cell, type Column, type Group, type Moment, type Row, type SortKey } from "../model/health";
import { formatNumber, formatStep, shorten, siteText } from "../model/format";
import type { Series } from "../model/series";
import type { Issue } from "../model/verdict";
import { pinColour } from "../style";
import { downloadMenu } from "./download";

export interface TableEvents {
  /** Another kind of rows was chosen. */
  kind(): void;
  pin(site: string, metric: string): void;
}

const [MOST_ROWS, SPARK_WIDTH, SPARK_HEIGHT, LONGEST, LINE, HEAD, TALLEST] = [200, 110, 22, 48, 27, 29, 460];
const NAMED: readonly { readonly key: SortKey; readonly title: string }[] = [
  { key: "site", title: "layer" },
  { key: "verdict", title: "verdict" },
];

export class HealthTable {
  readonly #kinds = el("select", { attrs: { "aria-label": "Rows", "data-part": "rows" } });
  readonly #filter = el("input", { class: "filter", attrs: { type: "search", placeholder: "filter layers", "aria-label": "Filter layers" } });
  readonly #note = el("span", { class: "note", attrs: { "data-part": "table-note" } });
  readonly #download = downloadMenu("the table", { csv: () => csv(this.#shown), name: () => fileName(this.#run, "health", String(this.#moment?.step ?? "")) });
  readonly #heads = el("tr");
  readonly #body = el("tbody");
  readonly #scroll = el("div", { class: "scroll", attrs: { tabindex: "0", role: "region", "aria-label": "Table of the layers" } }, el("table", {}, el("thead", {}, this.#heads), this.#body));
  readonly root = el(
    "section",
    { class: "card health", attrs: { "aria-label": "Health of the layers", "data-part": "health" } },
    el("div", { class: "bar" }, el("h2", { text: "Health" }), this.#kinds, this.#filter, this.#note, this.#download),
    this.#scroll,
  );
  #moment: Moment | null = null;
  #trend: Series | null = null;
  #log = false;
  #issues: readonly Issue[] = [];
  #pins: readonly string[] = [];
  #rows: readonly Row[] = [];
  #sort: SortKey = "verdict";
  #falling = true;
  #run = "";
  #metrics: readonly RunMetric[] = [];
  #groups: readonly Group[] = [];
  #columns: readonly Column[] = [];

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
    setOptions(this.#kinds, this.#groups.map(({ key, label }) => ({ value: key, label })), chosen?.key ?? "");
    this.root.hidden = chosen === undefined;
    const most = Math.max(0, ...(chosen?.metrics ?? []).map(({ sites }) => sites));
    this.#scroll.style.minHeight = `${Math.min(TALLEST, HEAD + most * LINE)}px`;
  }

  show(group: Group, moment: Moment): void {
    this.#moment = moment;
    const columns = columnsOf(group, this.#metrics);
    this.#rows = rowsOf(group, moment, this.#issues, columns);
    // A question that no row answers is not asked.
    this.#columns = columns.filter(({ key }) => this.#rows.some(({ cells }) => cells[key] !== null));
    this.#draw();
  }

  showTrend(trend: Series | null, log: boolean): void {
    [this.#trend, this.#log] = [trend, log];
    this.#draw();
  }

  showPins(pins: readonly string[]): void {
    this.#pins = pins;
    for (const line of this.#body.rows) this.#mark(line);
  }

  /** Heads and rows as they stand. */
  get #shown(): readonly (readonly (string | number | null)[])[] {
    const rows = this.#arranged.map(({ site, issue, cells }) => [site, issue?.issue_type ?? "ok", ...this.#columns.map(({ key }) => cells[key]?.value ?? null)]);
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
    const rows = this.#arranged;
    const left = rows.length > MOST_ROWS ? `first ${MOST_ROWS} of ${formatStep(rows.length)} rows, filter to see others; ` : "";
    const coarse = this.#moment?.coarse === undefined ? "" : `, extreme of up to ${formatStep(this.#moment.coarse)} steps`;
    setText(this.#note, this.#moment === null ? "" : `${left}at step ${formatStep(this.#moment.step)}${coarse}`);
    keepChildren(
      this.#body,
      rows.slice(0, MOST_ROWS),
      ({ site }) => site,
      ({ site }) => this.#line(site),
      (line, row) => this.#fill(line, row),
    );
  }

  #drawHeads(): void {
    const trend = { key: "", title: "trend" };
    keepChildren(
      this.#heads,
      [...NAMED, ...this.#columns, trend],
      ({ key }) => key,
      ({ key, title }) => {
        if (key === "") return el("th", { text: title, attrs: { scope: "col" } });
        const button = el("button", { text: title, attrs: { type: "button" } });
        button.addEventListener("click", () => this.#sortBy(key));
        return el("th", { attrs: { scope: "col", "data-key": key } }, button);
      },
      (head, { key }) => {
        if (key !== "") head.setAttribute("aria-sort", key === this.#sort ? (this.#falling ? "descending" : "ascending") : "none");
      },
    );
  }

  #line(site: string): HTMLTableRowElement {
    const name = el("button", { class: "mono", title: siteText(site), text: shorten(siteText(site), LONGEST), attrs: { type: "button", "data-site": site } });
    const line = el("tr", {}, el("th", { attrs: { scope: "row" } }, name));
    line.addEventListener("click", () => this.events.pin(site, this.#metricOf(site)));
    return line;
  }

  /** The metric that shows a row on the map. */
  #metricOf(site: string): string {
    const known = (this.group?.metrics ?? []).map(({ name }) => name);
    return known.find((name) => this.#moment?.metrics[name]?.sites.includes(site)) ?? known[0] ?? "";
  }

  #fill(line: HTMLTableRowElement, row: Row): void {
    const { issue } = row;
    const verdict = issue === null ? el("span", { class: "ok", text: "ok" }) : el("span", { class: `badge sev-${issue.severity}`, text: issue.issue_type, title: issue.message });
    const cells = this.#columns.map((column) => cellOf(row.cells[column.key] ?? null, column));
    line.replaceChildren(...[...line.children].slice(0, 1), el("td", {}, verdict), ...cells, el("td", {}, this.#spark(row.site)));
    this.#mark(line);
  }

  #mark(line: HTMLTableRowElement): void {
    const button = line.querySelector("button");
    const pin = this.#pins.indexOf(button?.getAttribute("data-site") ?? "");
    // Most rows are neither pinned nor were: what does not change is not touched, so that a pin repaints at once.
    if (pin < 0 && button?.getAttribute("aria-pressed") === "false") return;
    button?.setAttribute("aria-pressed", String(pin >= 0));
    line.style.boxShadow = pin >= 0 ? `inset 4px 0 ${pinColour(pin)}` : "";
  }

  #spark(site: string): SVGElement {
    const box = svg("svg", { width: SPARK_WIDTH, height: SPARK_HEIGHT, role: "img", "aria-label": "trend" });
    const at = this.#trend?.sites.indexOf(site) ?? -1;
    const block = this.#trend?.blocks.values().next().value;
    if (this.#trend === null || block === undefined || at < 0) return box;
    const values = block.values.subarray(at * this.#trend.columns, (at + 1) * this.#trend.columns);
    let path = "";
    let open = false;
    for (const point of sparkline(values, this.#log, SPARK_WIDTH, SPARK_HEIGHT)) {
      if (point !== null) path += `${open ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
      open = point !== null;
    }
    box.append(svg("path", { d: path }));
    return box;
  }
}

function cellOf(cell: Cell | null, { share }: Column): HTMLElement {
  if (cell === null) return el("td", { class: "num none", text: "\u2013", title: "not read" });
  const text = share && Number.isFinite(cell.value) ? `${formatNumber(cell.value * 100, 4)} %` : formatNumber(cell.value);
  const more = cell.among > 1 ? `greatest of ${cell.among}: ` : "";
  const title = `${more}${cell.site}\n${cell.metric} = ${cell.value}`;
  return el("td", { class: Number.isFinite(cell.value) ? "num" : "num broken", text, title });
}
