// What a person sees who has no data yet: how to get some.
import { el } from "../dom";

const SNIPPET = `from gradflow_export import Exporter

exporter = Exporter(model, logdir="runs/first").watch(criterion)
# train as always: a step ends when the optimizer has stepped
exporter.close()`;

export function emptyState(): HTMLElement {
  const copy = el("button", { class: "btn", text: "Copy", attrs: { type: "button" } });
  copy.addEventListener("click", () => {
    void navigator.clipboard?.writeText(SNIPPET).then(() => {
      copy.textContent = "Copied";
    });
  });
  return el(
    "section",
    { class: "card empty", attrs: { "data-part": "empty" } },
    el("h1", { text: "No GradFlow data here yet" }),
    el("p", { text: "Watch a model, and this page answers: is it learning, and if not, which layer, since when, and what to do." }),
    el("pre", { class: "mono", text: SNIPPET }),
    el("p", { text: "Start TensorBoard on the same folder: tensorboard --logdir runs. This page looks for new data by itself." }),
    copy,
  );
}
