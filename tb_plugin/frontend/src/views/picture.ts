// The map as a figure to take away, painted anew for white paper, with names, axes and ramp.
import { heatPicture } from "../charts/heatmap";
import { css } from "../model/colour";
import { rowHeight, rowTop } from "../model/depth";
import { mapFigure, type Font } from "../model/figure";
import { formatNumber, shorten, siteText } from "../model/format";
import type { HeatView } from "../model/heat";
import { onPaper } from "../style";

const [LABEL, NAME_LETTERS, SWATCHES, WIDTH, ROW, LEAST, MOST] = [14, 28, 64, 460, 16, 120, 460];

export function mapPicture(view: HeatView, name: string, quantity: string, font: Font): string {
  const { range, depth, scale } = view;
  const { words, low, high } = scale;
  const height = Math.max(LEAST, Math.min(MOST, (depth.high - depth.low) * ROW));
  const ramp = Array.from({ length: SWATCHES }, (_, i) =>
    css(words[Math.round((i / (SWATCHES - 1)) * (words.length - 1))] ?? 0),
  );
  const row = rowHeight(depth, height);
  const every = Math.max(1, Math.ceil(LABEL / row));
  const rows = depth.rows
    .map(({ name: layer }, i) => ({
      text: shorten(siteText(layer), NAME_LETTERS),
      at: rowTop(depth, i, height) + row / 2,
    }))
    .filter(({ at }, i) => i % every === 0 && at >= 0 && at <= height);
  const neutral = scale.log ? 1 : 0;
  const middle = scale.diverging && low < neutral && high > neutral ? [{ at: 0.5, text: String(neutral) }] : [];
  return mapFigure(
    {
      name,
      image: heatPicture(view, WIDTH, height, { missing: onPaper("--missing"), empty: onPaper("--hover") }),
      width: WIDTH,
      height,
      range,
      rows,
      colours: {
        label: quantity,
        ramp,
        ticks: [
          { at: 0, text: `\u2264 ${formatNumber(low, 3)}` },
          ...middle,
          { at: 1, text: `\u2265 ${formatNumber(high, 3)}` },
        ],
      },
    },
    font,
  );
}
