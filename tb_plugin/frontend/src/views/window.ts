// Rows of one height in a box that scrolls: those in view are there, and on paper all of them.
import { keepChildren } from "../dom";

export interface Rows<T> {
  readonly key: (item: T) => string;
  readonly make: (item: T) => HTMLElement;
  readonly update: (row: HTMLElement, item: T) => void;
}

// Rows come and go by the block, so that most of a scroll changes nothing.
const [BLOCK, MOST_PRINTED] = [8, 1000];

export class RowWindow<T> {
  #items: readonly T[] = [];
  #shown = "";
  #printed = false;

  /** `line` is the height of a row, `tallest` gives that of the box, both in pixels. */
  constructor(
    private readonly scroll: HTMLElement,
    private readonly body: HTMLElement,
    private readonly line: number,
    private readonly tallest: () => number,
    private readonly rows: Rows<T>,
  ) {
    scroll.addEventListener("scroll", () => this.#fill(false), { passive: true });
    window.addEventListener("resize", () => this.#fill(false));
    const print = (printed: boolean): void => {
      this.#printed = printed;
      this.#fill(false);
    };
    window.addEventListener("beforeprint", () => print(true));
    window.addEventListener("afterprint", () => print(false));
    window.matchMedia("print").addEventListener("change", ({ matches }) => print(matches));
  }

  /** Shows a list from the place that it is scrolled to. */
  show(items: readonly T[]): void {
    this.#items = items;
    this.body.parentElement?.setAttribute("aria-rowcount", String(items.length + 1));
    this.#fill(true);
  }

  #fill(anew: boolean): void {
    const [count, tallest] = [this.#items.length, this.tallest()];
    const top = Math.max(0, Math.min(this.scroll.scrollTop, count * this.line - tallest));
    const block = Math.floor(top / this.line / BLOCK);
    const first = this.#printed ? 0 : Math.max(0, (block - 1) * BLOCK);
    const more = Math.ceil(tallest / this.line / BLOCK) + 2;
    const last = Math.min(count, this.#printed ? MOST_PRINTED : (block + more) * BLOCK);
    const shown = `${first} ${last}`;
    if (shown === this.#shown && !anew) return;
    this.#shown = shown;
    const focused = this.body.contains(document.activeElement);
    this.body.style.paddingTop = `${first * this.line}px`;
    this.body.style.paddingBottom = this.#printed ? "" : `${(count - last) * this.line}px`;
    this.body.dataset["more"] = count > last && this.#printed ? `and ${count - last} more rows` : "";
    keepChildren(this.body, this.#items.slice(first, last), this.rows.key, this.rows.make, this.rows.update);
    [...this.body.children].forEach((row, i) => row.setAttribute("aria-rowindex", String(first + i + 2)));
    // The keyboard goes on from the box where the row that it was in has left the view.
    if (focused && !this.body.contains(document.activeElement)) this.scroll.focus({ preventScroll: true });
  }
}
