// Which: the health table. Every number in it is one that was written.
import type { RunMeta } from "../api";
import { el, setOptions, svg } from "../dom";
import { csv, fileName } from "../model/export";
import { arrange, COLUMNS, ROW_KINDS, rowMetric, rowsOf, sparkline, type Cell, type Column, type Moment, type Row, type SortKey } from "../model/health";
import { formatNumber, formatStep, shorten } from "../model/format";
import type { Series } from "../model/series";
import type { Issue } from "../model/verdict";
import { pinColour } from "../style";
import { downloadMenu } from "./download";

export interface TableEvents {
  /** Another kind of rows was chosen. */
  kind(): void;
  pin(site: string, metric: string): void;
}

const [MOST_ROWS, SPARK_WIDTH, SPARK_HEIGHT, LONGEST] = [200, 110, 22, 48];
const HEADS: readonly { readonly key: SortKey; readonly title: string }[] = [
  { key: "site", title: "layer" },
  { key: "verdict", title: "verdict" },
  ...COLUMNS.map(({ key, title }) => ({ key, title })),
];

export class HealthTable {
  private readonly kinds = el("select", { attrs: { "aria-label": "Rows", "data-part": "rows" } });
  private readonly filter = el("input", { class: "filter", attrs: { type: "search", placeholder: "filter layers", "aria-label": "Filter layers" } });
  private readonly note = el("span", { class: "note", attrs: { "data-part": "table-note" } });
  private readonly download = downloadMenu("the table", { csv: () => csv(this.shown), name: () => fileName(this.run, "health", String(this.moment?.step ?? "")) });
  private readonly heads = el("tr");
  private readonly body = el("tbody");
  readonly root = el(
    "section",
    { class: "card health", attrs: { "aria-label": "Health of the layers", "data-part": "health" } },
    el("div", { class: "bar" }, el("h2", { text: "Health" }), this.kinds, this.filter, this.note, this.download),
    el("div", { class: "scroll", attrs: { tabindex: "0", role: "region", "aria-label": "Table of the layers" } }, el("table", {}, el("thead", {}, this.heads), this.body)),
  );
  private moment: Moment | null = null;
  private trend: Series | null = null;
  private log = false;
  private issues: readonly Issue[] = [];
  private pins: readonly string[] = [];
  private rows: readonly Row[] = [];
  private sort: SortKey = "verdict";
  private falling = true;
  private metric = "";
  private run = "";

  constructor(private readonly events: TableEvents) {
    this.root.hidden = true;
    this.kinds.addEventListener("change", () => events.kind());
    this.filter.addEventListener("input", () => this.draw());
    for (const { key, title } of HEADS) {
      const button = el("button", { text: title, attrs: { type: "button" } });
      button.addEventListener("click", () => this.sortBy(key));
      this.heads.append(el("th", { attrs: { scope: "col", "data-key": key } }, button));
    }
    this.heads.append(el("th", { text: "trend", attrs: { scope: "col" } }));
  }

  get kind(): string {
    return this.kinds.value;
  }

  showMeta(meta: RunMeta, issues: readonly Issue[]): void {
    [this.issues, this.run] = [issues, meta.run];
    const kinds = ROW_KINDS.filter(({ kind }) => rowMetric(kind, meta.metrics) !== undefined);
    const chosen = kinds.find(({ kind }) => kind === this.kind) ?? kinds[0];
    setOptions(this.kinds, kinds.map(({ kind, label }) => ({ value: kind, label })), chosen?.kind ?? "");
    this.root.hidden = chosen === undefined;
  }

  show(metric: string, moment: Moment): void {
    [this.metric, this.moment] = [metric, moment];
    this.rows = rowsOf(metric, moment, this.issues);
    this.draw();
  }

  showTrend(trend: Series | null, log: boolean): void {
    [this.trend, this.log] = [trend, log];
    this.draw();
  }

  showPins(pins: readonly string[]): void {
    this.pins = pins;
    for (const line of this.body.rows) this.mark(line);
  }

  /** Heads and rows as they stand. */
  private get shown(): readonly (readonly (string | number | null)[])[] {
    const rows = this.arranged.map(({ site, issue, cells }) => [site, issue?.issue_type ?? "ok", ...COLUMNS.map(({ key }) => cells[key]?.value ?? null)]);
    return [HEADS.map(({ title }) => title), ...rows];
  }

  private get arranged(): readonly Row[] {
    return arrange(this.rows, this.sort, this.falling, this.filter.value);
  }

  private sortBy(key: SortKey): void {
    this.falling = key === this.sort ? !this.falling : key !== "site";
    this.sort = key;
    this.draw();
  }

  private draw(): void {
    for (const head of this.heads.children) {
      const sorted = head.getAttribute("data-key") === this.sort;
      head.setAttribute("aria-sort", sorted ? (this.falling ? "descending" : "ascending") : "none");
    }
    const rows = this.arranged;
    const left = rows.length > MOST_ROWS ? `first ${MOST_ROWS} of ${formatStep(rows.length)} rows, filter to see others; ` : "";
    const coarse = this.moment?.coarse === undefined ? "" : `, extreme of up to ${formatStep(this.moment.coarse)} steps`;
    this.note.textContent = this.moment === null ? "" : `${left}at step ${formatStep(this.moment.step)}${coarse}`;
    const focused = document.activeElement?.getAttribute("data-site");
    this.body.replaceChildren(...rows.slice(0, MOST_ROWS).map((row) => this.row(row)));
    if (focused !== null && focused !== undefined) {
      [...this.body.querySelectorAll<HTMLElement>("button")].find((button) => button.getAttribute("data-site") === focused)?.focus({ preventScroll: true });
    }
  }

  private row(row: Row): HTMLElement {
    const attrs = { type: "button", "data-site": row.site };
    const name = el("button", { class: "mono", title: row.site, text: shorten(row.site, LONGEST), attrs });
    const verdict =
      row.issue === null
        ? el("span", { class: "ok", text: "ok" })
        : el("span", { class: `badge sev-${row.issue.severity}`, text: row.issue.issue_type, title: row.issue.message });
    const line = el("tr", {}, el("th", { attrs: { scope: "row" } }, name), el("td", {}, verdict));
    line.append(...COLUMNS.map((column) => cellOf(row.cells[column.key], column)), el("td", {}, this.spark(row.site)));
    line.addEventListener("click", () => this.events.pin(row.site, this.metric));
    this.mark(line);
    return line;
  }

  private mark(line: HTMLTableRowElement): void {
    const button = line.querySelector("button");
    const pin = this.pins.indexOf(button?.getAttribute("data-site") ?? "");
    // Most rows are neither pinned nor were: what does not change is not touched, so that a pin repaints at once.
    if (pin < 0 && button?.getAttribute("aria-pressed") === "false") return;
    button?.setAttribute("aria-pressed", String(pin >= 0));
    line.style.boxShadow = pin >= 0 ? `inset 4px 0 ${pinColour(pin)}` : "";
  }

  private spark(site: string): SVGElement {
    const box = svg("svg", { width: SPARK_WIDTH, height: SPARK_HEIGHT, role: "img", "aria-label": "trend" });
    const at = this.trend?.sites.indexOf(site) ?? -1;
    const block = this.trend?.blocks.values().next().value;
    if (this.trend === null || block === undefined || at < 0) return box;
    const values = block.values.subarray(at * this.trend.columns, (at + 1) * this.trend.columns);
    let path = "";
    let open = false;
    for (const point of sparkline(values, this.log, SPARK_WIDTH, SPARK_HEIGHT)) {
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
