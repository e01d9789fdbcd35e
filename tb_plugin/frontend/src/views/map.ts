// Where: any metric over depth and time, with the profile of one step beside it.
import type { Annotation, CatalogEntry, RunMetric } from "../api";
import { HeatMap, type Pointed } from "../charts/heatmap";
import { Profile } from "../charts/profile";
import { el, setText, type Option } from "../dom";
import { colourScale, type ColourScale } from "../model/colour";
import {
  ALL_ROWS,
  depthOf,
  panRows,
  reveal,
  rowOfSites,
  zoomRows,
  type Depth,
  type DepthState,
  type RowRange,
} from "../model/depth";
import { csv, fileName, seriesRows } from "../model/export";
import { formatNumber, formatStep, formatTime, linearTicks, siteText, unitText } from "../model/format";
import type { HeatView } from "../model/heat";
import { mapNote } from "../model/note";
import { shadeOf, type Shade } from "../model/shade";
import { columnAt, type Block, type Series } from "../model/series";
import { branchesOf, levelsOf, rowsOf, sitesOf, turn, withAbsent, type Branch } from "../model/tree";
import type { Mode, Reducer } from "../model/url";
import type { Gesture } from "../model/zoom";
import { lesson } from "./empty";
import type { MetricInfo } from "./info";
import { Legend } from "./legend";
import { MapBar } from "./mapbar";
import { NamesView } from "./names";
import type { Navigate } from "./navigate";
import { mapPicture } from "./picture";
import { placeTicks, showFlags } from "./ticks";
import type { Tooltip } from "./tooltip";

export interface MapEvents extends Navigate {
  metric(name: string): void;
  search(): void;
  pin(site: string): void;
  hover(step: number | null, site: string | null): void;
  mode(mode: Mode): void;
  reduce(reducer: Reducer): void;
  depth(state: DepthState): void;
}

export interface MapContent {
  readonly series: Series;
  readonly spec: RunMetric;
  readonly range: readonly [number, number];
  /** Names the run where there are two. */
  readonly of: string;
  /** Another map whose colours this one shares. */
  readonly like: MapView | null;
  /** Layers that an open issue is about, and the blocks of the model in their order. */
  readonly accused: readonly string[];
  readonly order: readonly string[];
  readonly annotations: readonly Annotation[];
}

const [LEAST_HEIGHT, ROW, ROOMY, FEW] = [168, 17, 24, 8];
const [LEAST_WINDOW, AROUND, AROUND_TALL] = [240, 560, 190];
const [AXIS, MOST_ABSENT] = [46, 3];
const KEYS =
  "Arrow keys move the step and the layer, Enter pins the layer, plus and minus zoom the steps, v and Shift v the layers, page keys move over the layers, 0 shows all.";

export class MapView {
  readonly #bar: MapBar;
  readonly #names: NamesView;
  readonly #heat: HeatMap;
  readonly #profile = new Profile();
  readonly #legend: Legend;
  readonly #axis = el("div", { class: "axis" }, el("div"), el("p", { text: "optimizer step" }));
  readonly #flags = el("div", { class: "flags", attrs: { "data-part": "annotations" } });
  readonly #caption = el("div", { class: "axis caption" }, el("div"), el("p"));
  readonly #lesson = el("div", { class: "lesson", attrs: { "data-part": "lesson" } });
  readonly #body = el("div", { class: "map" });
  readonly root = el("section", { class: "card layers", attrs: { "aria-label": "Map of the layers" } });
  #content: MapContent | null = null;
  #scale: ColourScale | null = null;
  #state: DepthState = ALL_ROWS;
  #branches: readonly Branch[] = [];
  #levels: ReturnType<typeof levelsOf> = [];
  #depth: Depth = depthOf([], null);
  #rowOf: Int32Array = new Int32Array();
  #accused: readonly number[] = [];
  #pins: readonly string[] = [];
  #step = 0;
  #row: number | null = null;
  #cell: Pointed["cell"] | null = null;
  #dark = false;

  /** A `second` map shows the run compared with; the first one has the controls. */
  constructor(
    private readonly events: MapEvents,
    private readonly tooltip: Tooltip,
    info: MetricInfo,
    second = false,
  ) {
    this.#heat = new HeatMap({
      hover: (at) => this.#hovered(at),
      pick: (at) => {
        this.#pick(at.cell.site >= 0 ? at.cell.site : (this.#depth.rows[at.rows[0]]?.from ?? -1));
        events.step(this.#snap(at.step));
      },
      zoom: (range, rows) => {
        if (rows !== null) this.#set({ rows: this.#within(rows) });
        if (range !== null) events.zoom(range);
      },
      reset: () => this.#reset(),
      wheel: (factor, step) => events.zoomBy(factor, step),
      wheelRows: (factor, row) => this.#zoomRows(factor, row),
      key: (action) => this.#keyed(action),
    });
    this.#names = new NamesView({
      pick: (row) => this.#pick(this.#depth.rows[row]?.from ?? -1),
      show: (row, rows) => this.#set({ rows: this.#within([row, row + rows]) }),
      turn: (key) => this.#set({ fold: turn(this.#state.fold, key), rows: null }),
      wheel: (factor, y) => this.#zoomRows(factor, this.#heat.rowAt(y)),
      reveal: (row) => this.#set({ rows: reveal(this.#depth, row) }),
    });
    this.#legend = new Legend((colour) => this.#set({ colour }), second);
    this.#bar = new MapBar(
      {
        metric: (name) => events.metric(name),
        search: () => events.search(),
        mode: (mode) => events.mode(mode),
        reduce: (reducer) => events.reduce(reducer),
        level: (level) => this.#set({ fold: { level, turned: [] }, rows: null }),
        tall: (tall) => this.#set({ tall }),
        allSteps: () => events.zoom(null),
        allRows: () => this.#set({ rows: null }),
        spec: () => this.#content?.spec ?? null,
      },
      info,
      {
        csv: () => (this.#content === null ? null : csv(seriesRows(this.#content.series))),
        svg: () => this.#svg(),
        name: () =>
          fileName(
            this.#content?.series.run ?? "",
            this.#content?.spec.name ?? "",
            this.#content?.spec.compared ? "against" : "map",
          ),
      },
      second,
    );
    this.#body.append(this.#names.root, this.#heat.root, this.#profile.root, el("div"), this.#axis, this.#caption);
    this.#axis.append(this.#bar.noteRoot, this.#flags);
    this.#lesson.hidden = true;
    this.root.append(this.#bar.root, this.#body, this.#lesson, this.#legend.root);
    if (!second) return;
    for (const part of this.root.querySelectorAll("[data-part]"))
      part.setAttribute("data-part", `${part.getAttribute("data-part")}-other`);
    this.root.setAttribute("aria-label", "Map of the layers of the other run");
  }

  /** How many columns are worth asking for. */
  get columns(): number {
    return Math.max(200, Math.round(this.#heat.width * (window.devicePixelRatio || 1)));
  }

  get sites(): readonly string[] {
    return this.#content?.series.sites ?? [];
  }

  /** What is shown of a module at the chosen step. */
  get shade(): Shade {
    const view = this.#view;
    return view === null ? () => null : shadeOf(view, this.#step);
  }

  /** Offers metrics, and keeps the place that a map of so many sites will take. */
  offer(options: readonly Option[], chosen: string, sites: number): void {
    this.#bar.offer(options, chosen);
    const height = heightOf(sites, this.#state.tall);
    this.#body.style.minHeight = `${height + AXIS}px`;
    this.#names.root.style.minHeight = this.#content === null ? `${height}px` : "";
  }

  showReducer(reducer: Reducer): void {
    this.#bar.showReducer(reducer);
  }

  /** Offers the ways to compare, or none. */
  showMode(mode: Mode | null): void {
    this.#bar.showMode(mode);
  }

  /** Offers the way back from a zoom. */
  showZoom(zoomed: boolean): void {
    this.#bar.showZoom(zoomed);
  }

  /** Shows other rows, folds and colours of what is there. */
  showDepth(state: DepthState): void {
    this.#state = state;
    if (this.#content === null) return;
    this.#lay();
    this.#paint();
  }

  show(content: MapContent): void {
    const before = this.#content?.series.sites;
    this.#content = content;
    const { series, spec, of } = content;
    if (
      before === undefined ||
      before.length !== series.sites.length ||
      before.some((site, i) => site !== series.sites[i])
    ) {
      this.#branches = branchesOf(series.sites);
      this.#levels = levelsOf(this.#branches, series.sites.length);
      // Rows are those of one list of sites; a link brings them before the first list.
      if (before !== undefined && this.#state.rows !== null)
        this.events.depth((this.#state = { ...this.#state, rows: null }));
    }
    this.#lesson.hidden = true;
    this.#body.hidden = this.#legend.root.hidden = false;
    this.#names.root.style.minHeight = "";
    this.#bar.show(of === "" ? "Layer map" : `Layer map: ${of}`, spec);
    this.#heat.root.setAttribute("aria-label", `${spec.title} by layer and step. ${KEYS}`);
    this.#lay();
    this.#paint();
  }

  /** Paints what is shown already once more, in another theme. */
  themed(dark: boolean): void {
    this.#dark = dark;
    if (this.#heat.width > 0) this.#paint();
  }

  /** Shows other steps of what is there already, until the server has sent more. */
  stretch(range: readonly [number, number]): void {
    if (this.#content === null) return;
    this.#content = { ...this.#content, range };
    this.#paint();
  }

  /** Says why there is nothing; with an entry of the catalogue, also what makes a run hold the metric. */
  clear(message: string, of = "", entry: CatalogEntry | null = null): void {
    this.#content = this.#scale = null;
    this.#branches = [];
    this.#bar.clear(of === "" ? "Layer map" : `Layer map: ${of}`, message);
    this.#heat.clear();
    this.#profile.clear();
    this.#names.clear();
    this.#legend.clear();
    this.#body.hidden = this.#legend.root.hidden = entry !== null;
    this.#lesson.hidden = entry === null;
    this.#lesson.replaceChildren(...(entry === null ? [] : lesson(entry)));
  }

  showPins(pins: readonly string[]): void {
    this.#pins = pins;
    if (this.#content === null) return;
    const rows = pins.map((pin) => this.#rowOfLayer(pin));
    this.#heat.showRows(rows, this.#accused);
    this.#names.show({
      depth: this.#depth,
      branches: this.#branches,
      fold: this.#state.fold,
      rowOf: this.#rowOf,
      pins: rows,
      accused: this.#accused,
      height: this.#height,
    });
  }

  showStep(step: number): void {
    this.#step = step;
    this.#heat.showStep(step);
    const view = this.#view;
    if (view === null || this.#content === null) return;
    const { series, spec } = this.#content;
    const column = columnAt(series.first, step);
    this.#profile.paint(view, column, spec.marks, this.#height);
    placeTicks(this.#caption, this.#profile.width, this.#profile.ticks);
    setText(this.#caption.children[1] ?? this.#caption, `${spec.title} at step ${steps(series, column)}`);
  }

  /** Shows what is pointed at in another view: a step, and a site where this map has it. */
  showHover(step: number | null, site: string | null): void {
    this.#heat.showHover(step);
    this.#showRow(site === null ? null : this.#rowOfLayer(site));
  }

  /** Works out the rows: what is folded, what is in view, where the layers are that issues are about. */
  #lay(): void {
    const { accused = [], order = [] } = this.#content ?? {};
    const { sites } = this;
    const there = accused.map((layer) => sitesOf(sites, layer));
    const absent = accused.filter((layer, i) => layer !== "" && there[i]?.length === 0).slice(0, MOST_ABSENT);
    const rows = withAbsent(rowsOf(this.#branches, this.#state.fold), absent, sites, order);
    this.#depth = depthOf(rows, this.#state.rows);
    this.#rowOf = rowOfSites(rows, sites.length);
    const found = new Set(there.flatMap((list) => list.map((site) => this.#rowOf[site] ?? -1)));
    for (const layer of absent) found.add(rows.findIndex(({ key, from, to }) => from === to && key === layer));
    this.#accused = [...found].filter((row) => row >= 0).sort((a, b) => a - b);
    this.#bar.showRows(this.#levels, this.#state.fold.level, sites.length, this.#state.rows !== null, this.#state.tall);
  }

  #paint(): void {
    const [content, block] = [this.#content, this.#block];
    if (content === null || block === null) return;
    const { series, spec, range, like } = content;
    this.#scale = (like === null ? null : like.#scale) ?? colourScale(spec, block, this.#dark, this.#state.colour);
    this.#names.fit();
    this.#profile.fit();
    this.#body.style.minHeight = `${this.#height + AXIS}px`;
    this.#heat.paint({ series, block, range, depth: this.#depth, scale: this.#scale }, this.#height);
    this.#legend.show(spec, this.#scale, this.#state.colour, this.#dark);
    const pixels = window.devicePixelRatio || 1;
    this.#bar.note(
      mapNote(series, this.#depth, {
        range,
        width: this.#heat.width * pixels,
        height: this.#height * pixels,
        neutral: this.#scale.diverging ? (this.#scale.log ? "1" : "0") : "the median",
      }),
    );
    const ticks = linearTicks(range[0], range[1], Math.max(2, this.#heat.width / 110)).filter(Number.isInteger);
    placeTicks(
      this.#axis,
      this.#heat.width,
      ticks.map((tick) => ({ x: this.#heat.toX(tick), text: formatStep(tick) })),
    );
    showFlags(this.#flags, content.annotations, range, (step) => this.#heat.toX(step));
    this.showPins(this.#pins);
    this.showStep(this.#step);
  }

  #set(change: Partial<DepthState>): void {
    this.events.depth({ ...this.#state, ...change });
  }

  #reset(): void {
    if (this.#state.rows !== null) this.#set({ rows: null });
    this.events.zoom(null);
  }

  #within(rows: RowRange): RowRange | null {
    const { low, high } = depthOf(this.#depth.rows, [Math.floor(rows[0]), Math.ceil(rows[1])]);
    return high - low >= this.#depth.rows.length ? null : [low, high];
  }

  #zoomRows(factor: number, row: number): boolean {
    const rows = zoomRows(this.#depth, row, factor);
    if (rows === null && this.#state.rows === null) return false;
    this.#set({ rows });
    return true;
  }

  #showRow(row: number | null): void {
    this.#row = row;
    this.#heat.showRow(row);
    this.#profile.showRow(row, this.#depth, this.#height);
  }

  #pick(site: number): void {
    const name = this.sites[site];
    if (name !== undefined) this.events.pin(name);
  }

  #rowOfLayer(layer: string): number {
    const site = this.sites.indexOf(layer);
    return site < 0
      ? this.#depth.rows.findIndex(({ key, from, to }) => from === to && key === layer)
      : (this.#rowOf[site] ?? -1);
  }

  #svg(): string | null {
    const view = this.#view;
    if (view === null || this.#content === null) return null;
    const words = {
      title: `${this.#bar.title}: ${view.series.run}, ${this.#content.spec.title}`,
      caption: this.#bar.noteText,
    };
    return mapPicture(view, { ...words, image: this.#heat.picture, width: this.#heat.width, height: this.#height });
  }

  get #view(): HeatView | null {
    const [content, block, scale] = [this.#content, this.#block, this.#scale];
    if (content === null || block === null || scale === null) return null;
    return { series: content.series, block, range: content.range, depth: this.#depth, scale };
  }

  get #block(): Block | null {
    return this.#content?.series.blocks.values().next().value ?? null;
  }

  get #height(): number {
    return heightOf(this.#depth.rows.length, this.#state.tall);
  }

  #snap(step: number): number {
    const first = this.#content?.series.first;
    return first?.[columnAt(first, step)] ?? Math.round(step);
  }

  #keyed(action: Gesture): boolean {
    const series = this.#content?.series;
    if (series === undefined) return false;
    const column = columnAt(series.first, this.#step);
    const last = this.#depth.rows.length - 1;
    switch (action.kind) {
      case "zoom":
        return this.events.zoomBy(action.factor, this.#step);
      case "pan":
        return this.events.pan(action.by);
      case "scroll":
        this.#set({
          rows:
            this.#state.rows === null ? null : panRows(this.#depth, action.by * (this.#depth.high - this.#depth.low)),
        });
        return true;
      case "stretch":
        this.#zoomRows(action.factor, (this.#row ?? (this.#depth.low + this.#depth.high) / 2) + 0.5);
        return true;
      case "reset":
        this.#reset();
        return true;
      case "pick": {
        const row = this.#depth.rows[this.#row ?? -1];
        if (row !== undefined) this.#pick(this.#cell?.site ?? row.from);
        return true;
      }
      case "row": {
        const before = this.#row ?? this.#rowOfLayer(this.#pins[0] ?? "\0");
        const next = Math.max(0, Math.min(last, before + action.by));
        if (next < this.#depth.low || next + 1 > this.#depth.high) this.#set({ rows: reveal(this.#depth, next) });
        this.#hovered(this.#heat.at(next, series.first[column] ?? this.#step));
        return true;
      }
      default: {
        const wanted = action.kind === "end" ? (action.by < 0 ? 0 : series.columns - 1) : column + action.by;
        const step = series.first[Math.max(0, Math.min(series.columns - 1, wanted))];
        const row = this.#row;
        if (step !== undefined) this.events.step(step);
        if (row !== null && step !== undefined) this.#hovered(this.#heat.at(row, step));
        return true;
      }
    }
  }

  #hovered(at: Pointed | null): void {
    const content = this.#content;
    this.#cell = at?.cell ?? null;
    if (content === null || at === null) {
      this.#showRow(null);
      this.tooltip.hide();
      this.events.hover(null, null);
      return;
    }
    const { series, spec } = content;
    const { cell, rows } = at;
    const row = this.#depth.rows[rows[0]];
    const among = this.#depth.rows.slice(...rows).reduce((sum, { from, to }) => sum + to - from, 0);
    const unit = cell.kind === "value" ? unitText(spec.unit) : "";
    const absent = cell.site < 0 && row !== undefined && row.from === row.to;
    const value = absent
      ? "not read"
      : cell.kind === "missing"
        ? "nothing arrived"
        : `${formatNumber(cell.value)} ${unit}`.trim();
    const site = absent ? row.key : (series.sites[cell.site] ?? series.sites[row?.from ?? 0] ?? "");
    const most = among > 1 ? [`furthest out of ${among} rows here`] : [];
    const lines = [
      `${spec.title}, step ${steps(series, cell.column)}`,
      formatTime(series.wall[cell.column] ?? 0),
      ...most,
    ];
    this.tooltip.show({ layer: siteText(site), value, lines }, at.x, at.y);
    this.events.hover(series.first[cell.column] ?? at.step, site);
    this.#showRow(cell.site < 0 ? rows[0] : (this.#rowOf[cell.site] ?? rows[0]));
  }
}

function heightOf(rows: number, tall: boolean): number {
  const room = Math.max(LEAST_WINDOW, window.innerHeight - (tall ? AROUND_TALL : AROUND));
  return tall && rows * ROW > LEAST_HEIGHT
    ? room
    : Math.max(LEAST_HEIGHT, Math.min(room, rows * (rows <= FEW ? ROOMY : ROW)));
}

function steps(series: Series, column: number): string {
  const [first, last] = [series.first[column], series.last[column]];
  if (first === undefined || last === undefined) return "\u2013";
  return first === last ? formatStep(first) : `${formatStep(first)}\u2013${formatStep(last)}`;
}
