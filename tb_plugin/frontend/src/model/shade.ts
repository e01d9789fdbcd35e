// What the map shows of a module: its own reading, or the one most extreme of those inside it.
import { colourOf, css } from "./colour";
import { depthOf } from "./depth";
import { formatNumber } from "./format";
import { shownCell, type HeatView } from "./heat";
import { columnAt } from "./series";
import { sitesWithin } from "./tree";

/** A colour, and the number in words; null where the map shows nothing of a module. */
export type Shade = (name: string) => { readonly colour: string; readonly text: string } | null;

export function shadeOf(view: HeatView, step: number): Shade {
  const { sites, first } = view.series;
  const column = columnAt(first, step);
  return (name) => {
    const inside = sitesWithin(sites, name);
    if (inside.length === 0 || column < 0) return null;
    const depth = depthOf(
      inside.map((site) => ({ key: "", name: "", from: site, to: site + 1 })),
      null,
    );
    const { kind, value } = shownCell({ ...view, depth }, [0, inside.length], [column, column]);
    if (kind === "missing") return { colour: "var(--missing)", text: "nothing" };
    return { colour: kind === "value" ? css(colourOf(view.scale, value)) : "#0c0c0e", text: formatNumber(value, 3) };
  };
}
