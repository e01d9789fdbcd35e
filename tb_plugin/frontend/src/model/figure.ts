// Figures as papers print them: black on white, every axis with its quantity and unit, no heading inside.
import { formatNumber, formatStep, linearTicks } from "./format";
import { heatColumns, ridgeline, type Histograms } from "./ridge";

export type Font = "sans" | "serif";

const FAMILIES: Readonly<Record<Font, string>> = {
  sans: "Helvetica, Arial, Liberation Sans, sans-serif",
  serif: "Times New Roman, Nimbus Roman, Liberation Serif, serif",
};

/** A place on an axis and what is written there. */
export interface Tick {
  readonly at: number;
  readonly text: string;
}

export interface LineFigure {
  /** What it shows; for programs that read pictures aloud, not drawn. */
  readonly name: string;
  readonly xs: ArrayLike<number>;
  readonly xLabel: string;
  readonly xTicks: readonly Tick[];
  readonly yLabel: string;
  readonly curves: readonly {
    readonly label: string;
    readonly colour: string;
    readonly values: readonly (number | null | undefined)[];
    readonly low?: readonly (number | null | undefined)[];
    readonly high?: readonly (number | null | undefined)[];
    readonly dashed?: boolean;
  }[];
  readonly log: boolean;
  readonly range: readonly [number, number];
  /** Values that a dashed line marks. */
  readonly marks: readonly number[];
}

export interface MapFigure {
  readonly name: string;
  /** The painted map as a data address. */
  readonly image: string;
  readonly width: number;
  readonly height: number;
  readonly range: readonly [number, number];
  /** Layers, by their distance from the top. */
  readonly rows: readonly Tick[];
  readonly colours: { readonly label: string; readonly ramp: readonly string[]; readonly ticks: readonly Tick[] };
}

const [WIDTH, HEIGHT, SIZE, LETTER, TICK, LINE] = [440, 250, 12, 6.4, 4, 16];
const [TOP, RIGHT, X_AXIS, Y_LABEL, MOST_LETTERS] = [12, 16, 46, 22, 30];
const [BAR, BAR_GAP, PEAK, RIDGE_GAP] = [12, 16, 40, 13];

export function lineFigure(picture: LineFigure, font: Font): string {
  const { range, log, curves } = picture;
  const scale = (value: number): number => (log ? Math.log10(value) : value);
  const known = curves.flatMap(({ values, low = [], high = [] }) => [...values, ...low, ...high]).filter(isNumber);
  const [least, most] = [
    known.reduce((a, b) => Math.min(a, b), Infinity),
    known.reduce((a, b) => Math.max(a, b), -Infinity),
  ];
  const [from, to] = known.length === 0 ? [0, 1] : [scale(least), scale(most)];
  const room = to > from ? 0.04 * (to - from) : 1;
  const [low, high] = [from - room, to + room];
  const ticks = valueTicks(low, high, log);
  const left = Y_LABEL + widest(ticks) + TICK + 6;
  const x = (value: number): number => left + ((value - range[0]) / (range[1] - range[0])) * WIDTH;
  const y = (value: number): number => TOP + HEIGHT - ((scale(value) - low) / (high - low)) * HEIGHT;
  const place = (c: number, value: number): string => `${round(x(picture.xs[c] ?? 0))} ${round(y(value))}`;
  const path = (values: readonly (number | null | undefined)[]): string => {
    let [text, open] = ["", false];
    values.forEach((value, c) => {
      if (value === undefined) return;
      if (value !== null) text += `${open ? "L" : "M"}${place(c, value)}`;
      open = value !== null;
    });
    return text;
  };
  const bands = curves.map(({ low: lows = [], high: highs = [], colour }) => {
    const there = highs.flatMap((value, c) => (isNumber(value) && isNumber(lows[c]) ? [c] : []));
    if (there.length < 2) return "";
    const edges = [...there.map((c) => place(c, highs[c] ?? 0)), ...there.reverse().map((c) => place(c, lows[c] ?? 0))];
    return `<path d="M${edges.join("L")}Z" fill="${escape(colour)}" fill-opacity=".2"/>`;
  });
  const marks = picture.marks
    .filter((mark) => scale(mark) > low && scale(mark) < high)
    .map((mark) => `<path d="M${left} ${round(y(mark))}h${WIDTH}" stroke="#888" stroke-dasharray="4 3"/>`);
  const lines = curves.map(
    ({ values, colour, dashed }) =>
      `<path d="${path(values)}" fill="none" stroke="${escape(colour)}" stroke-width="1.4"${dashed ? ' stroke-dasharray="5 3"' : ""}/>`,
  );
  const named = curves.filter(({ label }) => label !== "");
  const bottom = TOP + HEIGHT + X_AXIS;
  const legend = named.map(({ label, colour, dashed }, i) => {
    const at = bottom + i * LINE + 6;
    const key = `<path d="M${left} ${at - 4}h20" stroke="${escape(colour)}" stroke-width="1.8"${dashed ? ' stroke-dasharray="5 3"' : ""}/>`;
    return `${key}${words(left + 26, at, label)}`;
  });
  return frame(left + WIDTH + RIGHT, bottom + named.length * LINE, picture.name, font, [
    `<clipPath id="plot"><rect x="${left}" y="${TOP}" width="${WIDTH}" height="${HEIGHT}"/></clipPath>`,
    `<g clip-path="url(#plot)">${[...bands, ...marks, ...lines].join("")}</g>`,
    axes(left, WIDTH, HEIGHT),
    ...xTicks(
      picture.xTicks.map(({ at, text }) => ({ at: x(at), text })),
      TOP + HEIGHT,
    ),
    ...yTicks(
      ticks.map(({ at, text }) => ({ at: TOP + HEIGHT - ((at - low) / (high - low)) * HEIGHT, text })),
      left,
    ),
    xLabel(left, WIDTH, TOP + HEIGHT, picture.xLabel),
    yLabel(TOP + HEIGHT / 2, picture.yLabel),
    ...legend,
  ]);
}

export function mapFigure(picture: MapFigure, font: Font): string {
  const { width, height, range, rows, colours } = picture;
  const left = 8 + widest(rows) + TICK + 4;
  const x = (step: number): number => left + ((step - range[0]) / (range[1] - range[0])) * width;
  const steps = linearTicks(range[0], range[1], 5).filter(Number.isInteger);
  const bar = left + width + BAR_GAP;
  const swatch = height / colours.ramp.length;
  const ramp = colours.ramp.map(
    (colour, i) =>
      `<rect x="${bar}" y="${round(TOP + height - (i + 1) * swatch)}" width="${BAR}" height="${round(swatch + 0.6)}" fill="${escape(colour)}"/>`,
  );
  const ends = colours.ticks.map(({ at, text }) => {
    const y = round(TOP + (1 - at) * height);
    return `<path d="M${bar + BAR} ${y}h${TICK}" stroke="#000"/>${words(bar + BAR + TICK + 3, y + 4, text)}`;
  });
  const after = bar + BAR + TICK + 3 + widest(colours.ticks) + LINE;
  return frame(after + 6, TOP + height + X_AXIS, picture.name, font, [
    `<image x="${left}" y="${TOP}" width="${width}" height="${height}" preserveAspectRatio="none" href="${escape(picture.image)}"/>`,
    `<rect x="${left}" y="${TOP}" width="${width}" height="${height}" fill="none" stroke="#000" stroke-width=".8"/>`,
    ...yTicks(
      rows.map(({ at, text }) => ({ at: TOP + at, text })),
      left,
    ),
    ...xTicks(
      steps.map((step) => ({ at: x(step), text: formatStep(step) })),
      TOP + height,
    ),
    xLabel(left, width, TOP + height, "optimizer step"),
    ...ramp,
    `<rect x="${bar}" y="${TOP}" width="${BAR}" height="${height}" fill="none" stroke="#000" stroke-width=".6"/>`,
    ...ends,
    turned(after - 2, TOP + height / 2, colours.label),
  ]);
}

/** Ridges, or values upwards and steps to the right; NaN and Inf are counted beside each ridge and marked above a column. */
export function histogramFigure(
  found: Histograms,
  heat: boolean,
  colour: string,
  quantity: string,
  font: Font,
): string {
  const { low, high, ridges } = ridgeline(found.histograms, WIDTH, RIDGE_GAP, PEAK);
  const name = `${found.metric} of ${found.site}`;
  if (heat) return histogramHeat(found, colour, quantity, name, font);
  const height = PEAK + Math.max(0, ridges.length - 1) * RIDGE_GAP;
  const left = Y_LABEL + widest(ridges.map(({ step }) => ({ text: formatStep(step) }))) + TICK + 6;
  const parts = ridges.map(({ path, baseline, nonfinite }) => {
    const broken = nonfinite === 0 ? "" : words(WIDTH + 6, baseline, `${formatStep(nonfinite)} NaN/Inf`);
    return `<path d="${path}" fill="${escape(colour)}" fill-opacity=".25" stroke="${escape(colour)}" stroke-width=".8"/>${broken}`;
  });
  const every = Math.max(1, Math.ceil(LINE / RIDGE_GAP));
  const steps = ridges
    .filter((_, i) => i % every === 0)
    .map(({ step, baseline }) => ({ at: TOP + baseline, text: formatStep(step) }));
  const x = (value: number): number => left + ((value - low) / (high - low)) * WIDTH;
  const broken = ridges.map(({ nonfinite }) => ({ text: nonfinite === 0 ? "" : `${formatStep(nonfinite)} NaN/Inf` }));
  return frame(left + WIDTH + RIGHT + widest(broken), TOP + height + X_AXIS, name, font, [
    `<g transform="translate(${left} ${TOP})">${parts.join("")}</g>`,
    axes(left, WIDTH, height),
    ...yTicks(steps, left),
    ...xTicks(
      linearTicks(low, high, 6).map((at) => ({ at: x(at), text: formatNumber(at, 3) })),
      TOP + height,
    ),
    xLabel(left, WIDTH, TOP + height, quantity),
    yLabel(TOP + height / 2, "optimizer step"),
  ]);
}

function histogramHeat(found: Histograms, colour: string, quantity: string, name: string, font: Font): string {
  const { low, high, columns } = heatColumns(found.histograms, HEIGHT);
  const values = linearTicks(low, high, 5).map((at) => ({ at, text: formatNumber(at, 3) }));
  const left = Y_LABEL + widest(values) + TICK + 6;
  const wide = WIDTH / Math.max(1, columns.length);
  const every = Math.max(1, Math.ceil(56 / wide));
  const cells = columns.flatMap(({ bins, nonfinite }, i) => {
    const at = `x="${round(left + i * wide)}" width="${round(wide + 0.3)}"`;
    const bars = bins.map(
      ({ top, height, share }) =>
        `<rect ${at} y="${round(TOP + top)}" height="${round(height + 0.3)}" fill="${escape(colour)}" fill-opacity="${Math.sqrt(share).toFixed(2)}"/>`,
    );
    return nonfinite === 0 ? bars : [...bars, `<rect ${at} y="${TOP - 6}" height="4" fill="#c02a34"/>`];
  });
  const steps = columns.flatMap(({ step }, i) =>
    i % every === 0 ? [{ at: left + (i + 0.5) * wide, text: formatStep(step) }] : [],
  );
  return frame(left + WIDTH + RIGHT, TOP + HEIGHT + X_AXIS, name, font, [
    ...cells,
    axes(left, WIDTH, HEIGHT),
    ...xTicks(steps, TOP + HEIGHT),
    ...yTicks(
      values.map(({ at, text }) => ({ at: TOP + HEIGHT - ((at - low) / (high - low)) * HEIGHT, text })),
      left,
    ),
    xLabel(left, WIDTH, TOP + HEIGHT, "optimizer step"),
    yLabel(TOP + HEIGHT / 2, quantity),
  ]);
}

/** Ticks of an axis of values: whole powers of ten where a logarithmic one spans two of them. */
function valueTicks(low: number, high: number, log: boolean): readonly Tick[] {
  if (!log) return linearTicks(low, high, 5).map((at) => ({ at, text: formatNumber(at, 3) }));
  const powers = linearTicks(low, high, 6).filter(Number.isInteger);
  if (powers.length > 1) return powers.map(tenTo);
  return linearTicks(10 ** low, 10 ** high, 4)
    .filter((value) => value > 0)
    .map((value) => ({ at: Math.log10(value), text: formatNumber(value, 3) }));
}

function tenTo(power: number): Tick {
  const digits = "\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079";
  const raised = Array.from(String(power), (letter) => (letter === "-" ? "\u207b" : (digits[Number(letter)] ?? "")));
  return { at: power, text: power === 0 ? "1" : `10${raised.join("")}` };
}

function axes(left: number, width: number, height: number): string {
  return `<path d="M${left} ${TOP}v${height}h${width}" fill="none" stroke="#000" stroke-width=".8"/>`;
}

function xTicks(ticks: readonly Tick[], y: number): readonly string[] {
  return ticks.map(
    ({ at, text }) =>
      `<path d="M${round(at)} ${y}v${TICK}" stroke="#000" stroke-width=".8"/>${words(at, y + TICK + SIZE, text, "middle")}`,
  );
}

function yTicks(ticks: readonly Tick[], x: number): readonly string[] {
  return ticks.map(
    ({ at, text }) =>
      `<path d="M${x} ${round(at)}h${-TICK}" stroke="#000" stroke-width=".8"/>${words(x - TICK - 3, at + 4, text, "end")}`,
  );
}

function xLabel(left: number, width: number, bottom: number, text: string): string {
  return words(left + width / 2, bottom + X_AXIS - 10, text, "middle");
}

function yLabel(middle: number, text: string): string {
  return turned(SIZE + 2, middle, text);
}

function turned(x: number, y: number, text: string): string {
  return `<text transform="translate(${round(x)} ${round(y)}) rotate(-90)" text-anchor="middle">${escape(text)}</text>`;
}

function words(x: number, y: number, text: string, anchor = "start"): string {
  return `<text x="${round(x)}" y="${round(y)}" text-anchor="${anchor}">${escape(text)}</text>`;
}

/** About how wide the longest of some texts is: what draws the picture is not there to measure it. */
function widest(ticks: readonly { readonly text: string }[]): number {
  return Math.ceil(
    LETTER *
      Math.min(
        MOST_LETTERS,
        ticks.reduce((most, { text }) => Math.max(most, text.length), 0),
      ),
  );
}

function frame(width: number, height: number, name: string, font: Font, parts: readonly string[]): string {
  const [w, h] = [Math.ceil(width), Math.ceil(height)];
  const head = `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}" font-family="${FAMILIES[font]}" font-size="${SIZE}" fill="#000">`;
  return `${head}<title>${escape(name)}</title><rect width="100%" height="100%" fill="#fff"/>${parts.join("")}</svg>`;
}

function isNumber(value: number | null | undefined): value is number {
  return typeof value === "number";
}

function escape(text: string): string {
  const plain = text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, "");
  return plain.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
