// The answer to "where is the gradient lost": one line from the loss to the input, steep where a block damps.
import { el, setText, svg } from "../dom";
import { formatNumber, formatStep, shorten, threeDigits } from "../model/format";
import type { MetricMoment } from "../model/health";
import { greatestDrop, leftAt, leftOver, type Left } from "../model/losing";
import type { Series } from "../model/series";

const [LEAST_WIDTH, HEIGHT, TOP, BOTTOM, LEFT, RIGHT, LETTERS] = [240, 210, 10, 26, 58, 14, 22];

export class LosingCard {
  readonly #title = el("h2", { text: "Gradient left, from the loss back" });
  readonly #note = el("span", { class: "note", attrs: { "data-part": "losing-note" } });
  readonly #chart = el("div", { class: "chart", attrs: { "data-part": "losing-chart" } });
  readonly root = el(
    "section",
    { class: "card line losing", attrs: { "data-part": "losing", "aria-label": "Gradient left by depth" } },
    el("div", { class: "bar" }, this.#title),
    this.#chart,
    el("div", { class: "keys" }, this.#note),
  );
  #earlier: readonly Left[] = [];
  #moment: MetricMoment | null = null;

  constructor(private readonly pick: (site: string) => void) {
    this.root.hidden = true;
  }

  /** Lines of other steps, faint behind that of the chosen one. */
  showEarlier(series: Series): void {
    this.#earlier = leftOver(series);
  }

  /** Keeps its place, or gives it up where a run holds nothing of this. */
  offer(held: boolean): void {
    this.root.hidden = !held;
    if (!held) [this.#earlier, this.#moment] = [[], null];
  }

  /** Draws what is shown already once more, for another width. */
  redraw(): void {
    if (this.#moment !== null) this.show(this.#moment);
  }

  show(moment: MetricMoment): void {
    this.#moment = moment;
    const { sites, left } = leftAt(moment);
    this.root.hidden = sites.length === 0;
    if (sites.length === 0) return;
    const width = Math.max(LEAST_WIDTH, this.#chart.clientWidth);
    const known = [left, ...this.#earlier].flatMap(({ nats }) =>
      nats.filter((value): value is number => value !== null),
    );
    const [low, high] = [known.reduce((a, b) => Math.min(a, b), -1), known.reduce((a, b) => Math.max(a, b), 1)];
    const x = (i: number): number => LEFT + ((i + 1) / Math.max(1, sites.length)) * (width - LEFT - RIGHT);
    const y = (nats: number): number => TOP + ((high - nats) / (high - low)) * (HEIGHT - TOP - BOTTOM);
    const path = ({ nats }: Left): string => {
      let [text, open] = [`M${LEFT} ${y(0).toFixed(1)}`, true];
      nats.forEach((value, i) => {
        if (value !== null) text += `${open ? "L" : "M"}${x(i).toFixed(1)} ${y(value).toFixed(1)}`;
        open = value !== null;
      });
      return text;
    };
    const ticks = axisTicks(low, high).map((value) => [
      svg("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }),
      svg("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, `\u00d7${formatNumber(Math.exp(value), 2)}`),
    ]);
    const drop = greatestDrop(sites, left);
    const at = drop === null ? -1 : sites.indexOf(drop.site);
    const dots = sites.flatMap((site, i) => {
      const value = left.nats[i] ?? null;
      if (value === null) return [];
      const dot = svg(
        "circle",
        {
          cx: x(i),
          cy: y(value),
          r: i === at ? 5 : sites.length > 60 ? 1.5 : 3,
          ...(i === at ? { class: "worst" } : {}),
        },
        svg("title", {}, `${site}: \u00d7${threeDigits(Math.exp(value))} of the gradient at the loss`),
      );
      dot.addEventListener("click", () => this.pick(site));
      return [dot];
    });
    const gone = sites.filter((_, i) => left.nats[i] === null).length;
    const names = [
      svg("text", { x: LEFT, y: HEIGHT - 6 }, "loss"),
      svg(
        "text",
        { x: width - RIGHT, y: HEIGHT - 6, "text-anchor": "end" },
        `\u2192 ${shorten(sites.at(-1) ?? "", LETTERS)}`,
      ),
    ];
    const spoken =
      drop === null ? "no gradient arrived" : `greatest change at ${drop.site}: \u00d7${threeDigits(drop.factor)}`;
    const picture = svg(
      "svg",
      {
        viewBox: `0 0 ${width} ${HEIGHT}`,
        role: "img",
        "aria-label": `Gradient left by depth at step ${left.step}; ${spoken}`,
      },
      ...ticks.flat(),
      ...this.#earlier.map((line) => svg("path", { class: "faint", d: path(line) })),
      svg("path", { d: path(left) }),
      ...dots,
      ...names,
    );
    this.#chart.replaceChildren(picture);
    setText(
      this.#note,
      `at step ${formatStep(left.step)}; ${spoken}${gone > 0 && drop !== null ? `; nothing arrives at ${formatStep(gone)} of ${formatStep(sites.length)}` : ""}${this.#earlier.length > 1 ? "; faint: other steps of the run" : ""}`,
    );
  }
}

/** Powers of ten between two ends, at most six, each a value in nats. */
function axisTicks(low: number, high: number): readonly number[] {
  const [from, to] = [Math.ceil(low / Math.LN10), Math.floor(high / Math.LN10)];
  const every = Math.max(1, Math.ceil((to - from + 1) / 6));
  // Over less than two powers of ten the ends say more.
  if (to - from < 1) return [low, 0, high];
  return Array.from({ length: Math.floor((to - from) / every) + 1 }, (_, i) => (to - i * every) * Math.LN10);
}
