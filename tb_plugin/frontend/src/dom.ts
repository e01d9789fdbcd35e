// The only way in which this panel makes elements: text goes in as text, never as markup.

type Child = Node | string | null;

export interface Props {
  readonly class?: string;
  readonly text?: string;
  readonly title?: string;
  readonly attrs?: Readonly<Record<string, string>>;
}

export function el<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: readonly Child[]
): HTMLElementTagNameMap[K] {
  const node = document.createElement(tag);
  if (props.class !== undefined) node.className = props.class;
  if (props.text !== undefined) node.textContent = props.text;
  if (props.title !== undefined) node.title = props.title;
  for (const [name, value] of Object.entries(props.attrs ?? {})) node.setAttribute(name, value);
  node.append(...children.filter((child): child is Node | string => child !== null));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(
  tag: string,
  attrs: Readonly<Record<string, string | number>>,
  ...children: readonly Child[]
): SVGElement {
  const node = document.createElementNS(SVG, tag) as SVGElement;
  for (const [name, value] of Object.entries(attrs)) node.setAttribute(name, String(value));
  node.append(...children.filter((child): child is Node | string => child !== null));
  return node;
}

const keyOf = new WeakMap<Element, string>();
const offered = new WeakMap<Element, string>();

/**
 * Makes the children of a node those of a list. A child whose key was there before is kept and only updated, so that
 * nothing flickers and the focus stays.
 */
export function keepChildren<T, N extends Element>(
  parent: Element,
  items: readonly T[],
  key: (item: T) => string,
  make: (item: T) => N,
  update: (node: N, item: T) => void,
): void {
  const wanted = new Set(items.map(key));
  const old = new Map<string, N>();
  for (const child of [...parent.children]) {
    const name = keyOf.get(child);
    if (name === undefined || !wanted.has(name) || old.has(name)) child.remove();
    else old.set(name, child as N);
  }
  let place = parent.firstElementChild;
  for (const item of items) {
    const name = key(item);
    const node = old.get(name) ?? make(item);
    old.delete(name);
    keyOf.set(node, name);
    update(node, item);
    if (node === place) place = place.nextElementSibling;
    else parent.insertBefore(node, place);
  }
}

/** Works once the frame that is due is painted, so that what was just marked is seen first. */
/** Cards of this class keep their place and show nothing: what fills them would move about as it arrives. */
export const FILLING = "filling";

/** Shows a page with all that its cards hold so far. */
export function unveil(page: HTMLElement): void {
  page.hidden = false;
  for (const card of page.querySelectorAll(`.${FILLING}`)) card.classList.remove(FILLING);
}

export function afterFrame(work: () => void): void {
  requestAnimationFrame(() => window.setTimeout(work));
}

/** Sets a text only when it differs, so that what is selected or read aloud is not disturbed. */
export function setText(node: Element, text: string): void {
  if (node.textContent !== text) node.textContent = text;
}

export interface Option {
  readonly value: string;
  readonly label: string;
  /** The heading it stands under. */
  readonly group?: string;
}

/** Replaces the options of a select, keeping what is chosen when it is still there. */
export function setOptions(select: HTMLSelectElement, options: readonly Option[], chosen: string): void {
  const written = JSON.stringify(options);
  if (offered.get(select) !== written) {
    const groups = new Map<string, HTMLElement>();
    const nodes: Node[] = [];
    for (const { value, label, group } of options) {
      const option = el("option", { text: label, attrs: { value } });
      if (group === undefined) nodes.push(option);
      else {
        let box = groups.get(group);
        if (box === undefined) {
          box = el("optgroup", { attrs: { label: group } });
          groups.set(group, box);
          nodes.push(box);
        }
        box.append(option);
      }
    }
    select.replaceChildren(...nodes);
    offered.set(select, written);
  }
  select.value = chosen;
}

/** A canvas context at device resolution; what is drawn is measured in CSS pixels. */
export function sharpContext(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  const [wide, deep] = [Math.max(1, Math.round(width * ratio)), Math.max(1, Math.round(height * ratio))];
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("this browser does not support 2-D canvas");
  // A canvas of another size is made anew, which takes longer than to wipe it.
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== deep) canvas.height = deep;
  canvas.style.cssText = `width:${width}px;height:${height}px`;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return context;
}
