// Where: any metric over depth and time, with the profile of one step beside it.
import type { Annotation, CatalogEntry, RunMetric } from "../api";
import { HeatMap, type Pointed } from "../charts/heatmap";
import { Profile } from "../charts/profile";
import { el, FILLING, setText, type Option } from "../dom";
import { colourScale, type ColourScale } from "../model/colour";
import { ALL_ROWS, reveal, within, zoomRows, type Depth, type DepthState } from "../model/depth";
import { csv, fileName, seriesRows } from "../model/export";
import type { Font } from "../model/figure";
import { formatStep, linearTicks, quantityText } from "../model/format";
import type { HeatView } from "../model/heat";
import { mapNote } from "../model/note";
import { shadeOf, type Shade } from "../model/shade";
import { columnAt, type Block, type Series } from "../model/series";
import { heightOf, MapRows } from "../model/maprows";
import { turn } from "../model/tree";
import type { Mode, Reducer } from "../model/url";
import type { Gesture } from "../model/zoom";
import { lesson } from "./empty";
import type { MetricInfo } from "./info";
import { Legend } from "./legend";
import { MapBar } from "./mapbar";
import { KEYS, onMapKey, type Keyed } from "./mapkeys";
import { NamesView } from "./names";
import type { Navigate } from "./navigate";
import { mapPicture } from "./picture";
import { placeTicks, showFlags } from "./ticks";
import { readingText, tipOf } from "./tip";
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

const AXIS = 46;

export class MapView {
  readonly bar: MapBar;
  readonly #names: NamesView;
  readonly #heat: HeatMap;
  readonly #profile = new Profile();
  readonly #legend: Legend;
  readonly #axis = el("div", { class: "axis" }, el("div"), el("p", { text: "optimizer step" }));
  readonly #flags = el("div", { class: "flags", attrs: { "data-part": "annotations" } });
  readonly #caption = el("div", { class: "axis caption" }, el("div"), el("p"));
  readonly #lesson = el("div", { class: "lesson", attrs: { "data-part": "lesson" } });
  readonly #body = el("div", { class: "map" });
  readonly root = el("section", { class: `card layers ${FILLING}`, attrs: { "aria-label": "Map of the layers" } });
  #content: MapContent | null = null;
  #scale: ColourScale | null = null;
  #state: DepthState = ALL_ROWS;
  readonly #rows = new MapRows();
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
        if (rows !== null) this.#set({ rows: within(this.#depth, rows) });
        if (range !== null) events.zoom(range);
      },
      reset: () => this.#reset(),
      wheel: (factor, step) => events.zoomBy(factor, step),
      wheelRows: (factor, row) => this.#zoomRows(factor, row),
      key: (action) => this.#keyed(action),
    });
    this.#names = new NamesView({
      pick: (row) => this.#pick(this.#depth.rows[row]?.from ?? -1),
      show: (row, rows) => this.#set({ rows: within(this.#depth, [row, row + rows]) }),
      turn: (key) => this.#set({ fold: turn(this.#state.fold, key), rows: null }),
      wheel: (factor, y) => this.#zoomRows(factor, this.#heat.rowAt(y)),
      reveal: (row) => this.#set({ rows: reveal(this.#depth, row) }),
    });
    this.#legend = new Legend((colour) => this.#set({ colour }), second);
    this.bar = new MapBar(
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
        svg: (font) => this.#svg(font),
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
    this.#axis.append(this.bar.noteRoot, this.#flags);
    this.#lesson.hidden = true;
    this.root.append(this.bar.root, this.#body, this.#lesson, this.#legend.root);
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

  /** At which step that was read. */
  get reading(): string {
    return this.#content === null ? "" : readingText(this.#content.series, this.#step);
  }

  /** Offers metrics, and keeps the place that a map of so many sites will take. */
  offer(options: readonly Option[], chosen: string, sites: number): void {
    this.bar.offer(options, chosen);
    const height = heightOf(sites, this.#state.tall, window.innerHeight);
    this.#body.style.minHeight = `${height + AXIS}px`;
    this.#names.root.style.minHeight = this.#content === null ? `${height}px` : "";
  }

  /** Shows other rows, folds and colours of what is there. */
  showDepth(state: DepthState): void {
    this.#state = state;
    if (this.#content === null) return;
    this.#lay();
    this.#paint();
  }

  show(content: MapContent): void {
    const before = this.#content;
    this.root.classList.remove(FILLING);
    this.#content = content;
    const { series, spec, of } = content;
    // Rows are those of one list of sites; a link brings them before the first list.
    if (this.#rows.take(series.sites) && before !== null && this.#state.rows !== null)
      this.events.depth((this.#state = { ...this.#state, rows: null }));
    this.#lesson.hidden = true;
    this.#body.hidden = this.#legend.root.hidden = false;
    this.#names.root.style.minHeight = "";
    this.bar.show(of === "" ? "Layer map" : `Layer map: ${of}`, spec);
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
    this.root.classList.remove(FILLING);
    this.#content = this.#scale = null;
    this.#rows.clear();
    this.bar.clear(of === "" ? "Layer map" : `Layer map: ${of}`, message);
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
    const rows = pins.map((pin) => this.#rows.ofLayer(pin));
    this.#heat.showRows(rows, this.#rows.accused);
    this.#names.show({
      depth: this.#depth,
      branches: this.#rows.branches,
      fold: this.#state.fold,
      rowOf: this.#rows.of,
      pins: rows,
      accused: this.#rows.accused,
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
    setText(this.#caption.children[1] ?? this.#caption, `${this.reading}: ${spec.title}`);
  }

  /** Shows what is pointed at in another view: a step, and a site where this map has it. */
  showHover(step: number | null, site: string | null): void {
    this.#heat.showHover(step);
    this.#showRow(site === null ? null : this.#rows.ofLayer(site));
  }

  /** Works out the rows: what is folded, what is in view, where the layers are that issues are about. */
  #lay(): void {
    const { accused = [], order = [] } = this.#content ?? {};
    this.#rows.lay(this.#state, accused, order);
    const { levels, sites } = this.#rows;
    this.bar.showRows(levels, this.#state.fold.level, sites.length, this.#state.rows !== null, this.#state.tall);
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
    this.bar.note(
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

  #svg(font: Font): string | null {
    const [view, content] = [this.#view, this.#content];
    if (view === null || content === null) return null;
    const { spec, like } = content;
    // On paper it is light, also where the page is dark; a second map keeps the colours of the first.
    const scale = colourScale(spec, (like === null ? null : like.#block) ?? view.block, false, this.#state.colour);
    return mapPicture({ ...view, scale }, `${spec.title}: ${view.series.run}`, quantityText(spec), font);
  }

  get #depth(): Depth {
    return this.#rows.depth;
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
    return heightOf(this.#depth.rows.length, this.#state.tall, window.innerHeight);
  }

  #snap(step: number): number {
    const first = this.#content?.series.first;
    return first?.[columnAt(first, step)] ?? Math.round(step);
  }

  #keyed(action: Gesture): boolean {
    const series = this.#content?.series;
    if (series === undefined) return false;
    const map: Keyed = {
      series,
      depth: this.#depth,
      some: this.#state.rows !== null,
      step: this.#step,
      row: this.#row,
      from: this.#rows.ofLayer(this.#pins[0] ?? "\0"),
      rows: (rows) => this.#set({ rows }),
      zoomRows: (factor, row) => this.#zoomRows(factor, row),
      reset: () => this.#reset(),
      pick: () => {
        const row = this.#depth.rows[this.#row ?? -1];
        if (row !== undefined) this.#pick(this.#cell?.site ?? row.from);
      },
      point: (row, step) => this.#hovered(this.#heat.at(row, step)),
      reveal: (row) => this.#set({ rows: reveal(this.#depth, row) }),
    };
    return onMapKey(action, map, this.events);
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
    const { tip, site } = tipOf(content.series, content.spec, this.#depth, at);
    this.tooltip.show(tip, at.x, at.y);
    this.events.hover(content.series.first[at.cell.column] ?? at.step, site);
    this.#showRow(at.cell.site < 0 ? at.rows[0] : (this.#rows.of[at.cell.site] ?? at.rows[0]));
  }
}
