// What a person sees where there is nothing yet: how to get some.
import type { CatalogEntry } from "../api";
import { el } from "../dom";

const SNIPPET = `from gradflow_export import Exporter

exporter = Exporter(model, logdir="runs/first").watch(criterion)
# train as always: a step ends when the optimizer has stepped
exporter.close()`;

export function emptyState(): HTMLElement {
  return el(
    "section",
    { class: "card empty", attrs: { "data-part": "empty" } },
    el("h1", { text: "No GradFlow data here yet" }),
    el("p", {
      text: "Watch a model to see here whether it is learning, and if not, which layer fails, since which step, and the fix.",
    }),
    el("pre", { class: "mono", text: SNIPPET }),
    el("p", {
      text: "Start TensorBoard on the same folder: tensorboard --logdir runs. This page loads new data automatically.",
    }),
    copyButton(SNIPPET),
  );
}

/** There is data, but none of this metric: what it is, and what makes a run hold it. */
export function lesson(entry: CatalogEntry): readonly HTMLElement[] {
  return [
    el("h3", { text: `Not recorded in this run: ${entry.title}` }),
    el("p", { class: "mono", text: entry.formula }),
    el("p", { text: entry.how }),
    el("pre", { class: "mono", text: entry.code }),
    copyButton(entry.code),
  ];
}

function copyButton(text: string): HTMLElement {
  const copy = el("button", { class: "btn", text: "Copy", attrs: { type: "button" } });
  copy.addEventListener("click", () => {
    void navigator.clipboard?.writeText(text).then(() => {
      copy.textContent = "Copied";
    });
  });
  return copy;
}
