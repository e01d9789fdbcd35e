// How every parameter is distributed over time: small heat maps side by side, values upwards, steps to the right.
import { el, keepChildren, setText } from "../dom";
import { formatNumber, formatStep } from "../model/format";
import { heatPixels, type Histogram, type SiteHistograms } from "../model/ridge";
import { cssVariable } from "../style";

const [ROWS, MARK] = [64, 3];

export class Spread {
  readonly root = el("div", { class: "spread", attrs: { "data-part": "spread" } });

  constructor(private readonly pick: (site: string) => void) {
    this.root.hidden = true;
  }

  /** Draws one heat map for each site; returns what they leave unsaid. */
  show(sites: readonly SiteHistograms[]): string {
    const [ground, bin, bad] = ["--grid", "--accent", "--bad"].map((name) => rgb(cssVariable(name)));
    keepChildren(
      this.root,
      sites,
      ({ site }) => site,
      ({ site }) => this.#make(site),
      (item, { histograms }) => paint(item, histograms, ground ?? [], bin ?? [], bad ?? []),
    );
    const steps = sites.flatMap(({ histograms }) => histograms.map(({ step }) => step));
    const [first, last] = [steps.reduce((a, b) => Math.min(a, b), Infinity), steps.reduce((a, b) => Math.max(a, b), 0)];
    const span = steps.length === 0 ? "none in these steps" : `steps ${formatStep(first)} to ${formatStep(last)}`;
    return `${formatStep(sites.length)} parameters, ${span}; darker: more entries, red: NaN or Inf`;
  }

  #make(site: string): HTMLElement {
    const name = el("button", { class: "link mono", text: site, title: site, attrs: { type: "button" } });
    name.addEventListener("click", () => this.pick(site));
    const ends = el("div", { class: "ends" }, el("span"), el("span"));
    const canvas = el("canvas", { attrs: { role: "img" } });
    return el(
      "div",
      { class: "small", attrs: { "data-name": site } },
      name,
      el("div", { class: "heat" }, ends, canvas),
    );
  }
}

function paint(
  item: HTMLElement,
  histograms: readonly Histogram[],
  ground: readonly number[],
  bin: readonly number[],
  bad: readonly number[],
): void {
  const { low, high, shares, broken } = heatPixels(histograms, ROWS);
  const canvas = item.querySelector("canvas");
  const [top, bottom] = item.querySelectorAll(".ends span");
  if (canvas === null || top === undefined || bottom === undefined) return;
  [canvas.width, canvas.height] = [Math.max(1, broken.length), ROWS + MARK];
  setText(top, formatNumber(high, 2));
  setText(bottom, formatNumber(low, 2));
  const bads = broken.filter(Boolean).length;
  const said = `${histograms.length} histograms from ${formatNumber(low, 2)} to ${formatNumber(high, 2)}`;
  canvas.setAttribute("aria-label", `${said}${bads > 0 ? `, ${bads} with NaN or Inf` : ""}`);
  const context = canvas.getContext("2d");
  if (context === null) return;
  const image = context.createImageData(canvas.width, canvas.height);
  for (let column = 0; column < broken.length; column++) {
    for (let row = 0; row < ROWS + MARK; row++) {
      const share = row < MARK ? 0 : (shares[column * ROWS + row - MARK] ?? 0) / 255;
      const at = 4 * (row * canvas.width + column);
      const full = row < MARK && broken[column] === true ? bad : null;
      for (let k = 0; k < 3; k++)
        image.data[at + k] = full?.[k] ?? Math.round((ground[k] ?? 0) + share * ((bin[k] ?? 0) - (ground[k] ?? 0)));
      image.data[at + 3] = 255;
    }
  }
  context.putImageData(image, 0, 0);
}

function rgb(colour: string): readonly number[] {
  return [1, 3, 5].map((at) => Number.parseInt(colour.slice(at, at + 2), 16));
}
