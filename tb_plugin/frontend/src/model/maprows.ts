// The rows of a map: what is folded, what is in view, and where the layers are that issues are about.
import { depthOf, rowOfSites, type Depth, type DepthState } from "./depth";
import { branchesOf, levelsOf, rowsOf, sitesOf, withAbsent, type Branch } from "./tree";

const MOST_ABSENT = 3;
const [LEAST_HEIGHT, ROW, ROOMY, FEW] = [168, 17, 24, 8];
const [LEAST_WINDOW, AROUND, AROUND_TALL] = [240, 560, 190];

/** How high a map of so many rows is in a window of that height. */
export function heightOf(rows: number, tall: boolean, window: number): number {
  const room = Math.max(LEAST_WINDOW, window - (tall ? AROUND_TALL : AROUND));
  return tall && rows * ROW > LEAST_HEIGHT
    ? room
    : Math.max(LEAST_HEIGHT, Math.min(room, rows * (rows <= FEW ? ROOMY : ROW)));
}

export class MapRows {
  sites: readonly string[] = [];
  branches: readonly Branch[] = [];
  /** The levels to which the layers can be folded. */
  levels: ReturnType<typeof levelsOf> = [];
  depth: Depth = depthOf([], null);
  /** The row of each site. */
  of: Int32Array = new Int32Array();
  /** Rows that hold an accused layer. */
  accused: readonly number[] = [];

  /** Takes another list of sites; returns whether it differs. */
  take(sites: readonly string[]): boolean {
    const same = sites.length === this.sites.length && sites.every((site, i) => site === this.sites[i]);
    if (same && this.branches.length > 0) return false;
    this.sites = sites;
    this.branches = branchesOf(sites);
    this.levels = levelsOf(this.branches, sites.length);
    return true;
  }

  clear(): void {
    [this.sites, this.branches] = [[], []];
  }

  /** Works out the rows; accused layers that were not read get a row of their own, by their place in the model. */
  lay(state: DepthState, accused: readonly string[], order: readonly string[]): void {
    const there = accused.map((layer) => sitesOf(this.sites, layer));
    const absent = accused.filter((layer, i) => layer !== "" && there[i]?.length === 0).slice(0, MOST_ABSENT);
    const rows = withAbsent(rowsOf(this.branches, state.fold), absent, this.sites, order);
    this.depth = depthOf(rows, state.rows);
    this.of = rowOfSites(rows, this.sites.length);
    const found = new Set(there.flatMap((list) => list.map((site) => this.of[site] ?? -1)));
    for (const layer of absent) found.add(this.#withoutSite(layer));
    this.accused = [...found].filter((row) => row >= 0).sort((a, b) => a - b);
  }

  /** The row of a layer, -1 for none. */
  ofLayer(layer: string): number {
    const site = this.sites.indexOf(layer);
    return site < 0 ? this.#withoutSite(layer) : (this.of[site] ?? -1);
  }

  #withoutSite(layer: string): number {
    return this.depth.rows.findIndex(({ key, from, to }) => from === to && key === layer);
  }
}
