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

export function svg(tag: string, attrs: Readonly<Record<string, string | number>>, ...children: readonly Child[]): SVGElement {
  const node = document.createElementNS(SVG, tag) as SVGElement;
  for (const [name, value] of Object.entries(attrs)) node.setAttribute(name, String(value));
  node.append(...children.filter((child): child is Node | string => child !== null));
  return node;
}

/** Replaces the options of a select, keeping what is chosen when it is still there. */
export function setOptions(
  select: HTMLSelectElement,
  options: readonly { readonly value: string; readonly label: string }[],
  chosen: string,
): void {
  const same =
    select.options.length === options.length &&
    options.every((option, i) => select.options[i]?.value === option.value && select.options[i]?.text === option.label);
  if (!same) {
    select.replaceChildren(...options.map((o) => el("option", { text: o.label, attrs: { value: o.value } })));
  }
  select.value = chosen;
}

/** A canvas context at device resolution; what is drawn is measured in CSS pixels. */
export function sharpContext(canvas: HTMLCanvasElement, width: number, height: number): CanvasRenderingContext2D {
  const ratio = window.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  if (context === null) throw new Error("this browser has no 2-D canvas");
  context.scale(ratio, ratio);
  return context;
}
