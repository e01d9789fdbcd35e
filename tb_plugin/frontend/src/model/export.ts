// What is shown, as text to take away: csv for tables, svg for pictures.
import { formatNumber, formatStep, linearTicks } from "./format";
import { ridgeline, type Histograms } from "./ridge";
import { cellKind, type Series } from "./series";

export type CsvCell = string | number | null;

export interface Theme {
  readonly text: string;
  readonly ground: string;
  readonly line: string;
}

export interface MapPicture {
  readonly title: string;
  readonly caption: string;
  readonly names: readonly { readonly text: string; readonly y: number }[];
  /** The painted map as a data address. */
  readonly image: string;
  readonly width: number;
  readonly height: number;
  readonly range: readonly [number, number];
  readonly theme: Theme;
  /** Colours from low to high, and what the two ends mean. */
  readonly ramp: { readonly colours: readonly string[]; readonly low: string; readonly high: string };
}

export interface LinePicture {
  readonly title: string;
  /** Where the values lie, and how the axis is written. */
  readonly xs: ArrayLike<number>;
  readonly axis: string;
  tick(x: number): string;
  readonly curves: readonly {
    readonly label: string;
    readonly colour: string;
    readonly values: readonly (number | null | undefined)[];
  }[];
  readonly log: boolean;
  readonly range: readonly [number, number];
  readonly theme: Theme;
}

/** Rows as RFC 4180 wants them. A text that a spreadsheet would run as a formula is made plain by an apostrophe. */
export function csv(rows: readonly (readonly CsvCell[])[]): string {
  return rows.map((row) => `${row.map(csvCell).join(",")}\r\n`).join("");
}

/** A series, one line per site and column; missing is empty, NaN and the infinities are named. */
export function seriesRows(series: Series): readonly (readonly CsvCell[])[] {
  const rows: CsvCell[][] = [["site", "first_step", "last_step", "wall_time", ...series.blocks.keys()]];
  series.sites.forEach((site, row) => {
    for (let c = 0; c < series.columns; c++) {
      const at = row * series.columns + c;
      const values = [...series.blocks.values()].map(({ values, bits }) =>
        cellKind(bits[at] ?? 0) === "missing" ? null : (values[at] ?? null),
      );
      rows.push([site, series.first[c] ?? null, series.last[c] ?? null, series.wall[c] ?? null, ...values]);
    }
  });
  return rows;
}

/** A name that every file system takes. */
export function fileName(...parts: readonly string[]): string {
  return parts
    .join("_")
    .replace(/[^\w.-]+/g, "-")
    .slice(0, 120);
}

const [LEFT, TOP, BOTTOM, RIGHT] = [190, 34, 62, 20];

export function mapSvg(picture: MapPicture): string {
  const { width, height, range, theme } = picture;
  const ticks = linearTicks(range[0], range[1], Math.max(2, width / 110)).filter(Number.isInteger);
  const x = (step: number): number => LEFT + ((step - range[0]) / (range[1] - range[0])) * width;
  const names = picture.names.map(
    ({ text, y }) =>
      `<text x="${LEFT - 8}" y="${round(TOP + y)}" text-anchor="end" dominant-baseline="middle">${escape(text)}</text>`,
  );
  const axis = ticks.map(
    (tick) =>
      `<text x="${round(x(tick))}" y="${TOP + height + 18}" text-anchor="middle">${escape(formatStep(tick))}</text>`,
  );
  const image = `<image x="${LEFT}" y="${TOP}" width="${width}" height="${height}" preserveAspectRatio="none" href="${escape(picture.image)}"/>`;
  const caption = `<text x="${LEFT}" y="${TOP + height + 40}">${escape(`optimizer step; ${picture.caption}`)}</text>`;
  const { colours, low, high } = picture.ramp;
  const [right, line] = [LEFT + width, TOP + height + 40];
  const swatches = colours.map(
    (colour, i) =>
      `<rect x="${right - 160 + i * (100 / colours.length)}" y="${line - 10}" width="${100 / colours.length + 0.5}" height="10" fill="${escape(colour)}"/>`,
  );
  const ends = `<text x="${right - 166}" y="${line}" text-anchor="end">${escape(low)}</text><text x="${right - 54}" y="${line}">${escape(high)}</text>`;
  return frame(LEFT + width + RIGHT, TOP + height + BOTTOM, picture.title, theme, [
    image,
    ...names,
    ...axis,
    caption,
    ...swatches,
    ends,
  ]);
}

export function lineSvg(picture: LinePicture, width = 720, height = 320): string {
  const { range, theme, log } = picture;
  const known = picture.curves.flatMap(({ values }) =>
    values.filter((value): value is number => typeof value === "number"),
  );
  const scale = (value: number): number => (log ? Math.log10(value) : value);
  const [least, most] = [
    known.reduce((a, b) => Math.min(a, b), Infinity),
    known.reduce((a, b) => Math.max(a, b), -Infinity),
  ].map(scale);
  const [low, high] = (most ?? 0) > (least ?? 0) ? [least ?? 0, most ?? 1] : [(least ?? 0) - 1, (least ?? 0) + 1];
  const [left, plot, deep] = [70, width - 90, height - 110];
  const x = (step: number): number => left + ((step - range[0]) / (range[1] - range[0])) * plot;
  const y = (value: number): number => TOP + deep - ((scale(value) - low) / (high - low)) * deep;
  const rows = linearTicks(low, high, 5).map((tick) => (log ? 10 ** tick : tick));
  const grid = rows.map(
    (tick) =>
      `<path d="M${left} ${round(y(tick))}h${plot}" stroke="${escape(theme.line)}"/><text x="${left - 8}" y="${round(y(tick))}" text-anchor="end" dominant-baseline="middle">${escape(formatNumber(tick, 3))}</text>`,
  );
  const axis = linearTicks(range[0], range[1], 4)
    .filter(Number.isInteger)
    .map(
      (tick) =>
        `<text x="${round(x(tick))}" y="${TOP + deep + 18}" text-anchor="middle">${escape(picture.tick(tick))}</text>`,
    );
  const curves = picture.curves.map((curve, i) => {
    let path = "";
    let open = false;
    curve.values.forEach((value, c) => {
      if (value === undefined) return;
      if (value !== null) path += `${open ? "L" : "M"}${round(x(picture.xs[c] ?? 0))} ${round(y(value))}`;
      open = value !== null;
    });
    const label = `<text x="${left + 16}" y="${TOP + deep + 40 + i * 16}">${escape(curve.label)}</text><path d="M${left} ${TOP + deep + 36 + i * 16}h10" stroke="${escape(curve.colour)}" stroke-width="3"/>`;
    return `<path d="${path}" fill="none" stroke="${escape(curve.colour)}" stroke-width="1.6"/>${curve.label === "" ? "" : label}`;
  });
  return frame(width, height + Math.max(0, picture.curves.length - 2) * 16, picture.title, theme, [
    ...grid,
    ...axis,
    `<text x="${left + plot}" y="${TOP + deep + 36}" text-anchor="end">${escape(picture.axis)}</text>`,
    ...curves,
  ]);
}

const [GAP, PEAK, WIDTH] = [15, 44, 720];

export function ridgeSvg(found: Histograms, theme: Theme, colour: string): string {
  const { low, high, ridges } = ridgeline(found.histograms, WIDTH, GAP, PEAK);
  const bottom = PEAK + Math.max(0, ridges.length - 1) * GAP;
  const parts = ridges.map((ridge) => {
    const broken =
      ridge.nonfinite === 0 ? "" : `<text x="${WIDTH + 8}" y="${ridge.baseline}">${ridge.nonfinite} NaN/Inf</text>`;
    const line = `<path d="M0 ${ridge.baseline}H${WIDTH}" stroke="${escape(theme.line)}"/>`;
    return `${line}<path d="${ridge.path}" fill="${escape(colour)}" fill-opacity=".3" stroke="${escape(colour)}"/><text x="-8" y="${ridge.baseline}" text-anchor="end">${escape(formatStep(ridge.step))}</text>${broken}`;
  });
  const x = (value: number): number => round(((value - low) / (high - low)) * WIDTH);
  const axis = linearTicks(low, high, 6).map(
    (tick) => `<text x="${x(tick)}" y="${bottom + 20}" text-anchor="middle">${escape(formatNumber(tick, 3))}</text>`,
  );
  return frame(WIDTH + 200, TOP + bottom + 40, `${found.metric} of ${found.site}`, theme, [
    `<g transform="translate(80 ${TOP})">`,
    ...parts,
    ...axis,
    "</g>",
  ]);
}

function frame(width: number, height: number, title: string, theme: Theme, parts: readonly string[]): string {
  const [w, h] = [Math.ceil(width), Math.ceil(height)];
  const head = `<svg xmlns="http://www.w3.org/2000/svg" width="${w}" height="${h}" viewBox="0 0 ${w} ${h}" font-family="sans-serif" font-size="12" fill="${escape(theme.text)}">`;
  return `${head}<rect width="100%" height="100%" fill="${escape(theme.ground)}"/><text x="16" y="22" font-size="15" font-weight="600">${escape(title)}</text>${parts.join("")}</svg>`;
}

function csvCell(cell: CsvCell): string {
  if (cell === null) return "";
  const text = typeof cell === "string" && /^[=+\-@\t\r]/.test(cell) ? `'${cell}` : String(cell);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function escape(text: string): string {
  const plain = text.replace(/[\u0000-\u0008\u000b\u000c\u000e-\u001f]/g, "");
  return plain.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;").replaceAll('"', "&quot;");
}

function round(value: number): number {
  return Math.round(value * 10) / 10;
}
