// The answer to "where is the gradient lost": a line from the loss to the input, steep where a block damps, for each run.
import { el, svg } from "../dom";
import { formatNumber, shorten, threeDigits } from "../model/format";
import { greatestDrop, isBorder, isNumber, leftOver, leftText, type Left, type RunLeft } from "../model/losing";
import type { Series } from "../model/series";

const [LEAST_WIDTH, HEIGHT, TOP, BOTTOM, LEFT, RIGHT, LETTERS] = [240, 210, 10, 26, 58, 14, 22];

export class LosingCard {
  readonly #title = el("h2", { text: "Gradient remaining, from the loss back" });
  readonly #keys = el("div", { class: "keys", attrs: { "data-part": "losing-note" } });
  readonly #chart = el("div", { class: "chart", attrs: { "data-part": "losing-chart" } });
  readonly root = el(
    "section",
    { class: "card line losing", attrs: { "data-part": "losing", "aria-label": "Gradient remaining by depth" } },
    el("div", { class: "bar" }, this.#title),
    this.#chart,
    this.#keys,
  );
  #earlier: readonly Left[] = [];
  #runs: readonly RunLeft[] = [];

  constructor(private readonly pick: (site: string) => void) {
    this.root.hidden = true;
  }

  /** Lines of other steps, faint behind that of the chosen one, where no other run is compared. */
  showEarlier(series: Series): void {
    this.#earlier = leftOver(series);
  }

  /** Keeps its place, or gives it up where a run holds nothing of this. */
  offer(held: boolean): void {
    this.root.hidden = !held;
    if (!held) this.#earlier = this.#runs = [];
  }

  /** Draws what is shown already once more, for another width. */
  redraw(): void {
    if (this.#runs.length > 0) this.show(this.#runs);
  }

  /** Every run has a hue and the whole width, whatever its depth. */
  show(runs: readonly RunLeft[]): void {
    this.#runs = runs;
    this.root.hidden = runs.every(({ sites }) => sites.length === 0);
    if (this.root.hidden) return;
    const single = runs.length === 1;
    const faint = single ? this.#earlier.filter(({ nats }) => nats.some(isNumber)) : [];
    const width = Math.max(LEAST_WIDTH, this.#chart.clientWidth);
    const known = [...runs.map(({ left }) => left), ...faint].flatMap(({ nats }) => nats.filter(isNumber));
    const arrived = known.length > 0;
    const low = known.reduce((a, b) => Math.min(a, b), -Math.LN2);
    const high = known.reduce((a, b) => Math.max(a, b), Math.LN2);
    const y = (nats: number): number => TOP + ((high - nats) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const x = (i: number, of: number): number => LEFT + ((i + 1) / Math.max(1, of)) * (width - LEFT - RIGHT);
    const path = (left: Left): string => {
      const { nats } = left;
      let [text, open] = [`M${LEFT} ${y(0).toFixed(1)}`, true];
      nats.forEach((value, i) => {
        if (isNumber(value)) text += `${open ? "L" : "M"}${x(i, nats.length).toFixed(1)} ${y(value).toFixed(1)}`;
        open = isNumber(value) || isBorder(left, i);
        if (isBorder(left, i)) text += `M${x(i, nats.length).toFixed(1)} ${y(0).toFixed(1)}`;
      });
      return text;
    };
    const ticks = axisTicks(low, high).map((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, `\u00d7${formatNumber(Math.exp(value), 2)}`),
    ]);
    const lines = runs.map((run, number) => {
      const { label, sites, left } = run;
      const at = sites.indexOf(greatestDrop(sites, left)?.site ?? "");
      const radius = sites.length > 60 ? 1.5 : 3;
      const marks = sites.map((site, i) => {
        const [value, name] = [left.nats[i] ?? null, single ? site : `${label}, ${site}`];
        // Where nothing arrived there is no height: a mark on the ground, in the colour that says so everywhere.
        return !isNumber(value)
          ? svg(
              "rect",
              {
                class: value !== null ? "broken" : isBorder(left, i) ? "border" : "none",
                x: x(i, sites.length) - 3,
                y: HEIGHT - BOTTOM - 6 * number - 6,
                width: 6,
                height: 5,
              },
              svg(
                "title",
                {},
                `${name}: ${value !== null ? formatNumber(value) : isBorder(left, i) ? "start of another chain" : "nothing arrived"}`,
              ),
            )
          : svg(
              "circle",
              { cx: x(i, sites.length), cy: y(value), r: i === at ? 5 : radius, class: i === at ? "worst" : "" },
              svg("title", {}, `${name}: \u00d7${threeDigits(Math.exp(value))} of the gradient at the loss`),
            );
      });
      marks.forEach((mark, i) => mark.addEventListener("click", () => this.pick(sites[i] ?? "")));
      return svg("g", { class: hue(number, single) }, svg("path", { d: path(left) }), ...marks);
    });
    const ends = single ? `\u2192 ${shorten(runs[0]?.sites.at(-1) ?? "", LETTERS)}` : "\u2192 first block";
    const picture = svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${HEIGHT}`,
        role: "img",
        "aria-label": `Gradient remaining by depth; ${runs.map((run) => said(run, single)).join("; ")}`,
      },
      ...(arrived ? ticks.flat() : []),
      ...faint.map((line) => svg("path", { class: "faint", d: path(line) })),
      ...lines,
      svg("text", { x: LEFT, y: HEIGHT - 6 }, "loss"),
      svg("text", { x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" }, ends),
    );
    const gone = runs.some(({ left }) => left.nats.some((value, i) => value === null && !isBorder(left, i)));
    this.#chart.replaceChildren(
      picture,
      ...(arrived
        ? []
        : [el("p", { text: gone ? "No gradient arrived at the last block." : "The gradient is NaN or Inf." })]),
    );
    const more = faint.length > 1 ? "; faint: other steps of the run" : "";
    this.#keys.replaceChildren(
      ...runs.map((run, number) =>
        single
          ? el("span", { class: "note", text: `${leftText(run)}${more}` })
          : el("span", { class: `runkey ${hue(number, single)}` }, el("i"), el("span", { text: said(run, single) })),
      ),
      ...(gone ? [el("span", { class: "runkey none" }, el("i"), "nothing arrived")] : []),
    );
  }
}

function hue(number: number, single: boolean): string {
  return single ? "" : number === 0 ? "own" : "others";
}

function said(run: RunLeft, single: boolean): string {
  return single ? leftText(run) : `${run.label}: ${leftText(run)}`;
}

/** Powers of ten between two ends, at most six, each a value in nats. */
function axisTicks(low: number, high: number): readonly number[] {
  const [from, to] = [Math.ceil(low / Math.LN10), Math.floor(high / Math.LN10)];
  const every = Math.max(1, Math.ceil((to - from + 1) / 6));
  // Over less than two powers of ten the ends say more.
  if (to - from < 1) return [low, 0, high];
  return Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, i) => (to - i * every) * Math.LN10);
}
