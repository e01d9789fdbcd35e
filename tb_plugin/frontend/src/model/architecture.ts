// The modules of a model as boxes inside boxes, in the order of their first calls.

/** One module in the answer of /architecture. */
export interface Module {
  readonly name: string;
  readonly kind: string;
  /** Its number in the list, null for the model itself. */
  readonly parent: number | null;
  /** The place of its first call, null where none was seen. */
  readonly order: number | null;
  readonly calls: number | null;
  readonly parameters: number;
  readonly trainable: number;
  /** Where its class is defined. */
  readonly file: string | null;
  readonly line: number | null;
  readonly block: boolean;
  readonly shared: string | null;
}

export interface Part {
  readonly module: Module;
  /** What tells it from its siblings. */
  readonly label: string;
  /** Whether it, or something inside it, was seen called. */
  readonly called: boolean;
  readonly inner: readonly Part[];
}

/** The parts of a model in the order in which they were called first; those never seen called come last. */
export function partsOf(modules: readonly Module[]): readonly Part[] {
  const children = new Map<number | null, number[]>();
  modules.forEach(({ parent }, i) => children.set(parent, [...(children.get(parent) ?? []), i]));
  // A container is not called itself: it stands where what is inside it was called first.
  const orders = new Map<number, number>();
  const orderOf = (i: number): number => {
    const known = orders.get(i) ?? Math.min(modules[i]?.order ?? Infinity, ...(children.get(i) ?? []).map(orderOf));
    orders.set(i, known);
    return known;
  };
  const build = (i: number, above: string): Part => {
    const module = modules[i] as Module;
    const inner = [...(children.get(i) ?? [])]
      .sort((a, b) => orderOf(a) - orderOf(b) || a - b)
      .map((child) => build(child, module.name));
    const label = above === "" ? module.name : module.name.slice(above.length + 1);
    // A box that holds just one box, as a list of layers does not, says nothing by itself.
    const only = inner.length === 1 && module.parent !== null && !module.block ? inner[0] : undefined;
    const called = Number.isFinite(orderOf(i));
    return only === undefined ? { module, label, called, inner } : { ...only, label: `${label}.${only.label}` };
  };
  return (children.get(null) ?? []).map((root) => build(root, ""));
}

/** Where the class of a module is defined, "" where there is no source; of a library only the path inside it. */
export function sourceOf({ file, line }: Module): string {
  return file === null
    ? ""
    : `${file.replace(/^.*[\\/](?:site|dist)-packages[\\/]/, "")}${line === null ? "" : `:${line}`}`;
}

/** Where the class of a layer is defined, "" where that is not known; a parameter belongs to the module before its last dot. */
export function definedAt(modules: readonly Module[], layer: string): string {
  const byName = new Map(modules.map((module) => [module.name, module]));
  for (let name = layer; ; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) {
    const found = byName.get(name);
    if (found !== undefined && name !== "") return sourceOf(found);
    if (name === "") return "";
  }
}

/** Layers and parameters in the order of the model, as far as it is known; the rest after them, as they came. */
export function inModelOrder<T>(
  modules: readonly Module[],
  items: readonly T[],
  nameOf: (item: T) => string,
): readonly T[] {
  const ranks = new Map(modules.map(({ name }, i) => [name, i]));
  const rank = (name: string): number => {
    const own = ranks.get(name);
    const dot = name.lastIndexOf(".");
    return own ?? (dot < 0 ? Infinity : rank(name.slice(0, dot)));
  };
  // Two that are nowhere differ by nothing, not by NaN.
  return [...items].sort((a, b) => rank(nameOf(a)) - rank(nameOf(b)) || 0);
}
