import type { Block, Series } from "../src/model/series";

/** A series of one site, read at these steps; `rest` says what is different. */
export function seriesAt(
  steps: readonly number[],
  blocks: Readonly<Record<string, Block>> = {},
  rest: Partial<Series> = {},
): Series {
  const at = Float64Array.from(steps);
  return {
    run: "",
    metric: "",
    sites: ["a"],
    columns: at.length,
    width: 1,
    most: 1,
    first: at,
    last: at,
    wall: at,
    blocks: new Map(Object.entries(blocks)),
    ...rest,
  };
}
