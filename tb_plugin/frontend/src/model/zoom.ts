// Which steps are in view: a wheel, a key or a drag changes the range, always within what there is.

export type Range = readonly [number, number];

const LEAST = 4;

/** A range that is `factor` times as long, with the step `at` where it was; null once everything is in view. */
export function zoomBy(range: Range, at: number, factor: number, whole: Range): Range | null {
  const length = Math.max(LEAST, (range[1] - range[0]) * factor);
  if (length >= whole[1] - whole[0]) return null;
  const share = Math.max(0, Math.min(1, (at - range[0]) / (range[1] - range[0])));
  return within([at - share * length, at + (1 - share) * length], whole);
}

/** A range moved by a share of its own length. */
export function panBy(range: Range, share: number, whole: Range): Range {
  const by = share * (range[1] - range[0]);
  return within([range[0] + by, range[1] + by], whole);
}

function within([first, last]: Range, whole: Range): Range {
  const back = Math.max(0, whole[0] - first) - Math.max(0, last - whole[1]);
  return [Math.round(first + back), Math.round(last + back)];
}

export type Gesture =
  | { readonly kind: "step"; readonly by: number }
  | { readonly kind: "row"; readonly by: number }
  | { readonly kind: "pan"; readonly by: number }
  | { readonly kind: "zoom"; readonly factor: number }
  /** Moves the rows in view by a share of their number, or shows `factor` times as many. */
  | { readonly kind: "scroll"; readonly by: number }
  | { readonly kind: "stretch"; readonly factor: number }
  | { readonly kind: "end"; readonly by: -1 | 1 }
  | { readonly kind: "reset" }
  | { readonly kind: "pick" };

export const ZOOM = 0.6;

/** What a key means in a map or a chart that has the focus. */
export function gesture(key: string, shift: boolean): Gesture | null {
  switch (key) {
    case "ArrowLeft":
    case "ArrowRight": {
      const by = key === "ArrowLeft" ? -1 : 1;
      return shift ? { kind: "pan", by: by / 2 } : { kind: "step", by };
    }
    case "ArrowUp":
    case "ArrowDown":
      return { kind: "row", by: (key === "ArrowUp" ? 1 : -1) * (shift ? 10 : 1) };
    case "PageUp":
    case "PageDown":
      return { kind: "scroll", by: key === "PageUp" ? 0.5 : -0.5 };
    case "v":
    case "V":
      return { kind: "stretch", factor: shift ? 1 / ZOOM : ZOOM };
    case "+":
    case "=":
      return { kind: "zoom", factor: ZOOM };
    case "-":
      return { kind: "zoom", factor: 1 / ZOOM };
    case "Home":
    case "End":
      return { kind: "end", by: key === "Home" ? -1 : 1 };
    case "0":
    case "Escape":
      return { kind: "reset" };
    case "Enter":
    case " ":
      return { kind: "pick" };
    default:
      return null;
  }
}
