// One row of the health table. It is built once; of a new step only the cells that differ are touched.
import { el, setText, svg } from "../dom";
import { sparkline, verdictOf, type Cell, type Column, type Row } from "../model/health";
import { formatNumber, shorten, siteText, threeDigits } from "../model/format";
import type { Series } from "../model/series";
import { pinColour } from "../style";

export interface Trend {
  readonly series: Series;
  readonly log: boolean;
}

const [SPARK_WIDTH, SPARK_HEIGHT, LONGEST] = [110, 22, 48];

export class TableRow {
  readonly #name: HTMLElement;
  readonly #verdict = el("span");
  readonly #path = svg("path", {});
  readonly #end = el(
    "td",
    {},
    svg("svg", { width: SPARK_WIDTH, height: SPARK_HEIGHT, role: "img", "aria-label": "trend" }, this.#path),
  );
  readonly root: HTMLTableRowElement;
  #cells: readonly HTMLElement[] = [];
  #trend: Trend | null = null;
  #pin = NaN;

  constructor(readonly site: string) {
    const name = siteText(site);
    this.#name = el("button", { class: "mono", title: name, text: shorten(name, LONGEST), attrs: { type: "button" } });
    this.root = el("tr", {}, el("th", { attrs: { scope: "row" } }, this.#name), el("td", {}, this.#verdict), this.#end);
    this.mark(-1);
  }

  show(row: Row, columns: readonly Column[], trend: Trend | null): void {
    const { issue, off, arrives, cells } = row;
    const column = columns.find(({ key }) => key === off);
    if (issue !== null) set(this.#verdict, `badge sev-${issue.severity}`, issue.issue_type, issue.message);
    else if (column !== undefined)
      set(
        this.#verdict,
        "off",
        beyond(column, cells[column.key]?.value ?? NaN),
        `${column.title} is ${column.marks.length === 0 ? "no number" : `outside ${column.marks.join(" to ")}`}; no rule reports an issue`,
      );
    else if (arrives !== null)
      set(
        this.#verdict,
        "off",
        `\u00d7${threeDigits(arrives)} arrives`,
        "Fraction of the last block's gradient that arrives here; it is below the threshold of the open issue, or below that at a layer the issue names",
      );
    else
      set(
        this.#verdict,
        off === null ? "unjudged" : "ok",
        verdictOf(row),
        off === null ? "No metric in this row has a threshold" : "All values are within their thresholds",
      );
    if (this.#cells.length !== columns.length) {
      for (const cell of this.#cells) cell.remove();
      this.#cells = columns.map(() => el("td"));
      this.#end.before(...this.#cells);
    }
    columns.forEach((column, i) => {
      const cell = this.#cells[i];
      if (cell !== undefined) fill(cell, cells[column.key] ?? null, column, column.key === off);
    });
    if (trend !== this.#trend) this.#path.setAttribute("d", pathOf(this.site, trend));
    this.#trend = trend;
  }

  /** Marks the row as pinned; -1 for one that is not. */
  mark(pin: number): void {
    if (pin === this.#pin) return;
    this.#pin = pin;
    this.#name.setAttribute("aria-pressed", String(pin >= 0));
    this.root.style.boxShadow = pin >= 0 ? `inset 4px 0 ${pinColour(pin)}` : "";
  }
}

/** A number outside its thresholds, as a comparison. */
function beyond({ title, marks, share }: Column, value: number): string {
  const [low, high] = marks.length === 2 ? marks : [undefined, marks[0]];
  const mark = (number: number): string => (share ? `${formatNumber(100 * number, 3)} %` : formatNumber(number, 3));
  if (low !== undefined && value < low && Number.isFinite(value)) return `${title} < ${mark(low)}`;
  return Number.isFinite(value) ? `${title} > ${mark(high ?? 0)}` : `${title} is ${formatNumber(value)}`;
}

function fill(td: HTMLElement, cell: Cell | null, { share }: Column, off: boolean): void {
  if (cell === null) return set(td, "num none", "\u2013", "not read");
  const { value, among, site, metric } = cell;
  const finite = Number.isFinite(value);
  const text = share && finite ? `${threeDigits(value * 100)} %` : threeDigits(value);
  set(
    td,
    finite ? (off ? "num outside" : "num") : "num broken",
    text,
    `${among > 1 ? `greatest of ${among}: ` : ""}${site}\n${metric} = ${value}`,
  );
}

function set(node: HTMLElement, name: string, text: string, title: string): void {
  if (node.className !== name) node.className = name;
  setText(node, text);
  if (node.title !== title) node.title = title;
}

function pathOf(site: string, trend: Trend | null): string {
  const at = trend?.series.sites.indexOf(site) ?? -1;
  const block = trend?.series.blocks.values().next().value;
  if (trend === null || block === undefined || at < 0) return "";
  const { columns } = trend.series;
  let path = "";
  let open = false;
  for (const point of sparkline(
    block.values.subarray(at * columns, (at + 1) * columns),
    trend.log,
    SPARK_WIDTH,
    SPARK_HEIGHT,
  )) {
    if (point !== null) path += `${open ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    open = point !== null;
  }
  return path;
}
