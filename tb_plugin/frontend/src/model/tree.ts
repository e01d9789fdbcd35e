// Names of layers as a tree, and the rows of a map that has some of its branches folded.

/** Layers that lie side by side and share the beginning of their names; a single layer has nothing inside. */
export interface Branch {
  /** The common beginning of the names, with the dot after it where there is more than one. */
  readonly key: string;
  /** What tells it from its neighbours. */
  readonly name: string;
  /** The sites [from, to). */
  readonly from: number;
  readonly to: number;
  readonly inner: readonly Branch[];
}

/** One row of a map: a site, a folded branch of several, or, with from = to, a layer that was not read. */
export interface Row {
  readonly key: string;
  readonly name: string;
  readonly from: number;
  readonly to: number;
}

/** Which branches are folded: those of one level, except for some that were turned the other way. */
export interface Fold {
  /** 0 folds none; 1 folds the outermost branches. */
  readonly level: number;
  readonly turned: readonly string[];
}

export const UNFOLDED: Fold = { level: 0, turned: [] };

type Path = readonly string[];

/** The branches of sites in the order they have; a name that comes again later makes a branch of its own. */
export function branchesOf(sites: readonly string[]): readonly Branch[] {
  return split(
    sites.map((site) => site.split(".")),
    0,
    sites.length,
    0,
  );
}

/** Which levels there are to fold, and how many rows each leaves; the outermost first. */
export function levelsOf(
  branches: readonly Branch[],
  sites: number,
): readonly { readonly level: number; readonly rows: number }[] {
  const found: { level: number; rows: number }[] = [];
  for (let level = 1, before = 1; ; level++) {
    const rows = rowsOf(branches, { level, turned: [] }).length;
    if (rows === sites) return found;
    if (rows > before) found.push({ level, rows });
    before = rows;
  }
}

export function isFolded(fold: Fold, key: string, level: number): boolean {
  return (level === fold.level) !== fold.turned.includes(key);
}

/** The same fold with one branch turned over. */
export function turn(fold: Fold, key: string): Fold {
  const { level, turned } = fold;
  return { level, turned: turned.includes(key) ? turned.filter((item) => item !== key) : [...turned, key] };
}

export function rowsOf(branches: readonly Branch[], fold: Fold): readonly Row[] {
  const rows: Row[] = [];
  const walk = (list: readonly Branch[], level: number): void => {
    for (const { key, from, to, inner } of list) {
      if (inner.length === 0 || isFolded(fold, key, level))
        rows.push({ key, name: to - from > 1 ? key.replace(/\.$/, "") : key, from, to });
      else walk(inner, level + 1);
    }
  };
  walk(branches, 1);
  return rows;
}

/** The sites [from, to) that a name means: the site of that name, all inside it, or the one it lies inside. */
export function sitesOf(sites: readonly string[], layer: string): readonly number[] {
  const inside = sitesWithin(sites, layer);
  if (inside.length > 0 || layer === "") return inside;
  return sites.flatMap((site, i) => (site !== "" && layer.startsWith(`${site}.`) ? [i] : []));
}

/** The site of a name, or else all sites inside it; unlike `sitesOf` never one that it lies inside. */
export function sitesWithin(sites: readonly string[], layer: string): readonly number[] {
  const exact = sites.indexOf(layer);
  return exact >= 0 ? [exact] : sites.flatMap((site, i) => (site.startsWith(`${layer}.`) ? [i] : []));
}

/** Rows, with one more for each layer that has none; where it lies in the order of the model, else below all others. */
export function withAbsent(
  rows: readonly Row[],
  absent: readonly string[],
  sites: readonly string[],
  order: readonly string[],
): readonly Row[] {
  const out = [...rows];
  for (const layer of absent) {
    const place = order.indexOf(layer);
    const later = new Set(place < 0 ? [] : order.slice(place + 1));
    const before = place < 0 ? 0 : out.findIndex(({ from, to }) => from < to && later.has(sites[from] ?? ""));
    out.splice(before < 0 ? out.length : before, 0, { key: layer, name: layer, from: 0, to: 0 });
  }
  return out;
}

function split(paths: readonly Path[], from: number, to: number, depth: number): readonly Branch[] {
  const out: Branch[] = [];
  for (let start = from; start < to; ) {
    const word = paths[start]?.[depth];
    let end = start + 1;
    while (word !== undefined && end < to && paths[end]?.[depth] === word) end++;
    out.push(branch(paths, start, end, depth));
    start = end;
  }
  return out;
}

function branch(paths: readonly Path[], from: number, to: number, depth: number): Branch {
  const path = paths[from] ?? [];
  if (to - from === 1) return { key: path.join("."), name: path.slice(depth).join("."), from, to, inner: [] };
  let deep = depth + 1;
  // A way without a fork is one branch.
  while (path[deep] !== undefined && same(paths, from, to, deep)) deep++;
  return {
    key: `${path.slice(0, deep).join(".")}.`,
    name: path.slice(depth, deep).join("."),
    from,
    to,
    inner: split(paths, from, to, deep),
  };
}

function same(paths: readonly Path[], from: number, to: number, depth: number): boolean {
  for (let i = from + 1; i < to; i++) if (paths[i]?.[depth] !== paths[from]?.[depth]) return false;
  return true;
}
