// What canvases and inline styles need to know of the look; style.css holds the rest.
export function cssVariable(name: string): string {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** Colours of pinned layers; Okabe and Ito's, safe for colour-blind eyes, minus black. */
export const PIN_COLOURS: readonly string[] = ["#1f86d1", "#e0661a", "#0f9d76", "#d17fae", "#d99a0b", "#5bb8ea", "#9a78e0", "#8a8a1c"];

export function pinColour(index: number): string {
  return PIN_COLOURS[index % PIN_COLOURS.length] ?? "#1f86d1";
}
