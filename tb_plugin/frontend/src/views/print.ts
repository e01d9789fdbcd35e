// A figure alone on a page of its own size, handed to the browser's printing: that writes PDF without a library.
import { el } from "../dom";

let leave: (() => void) | null = null;

export function printFigure(text: string): void {
  leave?.();
  const picture = document.importNode(new DOMParser().parseFromString(text, "image/svg+xml").documentElement, true);
  const [width, height] = ["width", "height"].map((name) => picture.getAttribute(name) ?? "0");
  const page = el("style", { text: `@page { size: ${width}px ${height}px; margin: 0 }` });
  const sheet = el("div", { class: "sheet", attrs: { "aria-hidden": "true" } }, picture);
  document.documentElement.classList.add("one-figure");
  document.body.append(page, sheet);
  leave = (): void => {
    document.documentElement.classList.remove("one-figure");
    page.remove();
    sheet.remove();
    leave = null;
  };
  window.addEventListener("afterprint", () => leave?.(), { once: true });
  // A picture inside of the figure is decoded before the page is taken.
  const images = [...sheet.querySelectorAll("image")].map((image) => {
    const decoded = new Image();
    decoded.src = image.getAttribute("href") ?? "";
    return decoded.decode().catch(() => undefined);
  });
  void Promise.all(images).then(() => window.print());
}
