// What the colours mean, in numbers.
import { el, sharpContext } from "../dom";
import { css, type ColourScale } from "../model/colour";
import { formatNumber, unitText } from "../model/format";
import type { MetricSpec } from "../schema";

const [WIDTH, HEIGHT] = [220, 10];

export function legend(spec: MetricSpec, scale: ColourScale, compared = false): HTMLElement {
  const ramp = el("canvas");
  const context = sharpContext(ramp, WIDTH, HEIGHT);
  for (let x = 0; x < WIDTH; x++) {
    context.fillStyle = css(scale.words[Math.round((x / (WIDTH - 1)) * (scale.words.length - 1))] ?? 0);
    context.fillRect(x, 0, 1, HEIGHT);
  }
  const [left, right] = scale.diverging ? (compared ? ["less", "more"] : ["damps", "amplifies"]) : ["", ""];
  const [least, most] = [spec.low === scale.low ? "" : "\u2264 ", spec.high === scale.high ? "" : "\u2265 "];
  return el(
    "div",
    { class: "legend" },
    el(
      "span",
      { class: "ramp" },
      el("span", { text: `${left} ${least}${formatNumber(scale.low, 3)}`.trim() }),
      ramp,
      el("span", { text: `${most}${formatNumber(scale.high, 3)} ${unitText(spec.unit)} ${right}`.trim() }),
    ),
    scale.diverging ? el("span", { text: compared ? "white: equal" : "white keeps" }) : null,
    key("background:var(--missing)", "nothing arrived"),
    key("", "NaN or Inf", "hatch"),
  );
}

function key(style: string, text: string, name = ""): HTMLElement {
  const swatch = el("i", { class: name });
  swatch.style.cssText = style;
  return el("span", { class: "key" }, swatch, text);
}
