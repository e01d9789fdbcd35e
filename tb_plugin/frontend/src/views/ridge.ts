// How distributed: histograms of one parameter over time, NaN and Inf counted beside each.
import { el, setOptions, setText, svg } from "../dom";
import { csv, fileName } from "../model/export";
import { histogramFigure, type Font } from "../model/figure";
import { formatNumber, formatStep, linearTicks } from "../model/format";
import { firstSite, heatColumns, histogramRows, ridgeline, type Histograms, type SiteHistograms } from "../model/ridge";
import { HISTOGRAM_FORMS, type HistogramForm } from "../model/url";
import { onPaper } from "../style";
import { downloadMenu } from "./download";
import { Spread } from "./spread";

export interface Listed {
  readonly metric: string;
  readonly site: string;
}

const [LEFT, RIGHT, GAP, PEAK, AXIS] = [70, 110, 15, 44, 24];
const [PADDING, HEAT, MARK, STEP_LABEL] = [32, 220, 8, 64];
export const MOST_RIDGES = 28;
const [MOST_COLUMNS, MOST_TOGETHER] = [64, 2000];
const FORMS = [
  { value: "", label: "ridges" },
  { value: "heat", label: "heat map" },
  { value: "all", label: "all parameters" },
] as const;

export class RidgeView {
  readonly #metrics = el("select", { attrs: { "aria-label": "What is counted", "data-part": "histogram-metric" } });
  readonly #sites = el("select", { attrs: { "aria-label": "Parameter", "data-part": "histogram-site" } });
  readonly #note = el("span", { class: "note", attrs: { "data-part": "histogram-note" } });
  readonly #body = el("div", { class: "ridges", attrs: { "data-part": "ridges" } });
  readonly #download = downloadMenu("the histograms", {
    csv: () => (this.#shown === null ? null : csv(histogramRows(this.#shown))),
    svg: (font) => this.#svg(font),
    name: () => fileName(this.#shown?.metric ?? "", this.#shown?.site ?? ""),
  });
  readonly #form = el("select", {
    title: "Ridge plot or heat map of one parameter, or small heat maps of all parameters",
    attrs: { "aria-label": "How histograms are drawn", "data-part": "histogram-form" },
  });
  readonly #spread = new Spread((site) => {
    this.#sites.value = site;
    this.restore("heat");
    this.changed();
  });
  readonly root = el(
    "section",
    { class: "card", attrs: { "aria-label": "Histograms" } },
    el(
      "div",
      { class: "bar" },
      el("h2", { text: "Histograms" }),
      this.#metrics,
      this.#sites,
      this.#form,
      this.#note,
      this.#download,
    ),
    this.#body,
    this.#spread.root,
  );
  #items: readonly Listed[] = [];
  #shown: Histograms | null = null;
  #every: readonly SiteHistograms[] = [];

  constructor(private readonly changed: () => void) {
    this.root.hidden = true;
    this.#metrics.addEventListener("change", () => {
      this.#offerSites([]);
      this.changed();
    });
    this.#sites.addEventListener("change", () => this.changed());
    setOptions(this.#form, FORMS, "");
    this.#form.addEventListener("change", () => {
      this.restore(this.form);
      this.changed();
    });
  }

  get form(): HistogramForm {
    return HISTOGRAM_FORMS.find((form) => form === this.#form.value) ?? "";
  }

  /** How many histograms of each parameter are worth asking for. */
  get most(): number {
    const sites = this.#items.filter(({ metric }) => metric === this.metric).length;
    return Math.max(8, Math.min(MOST_COLUMNS, Math.floor(MOST_TOGETHER / Math.max(1, sites))));
  }

  restore(form: HistogramForm): void {
    this.#form.value = form;
    this.#spread.root.hidden = form !== "all";
    this.#body.hidden = this.#download.hidden = form === "all";
    this.#sites.disabled = form === "all";
  }

  get metric(): string {
    return this.#metrics.value;
  }

  get site(): string {
    return this.#sites.value;
  }

  /** Offers what there is; without anything the card is not there. */
  offer(items: readonly Listed[], pins: readonly string[]): void {
    this.#items = items;
    this.root.hidden = items.length === 0;
    const metrics = [...new Set(items.map(({ metric }) => metric))];
    const chosen = metrics.includes(this.metric) ? this.metric : (metrics[0] ?? "");
    setOptions(
      this.#metrics,
      metrics.map((metric) => ({ value: metric, label: metric.slice(metric.indexOf(".") + 1) })),
      chosen,
    );
    this.#offerSites(pins);
  }

  show(found: Histograms): void {
    this.#shown = found;
    this.draw();
  }

  showAll(sites: readonly SiteHistograms[]): void {
    this.#every = sites;
    this.draw();
  }

  /** Draws what is shown already once more, for another width or theme. */
  draw(): void {
    if (this.form === "all") return setText(this.#note, this.#spread.show(this.#every));
    const found = this.#shown;
    const room = this.#body.clientWidth - PADDING;
    const width = room - LEFT - RIGHT;
    if (found === null || width <= 0) return;
    if (this.#isHeat) return this.#drawHeat(found, room);
    const { low, high, ridges } = ridgeline(found.histograms, width, GAP, PEAK);
    const of = found.total > ridges.length ? `${ridges.length} of ${found.total} shown` : `${ridges.length} in all`;
    setText(this.#note, `${of}; each scaled to its own peak`);
    const bottom = PEAK + Math.max(0, ridges.length - 1) * GAP;
    const root = svg("svg", {
      width: room,
      height: bottom + AXIS,
      role: "img",
      "aria-label": `Histograms of ${found.site}`,
    });
    for (const ridge of ridges) {
      const group = svg("g", { transform: `translate(${LEFT} 0)` });
      const entries = `step ${formatStep(ridge.step)}: ${formatStep(ridge.entries)} entries, ${formatStep(ridge.nonfinite)} NaN or Inf`;
      group.append(
        svg("title", {}, entries),
        svg("path", { d: `M0 ${ridge.baseline}H${width}`, class: "base" }),
        svg("path", { d: ridge.path, class: "ridge" }),
        svg("text", { x: -8, y: ridge.baseline, "text-anchor": "end" }, formatStep(ridge.step)),
      );
      if (ridge.nonfinite > 0)
        group.append(
          svg("text", { x: width + 8, y: ridge.baseline, class: "bad" }, `${formatStep(ridge.nonfinite)} NaN/Inf`),
        );
      root.append(group);
    }
    for (const tick of linearTicks(low, high, Math.max(2, width / 110))) {
      const x = LEFT + ((tick - low) / (high - low)) * width;
      root.append(svg("text", { x, y: bottom + AXIS - 6, "text-anchor": "middle" }, formatNumber(tick, 3)));
    }
    this.#body.replaceChildren(root);
  }

  #svg(font: Font): string | null {
    if (this.#shown === null) return null;
    const quantity = this.metric.slice(this.metric.indexOf(".") + 1);
    return histogramFigure(this.#shown, this.#isHeat, onPaper("--accent"), quantity, font);
  }

  get #isHeat(): boolean {
    return this.form === "heat";
  }

  #drawHeat(found: Histograms, room: number): void {
    const { low, high, columns } = heatColumns(found.histograms, HEAT);
    const wide = (room - LEFT) / Math.max(1, columns.length);
    const every = Math.max(1, Math.ceil(STEP_LABEL / wide));
    setText(
      this.#note,
      `${columns.length} of ${formatStep(found.total)}; darker: more entries, each column scaled to its own peak`,
    );
    const root = svg("svg", {
      width: room,
      height: HEAT + AXIS + MARK,
      role: "img",
      "aria-label": `Histograms of ${found.site} as a heat map`,
    });
    for (const tick of linearTicks(low, high, 5))
      root.append(
        svg(
          "text",
          { x: LEFT - 8, y: MARK + HEAT - ((tick - low) / (high - low)) * HEAT + 4, "text-anchor": "end" },
          formatNumber(tick, 3),
        ),
      );
    columns.forEach(({ step, nonfinite, bins }, i) => {
      const x = LEFT + i * wide;
      const words = `step ${formatStep(step)}${nonfinite > 0 ? `, ${formatStep(nonfinite)} NaN or Inf` : ""}`;
      const group = svg(
        "g",
        { transform: `translate(${x.toFixed(1)} ${MARK})` },
        svg("title", {}, words),
        svg("rect", { class: "ground", width: wide, height: HEAT }),
      );
      for (const { top, height, share } of bins)
        group.append(
          svg("rect", {
            class: "bin",
            y: top.toFixed(1),
            width: (wide + 0.3).toFixed(1),
            height: height.toFixed(1),
            "fill-opacity": Math.sqrt(share).toFixed(3),
          }),
        );
      if (nonfinite > 0) group.append(svg("rect", { class: "broken", y: -MARK, width: wide, height: MARK - 2 }));
      if (i % every === 0) group.append(svg("text", { x: 0, y: HEAT + AXIS - 8 }, formatStep(step)));
      root.append(group);
    });
    this.#body.replaceChildren(root);
  }

  #offerSites(pins: readonly string[]): void {
    const sites = this.#items.filter(({ metric }) => metric === this.metric).map(({ site }) => site);
    const chosen = sites.includes(this.site) ? this.site : firstSite(sites, pins);
    setOptions(
      this.#sites,
      sites.map((site) => ({ value: site, label: site })),
      chosen,
    );
  }
}
