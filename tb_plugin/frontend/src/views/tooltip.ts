import { el } from "../dom";

export interface Tip {
  readonly layer: string;
  readonly value: string;
  readonly lines: readonly string[];
}

/** One tooltip for the whole panel. */
export class Tooltip {
  readonly root = el("div", { class: "tip", attrs: { role: "status" } });

  show(tip: Tip, x: number, y: number): void {
    this.root.replaceChildren(
      el("div", { class: "l mono", text: tip.layer }),
      el("div", { class: "v", text: tip.value }),
      ...tip.lines.map((line) => el("div", { text: line })),
    );
    const { offsetWidth: width, offsetHeight: height } = this.root;
    const left = x + 16 + width > window.innerWidth ? x - 16 - width : x + 16;
    const top = Math.min(y + 14, window.innerHeight - height - 8);
    this.root.style.left = `${Math.max(4, left)}px`;
    this.root.style.top = `${Math.max(4, top)}px`;
    this.root.style.visibility = "visible";
  }

  hide(): void {
    this.root.style.visibility = "hidden";
  }
}
