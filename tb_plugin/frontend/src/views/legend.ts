// What the colours mean, in numbers, and which values the ends of the ramp stand for.
import { el, setOptions, setText, sharpContext } from "../dom";
import { COLOUR_RANGES, css, type ColourRange, type ColourScale } from "../model/colour";
import { formatNumber, missingText, unitText } from "../model/format";
import type { MetricSpec } from "../schema";

const [WIDTH, HEIGHT] = [220, 10];
const UNREAD =
  "A reading is shown until the next one, but at most for twice the distance between the surrounding readings";
const WORDS = { auto: "automatic", fixed: "fixed", robust: "1st to 99th percentile", typed: "typed" } as const;

export class Legend {
  readonly #ramp = el("canvas", { attrs: { width: String(WIDTH), height: String(HEIGHT) } });
  readonly #low = el("span");
  readonly #high = el("span");
  readonly #middle = el("span");
  readonly #missing = el("span");
  readonly #ranges = el("select", {
    title: "Values at the ends of the color scale",
    attrs: { "aria-label": "Range of the color scale", "data-part": "colours" },
  });
  readonly #from = el("input", {
    class: "end",
    attrs: { "aria-label": "Low end of the color scale", inputmode: "decimal", "data-part": "colour-low" },
  });
  readonly #to = el("input", {
    class: "end",
    attrs: { "aria-label": "High end of the color scale", inputmode: "decimal", "data-part": "colour-high" },
  });
  readonly #typed = el("span", { class: "ends" }, this.#from, "\u2013", this.#to);
  readonly root: HTMLElement;
  #shown = "";
  #ends: readonly [number, number] = [0, 1];

  constructor(chosen: (range: ColourRange) => void, second: boolean) {
    setOptions(
      this.#ranges,
      COLOUR_RANGES.map((value) => ({ value, label: WORDS[value] })),
      "auto",
    );
    this.#typed.hidden = true;
    this.#ranges.addEventListener("change", () => {
      const word = COLOUR_RANGES.find((value) => value === this.#ranges.value) ?? "auto";
      chosen(word === "typed" ? this.#ends : word);
    });
    for (const input of [this.#from, this.#to]) {
      input.addEventListener("change", () => {
        const ends = [Number(this.#from.value), Number(this.#to.value)] as const;
        const sound = ends.every(Number.isFinite) && ends[0] < ends[1];
        for (const field of [this.#from, this.#to]) field.setAttribute("aria-invalid", String(!sound));
        if (sound) chosen(ends);
      });
    }
    this.root = el(
      "div",
      { class: "legend" },
      el("span", { class: "ramp" }, this.#low, this.#ramp, this.#high),
      this.#middle,
      el("span", { class: "key" }, swatch("background:var(--missing)"), this.#missing),
      key("", "NaN or Inf", "hatch"),
      key("", "not read", "unread", UNREAD),
      ...(second ? [] : [el("label", { class: "range" }, "colours", this.#ranges), this.#typed]),
    );
  }

  clear(): void {
    this.#shown = "";
  }

  show(
    spec: MetricSpec & { readonly compared?: boolean },
    scale: ColourScale,
    range: ColourRange,
    dark: boolean,
  ): void {
    const shown = JSON.stringify([spec.name, spec.compared, scale.low, scale.high, range, dark]);
    if (shown === this.#shown) return;
    this.#shown = shown;
    const compared = spec.compared === true;
    setText(this.#missing, missingText(spec.name));
    const context = sharpContext(this.#ramp, WIDTH, HEIGHT);
    for (let x = 0; x < WIDTH; x++) {
      context.fillStyle = css(scale.words[Math.round((x / (WIDTH - 1)) * (scale.words.length - 1))] ?? 0);
      context.fillRect(x, 0, 1, HEIGHT);
    }
    const [left, right] = scale.diverging ? (compared ? ["less", "more"] : ["damps", "amplifies"]) : ["", ""];
    const [least, most] = [spec.low === scale.low ? "" : "\u2264 ", spec.high === scale.high ? "" : "\u2265 "];
    setText(this.#low, `${left} ${least}${formatNumber(scale.low, 3)}`.trim());
    setText(this.#high, `${most}${formatNumber(scale.high, 3)} ${unitText(spec.unit)} ${right}`.trim());
    const white = dark ? "dark" : "white";
    setText(this.#middle, scale.diverging ? (compared ? `${white}: equal` : `${white} keeps`) : "");
    this.#ends = [scale.low, scale.high];
    const typed = typeof range !== "string";
    this.#ranges.value = typed ? "typed" : range;
    this.#typed.hidden = !typed;
    const automatic = this.#ranges.options[0];
    if (automatic !== undefined)
      automatic.text = range === "auto" && scale.robust ? "automatic: percentiles" : "automatic";
    if (typed && document.activeElement !== this.#from && document.activeElement !== this.#to) {
      [this.#from.value, this.#to.value] = [
        String(Number(scale.low.toPrecision(4))),
        String(Number(scale.high.toPrecision(4))),
      ];
    }
  }
}

function key(style: string, text: string, name = "", title = ""): HTMLElement {
  return el("span", { class: "key", title }, swatch(style, name), text);
}

function swatch(style: string, name = ""): HTMLElement {
  const made = el("i", { class: name });
  made.style.cssText = style;
  return made;
}
