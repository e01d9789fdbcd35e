// The map as a picture to take away, with names, axis and ramp.
import { css } from "../model/colour";
import { rowHeight, rowTop } from "../model/depth";
import { mapSvg, type MapPicture } from "../model/export";
import { formatNumber, shorten, siteText } from "../model/format";
import type { HeatView } from "../model/heat";
import { theme } from "./download";

const [LABEL, NAME_LETTERS, SWATCHES] = [14, 26, 50];

export function mapPicture(
  { range, depth, scale }: HeatView,
  painted: Pick<MapPicture, "title" | "caption" | "image" | "width" | "height">,
): string {
  const { words, low, high } = scale;
  const colours = Array.from({ length: SWATCHES }, (_, i) =>
    css(words[Math.round((i / (SWATCHES - 1)) * (words.length - 1))] ?? 0),
  );
  const row = rowHeight(depth, painted.height);
  const every = Math.max(1, Math.ceil(LABEL / row));
  const names = depth.rows.map(({ name }, i) => ({
    text: shorten(siteText(name), NAME_LETTERS),
    y: rowTop(depth, i, painted.height) + row / 2,
  }));
  const shown = names.filter(({ y }, i) => i % every === 0 && y >= 0 && y <= painted.height);
  return mapSvg({
    ...painted,
    names: shown,
    range,
    theme: theme(),
    ramp: { colours, low: formatNumber(low, 3), high: formatNumber(high, 3) },
  });
}
