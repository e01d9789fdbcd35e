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
  /** Where it was called first; absent in older logs. */
  readonly call_file?: string | null;
  readonly call_line?: number | null;
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

/** Where a module is called, and where its class is defined, "" where that is not known. */
export interface Places {
  readonly called: string;
  readonly defined: string;
}

/** A file and a line, of a library only the path inside it; "" where there is no source. */
function placeOf(file: string | null | undefined, line: number | null | undefined): string {
  if (file === null || file === undefined) return "";
  const near = file.replace(/^.*[\\/](?:site|dist)-packages[\\/]/, "");
  return line === null || line === undefined ? near : `${near}:${line}`;
}

export function placesOf({ file, line, call_file, call_line }: Module): Places {
  return { called: placeOf(call_file, call_line), defined: placeOf(file, line) };
}

/** The places of a layer; a parameter belongs to the module before its last dot. */
export function placesIn(modules: readonly Module[], layer: string): Places {
  const byName = new Map(modules.map((module) => [module.name, module]));
  for (let name = layer; name !== ""; name = name.slice(0, Math.max(0, name.lastIndexOf(".")))) {
    const found = byName.get(name);
    if (found !== undefined) return placesOf(found);
  }
  return { called: "", defined: "" };
}

/** Both places in words. */
export function saidOf({ called, defined }: Places): readonly string[] {
  return [called && `called at ${called}`, defined && `class at ${defined}`].filter(Boolean);
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
