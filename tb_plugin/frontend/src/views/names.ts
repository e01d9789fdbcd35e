// What the rows of the map are called: names where there is room, handles to fold a branch, and what lies out of view.
import { onWheel } from "../charts/wheel";
import { el, keepChildren, setText } from "../dom";
import { handlesOf, labelsOf, type Depth, type Handle, type Label } from "../model/depth";
import { shorten, siteText } from "../model/format";
import type { Branch, Fold } from "../model/tree";
import { pinColour } from "../style";

export interface NamesEvents {
  /** A row was chosen by its name. */
  pick(row: number): void;
  /** The name of a branch: shows its rows only. */
  show(row: number, rows: number): void;
  turn(key: string): void;
  wheel(factor: number, y: number): boolean;
  /** Brings a row into view. */
  reveal(row: number): void;
}

export interface Named {
  readonly depth: Depth;
  readonly branches: readonly Branch[];
  readonly fold: Fold;
  readonly rowOf: Int32Array;
  /** The rows of the pins in their order, -1 for one without. */
  readonly pins: readonly number[];
  readonly accused: readonly number[];
  readonly height: number;
}

const [GAP, LETTER, HANDLE, HALF] = [14, 6.6, 24, 7];

export class NamesView {
  readonly #labels = el("div", { attrs: { "aria-hidden": "true" } });
  readonly #handles = el("div");
  readonly #above = this.#edge("above");
  readonly #below = this.#edge("below");
  readonly root = el(
    "div",
    { class: "names", attrs: { "data-part": "names" } },
    this.#labels,
    this.#handles,
    this.#above,
    this.#below,
  );
  #shown: Named | null = null;
  #width = 0;
  #edges: readonly [number, number] = [-1, -1];

  constructor(private readonly events: NamesEvents) {
    // The map and the table are the same choice for the keyboard; a stop at each of thousands of names would be in the way.
    this.#labels.addEventListener("click", (event) => {
      const label = (event.target as Element).closest<HTMLElement>(".name");
      const [row, rows] = [Number(label?.dataset["row"]), Number(label?.dataset["rows"])];
      if (label !== null) rows > 1 ? events.show(row, rows) : events.pick(row);
    });
    onWheel(this.root, (factor, event) => events.wheel(factor, event.clientY - this.root.getBoundingClientRect().top));
    this.#above.addEventListener("click", () => events.reveal(this.#edges[0]));
    this.#below.addEventListener("click", () => events.reveal(this.#edges[1]));
  }

  /** Takes the room there is; apart from showing, because to measure makes the browser lay out the page. */
  fit(): void {
    this.#width = this.root.clientWidth;
  }

  show(shown: Named): void {
    this.#shown = shown;
    const { depth, branches, rowOf, pins, accused, height, fold } = shown;
    this.root.style.height = `${height}px`;
    const forced = new Set([...pins, ...accused].filter((row) => row >= 0));
    keepChildren(
      this.#labels,
      [...labelsOf(depth, branches, rowOf, forced, height, GAP)].sort((a, b) => a.y - b.y),
      ({ key, rows }) => `${rows > 1 ? "+" : ""}${key}`,
      ({ text }) => el("span", { class: "name mono", title: siteText(text) }, el("i"), el("b")),
      (node, label) => this.#place(node, label),
    );
    keepChildren(
      this.#handles,
      handlesOf(depth, branches, rowOf, fold, height),
      ({ key }) => key,
      ({ key }) => this.#handle(key),
      (node, handle) => placeHandle(node, handle),
    );
    this.#showEdges();
  }

  clear(): void {
    this.#shown = null;
    for (const part of [this.#labels, this.#handles]) part.replaceChildren();
    this.#above.hidden = this.#below.hidden = true;
  }

  #place(node: HTMLElement, { row, rows, text, y }: Label): void {
    const { pins = [], accused = [], height = 0 } = this.#shown ?? {};
    const pin = rows === 1 ? pins.indexOf(row) : -1;
    const [dot, word] = node.children as unknown as [HTMLElement, HTMLElement];
    node.className = `name mono${pin < 0 ? "" : " pinned"}${rows > 1 ? " branch" : ""}${rows === 1 && accused.includes(row) ? " accused" : ""}`;
    node.dataset["row"] = String(row);
    node.dataset["rows"] = String(rows);
    node.style.top = `${Math.max(0, Math.min(height - 2 * HALF, y - HALF))}px`;
    dot.hidden = pin < 0;
    dot.style.background = pin < 0 ? "" : pinColour(pin);
    setText(
      word,
      shorten(siteText(text), Math.max(6, Math.floor((this.#width - HANDLE) / LETTER) - (pin >= 0 ? 4 : 2))),
    );
  }

  #handle(key: string): HTMLElement {
    const button = el("button", { class: "fold", attrs: { type: "button", "data-key": key } });
    button.addEventListener("click", () => this.events.turn(key));
    return button;
  }

  #edge(where: "above" | "below"): HTMLElement {
    const button = el("button", { class: `edge ${where}`, attrs: { type: "button", "data-part": `accused-${where}` } });
    button.hidden = true;
    return button;
  }

  /** Accused layers are never out of sight without a word. */
  #showEdges(): void {
    const { depth, accused = [] } = this.#shown ?? {};
    const [above, below] = [
      accused.filter((row) => row >= (depth?.high ?? Infinity)),
      accused.filter((row) => row + 1 <= (depth?.low ?? -Infinity)),
    ];
    this.#edges = [Math.min(...above), Math.max(...below)];
    for (const [button, rows, arrow] of [
      [this.#above, above, "\u25b2"],
      [this.#below, below, "\u25bc"],
    ] as const) {
      button.hidden = rows.length === 0;
      setText(button, `${arrow} ${rows.length} with an issue`);
    }
  }
}

function placeHandle(node: HTMLElement, { folded, sites, top, height, key }: Handle): void {
  const label = `${folded ? "Unfold" : "Fold"} ${key.replace(/\.$/, "")}, ${sites} rows`;
  node.style.cssText = `top:${top}px;height:${height}px`;
  if (node.title !== label) node.title = label;
  node.setAttribute("aria-label", label);
  node.setAttribute("aria-expanded", String(!folded));
  setText(node, folded ? "\u25b8" : "\u25be");
}
