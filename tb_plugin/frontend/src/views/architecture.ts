// The model as a picture: boxes in the order of their calls, coloured by the metric on the map at the chosen step.
import { el, setText } from "../dom";
import { formatCount } from "../model/format";
import { partsOf, placesOf, saidOf, type Module, type Part } from "../model/architecture";
import type { Shade } from "../model/shade";
import { pinColour } from "../style";

const MOST_OPEN = 60;

export class ArchitectureView {
  readonly #note = el("span", { class: "note", attrs: { "data-part": "architecture-note" } });
  readonly #body = el("div", { class: "parts" });
  readonly root = el(
    "section",
    { class: "card model", attrs: { "aria-label": "Model", "data-part": "architecture" } },
    el("div", { class: "bar" }, el("h2", { text: "Model" }), this.#note),
    this.#body,
  );
  #boxes: {
    readonly module: Module;
    readonly box: HTMLElement;
    readonly value: HTMLElement;
    readonly name: HTMLElement;
  }[] = [];
  #shade: Shade = () => null;
  #pins: readonly string[] = [];
  #shown = "";
  #what = "";
  #when = "";

  constructor(private readonly pick: (name: string) => void) {
    this.root.hidden = true;
  }

  show(modules: readonly Module[]): void {
    this.root.hidden = modules.length < 2;
    const shown = JSON.stringify(modules.map(({ name, order }) => [name, order]));
    if (shown === this.#shown || this.root.hidden) return;
    this.#shown = shown;
    this.#boxes = [];
    const [root] = partsOf(modules);
    const parts = root?.inner ?? [];
    this.#what = `${root?.module.kind ?? ""}, ${formatCount(root?.module.parameters ?? 0)} parameters; in call order, colored like the map`;
    this.#body.replaceChildren(...parts.map((part) => this.#part(part, parts.length <= MOST_OPEN)));
    this.colour(this.#shade, this.#when);
    this.showPins(this.#pins);
  }

  /** Colours the boxes anew: another metric, step or theme; `when` says at which step that was read. */
  colour(shade: Shade, when: string): void {
    [this.#shade, this.#when] = [shade, when];
    setText(this.#note, when === "" ? this.#what : `${this.#what}: ${when}`);
    for (const { module, box, value } of this.#boxes) {
      const found = shade(module.name);
      box.style.borderLeftColor = found?.colour ?? "";
      setText(value, found?.text ?? "");
    }
  }

  showPins(pins: readonly string[]): void {
    this.#pins = pins;
    for (const { module, name } of this.#boxes) {
      const pin = pins.indexOf(module.name);
      name.style.boxShadow = pin < 0 ? "" : `inset 0 -2px ${pinColour(pin)}`;
    }
  }

  #part({ module, label, called, inner }: Part, open: boolean): HTMLElement {
    const { kind, parameters, calls, shared } = module;
    const places = saidOf(placesOf(module));
    const facts = [
      module.name,
      `${kind}${parameters > 0 ? `, ${formatCount(parameters)} parameters` : ""}`,
      ...places,
      calls !== null && calls > 1 ? `called ${calls} times` : "",
      shared === null ? "" : `the same module as ${shared}`,
    ];
    const name = el("button", {
      class: "mono",
      text: label,
      title: facts.filter(Boolean).join("\n"),
      attrs: { type: "button" },
    });
    name.addEventListener("click", () => this.pick(module.name));
    const value = el("span", { class: "value" });
    const head = el(
      "span",
      { class: "head" },
      name,
      el("span", { class: "kind", text: kind, title: places.join("\n") }),
      value,
    );
    const box = el("div", { class: `part${!called ? " uncalled" : ""}`, attrs: { "data-name": module.name } }, head);
    this.#boxes.push({ module, box, value, name });
    if (inner.length > 0) {
      const list = el("div", { class: "parts" });
      const fold = el("details", {}, el("summary", { text: `${inner.length} inside` }), list);
      const fill = (): void => {
        if (!fold.open || list.childElementCount > 0) return;
        list.append(...inner.map((part) => this.#part(part, false)));
        this.colour(this.#shade, this.#when);
        this.showPins(this.#pins);
      };
      fold.addEventListener("toggle", fill);
      box.append(fold);
      // A list of blocks is opened, a block is not: it is the unit that the map speaks of.
      if (open && !module.block && inner.some((part) => part.module.block) && inner.length <= MOST_OPEN) {
        fold.open = true;
        fill();
      }
    }
    return box;
  }
}
