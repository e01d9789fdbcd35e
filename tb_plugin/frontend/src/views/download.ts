// Takes away what is shown: one small menu wherever there is something to take.
import { el } from "../dom";
import type { Font } from "../model/figure";
import { printFigure } from "./print";

export interface Download {
  /** Called only when chosen; null when there is nothing to take. */
  readonly csv: () => string | null;
  readonly svg?: (font: Font) => string | null;
  readonly name: () => string;
}

const RATIO = 3;
const FIGURES = [
  ["svg", "svg"],
  ["svg-serif", "svg, serif"],
  ["png", "png"],
  ["pdf", "pdf, by printing"],
  ["pdf-serif", "pdf, serif"],
] as const;

export function downloadMenu(what: string, download: Download): HTMLSelectElement {
  const kinds = [["csv", "csv"], ...(download.svg === undefined ? [] : FIGURES)] as const;
  const menu = el("select", {
    class: "download",
    title: `Download ${what}`,
    attrs: { "aria-label": `Download ${what}` },
  });
  menu.append(
    el("option", { text: "\u2913", attrs: { value: "" } }),
    ...kinds.map(([value, text]) => el("option", { text, attrs: { value } })),
  );
  menu.addEventListener("change", () => {
    const [kind = "", serif] = menu.value.split("-");
    menu.value = "";
    const text = kind === "csv" ? download.csv() : (download.svg?.(serif === undefined ? "sans" : "serif") ?? null);
    if (text === null) return;
    const name = `${download.name()}.${kind}`;
    if (kind === "pdf") printFigure(text);
    else if (kind === "png") void toPng(text).then((blob) => save(name, blob));
    else save(name, new Blob([text], { type: kind === "csv" ? "text/csv" : "image/svg+xml" }));
  });
  return menu;
}

function save(name: string, blob: Blob): void {
  const address = URL.createObjectURL(blob);
  el("a", { attrs: { href: address, download: name } }).click();
  window.setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

async function toPng(text: string): Promise<Blob> {
  const image = new Image();
  image.src = `data:image/svg+xml;charset=utf-8,${encodeURIComponent(text)}`;
  await image.decode();
  const canvas = el("canvas");
  [canvas.width, canvas.height] = [image.width * RATIO, image.height * RATIO];
  canvas.getContext("2d")?.drawImage(image, 0, 0, canvas.width, canvas.height);
  return new Promise((done, failed) => {
    canvas.toBlob((blob) => (blob === null ? failed(new Error("no picture")) : done(blob)), "image/png");
  });
}
