// The entry point that TensorBoard imports: builds the page once and hands over to the panel.
import uplotStyle from "uplot/dist/uPlot.min.css";
import { el } from "./dom";
import { onReload, watchTheme } from "./host";
import { Panel } from "./panel";
import { STYLE } from "./style";

export function render(): void {
  document.title = "GradFlow";
  document.head.append(el("style", { text: uplotStyle + STYLE }));
  const panel = new Panel();
  document.body.replaceChildren(panel.root);
  watchTheme((dark) => {
    document.documentElement.classList.toggle("dark", dark);
    panel.themed(dark);
  });
  onReload(() => void panel.refresh());
  void panel.start();
}
