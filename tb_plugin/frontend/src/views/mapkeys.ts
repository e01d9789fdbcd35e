// What the keyboard does on the map: all that a mouse does there.
import { panRows, type Depth, type RowRange } from "../model/depth";
import { columnAt, type Series } from "../model/series";
import type { Gesture } from "../model/zoom";
import type { Navigate } from "./navigate";

/** The map as the keyboard finds it, and what it may ask of it. */
export interface Keyed {
  readonly series: Series;
  readonly depth: Depth;
  /** Whether some rows are out of view. */
  readonly some: boolean;
  readonly step: number;
  /** The row pointed at, null for none, and the one from which the first key goes on. */
  readonly row: number | null;
  readonly from: number;
  rows(range: RowRange | null): void;
  zoomRows(factor: number, row: number): void;
  reset(): void;
  /** Pins the row pointed at. */
  pick(): void;
  point(row: number, step: number): void;
  reveal(row: number): void;
}

export const KEYS =
  "Arrow keys move the step and the layer, Enter pins the layer, plus and minus zoom the steps, v and Shift v the layers, page keys move over the layers, 0 shows all.";

/** Returns whether the key meant anything. */
export function onMapKey(action: Gesture, map: Keyed, events: Navigate): boolean {
  const { series, depth, row } = map;
  const column = columnAt(series.first, map.step);
  switch (action.kind) {
    case "zoom":
      return events.zoomBy(action.factor, map.step);
    case "pan":
      return events.pan(action.by);
    case "scroll":
      map.rows(map.some ? panRows(depth, action.by * (depth.high - depth.low)) : null);
      return true;
    case "stretch":
      map.zoomRows(action.factor, (row ?? (depth.low + depth.high) / 2) + 0.5);
      return true;
    case "reset":
      map.reset();
      return true;
    case "pick":
      map.pick();
      return true;
    case "row": {
      const next = Math.max(0, Math.min(depth.rows.length - 1, (row ?? map.from) + action.by));
      if (next < depth.low || next + 1 > depth.high) map.reveal(next);
      map.point(next, series.first[column] ?? map.step);
      return true;
    }
    default: {
      const wanted = action.kind === "end" ? (action.by < 0 ? 0 : series.columns - 1) : column + action.by;
      const step = series.first[Math.max(0, Math.min(series.columns - 1, wanted))];
      if (step !== undefined) events.step(step);
      if (row !== null && step !== undefined) map.point(row, step);
      return true;
    }
  }
}
