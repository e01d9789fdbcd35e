// What canvases and inline styles need to know of the look; look/ holds the rest.
const known = new Map<string, string>();
let theme = "";

/** A colour of the theme. It is read once per theme: each reading makes the browser bring all styles up to date. */
export function cssVariable(name: string): string {
  const root = document.documentElement;
  if (theme !== root.className) known.clear();
  theme = root.className;
  const value = known.get(name) ?? getComputedStyle(root).getPropertyValue(name).trim();
  known.set(name, value);
  return value;
}

/** The same colour on white paper, whatever the theme. */
export function onPaper(name: string): string {
  const probe = document.createElement("i");
  probe.className = "paper";
  document.body.append(probe);
  const value = getComputedStyle(probe).getPropertyValue(name).trim();
  probe.remove();
  return value;
}

/** Colours of pinned layers; Okabe and Ito's, safe for colour-blind eyes, minus black. */
export const PIN_COLOURS: readonly string[] = [
  "#1f86d1",
  "#e0661a",
  "#0f9d76",
  "#d17fae",
  "#d99a0b",
  "#5bb8ea",
  "#9a78e0",
  "#8a8a1c",
];

export function pinColour(index: number): string {
  return PIN_COLOURS[index % PIN_COLOURS.length] ?? "#1f86d1";
}
