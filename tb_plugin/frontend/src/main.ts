// The entry point that TensorBoard imports: builds the page once and hands over to the panel.
import { el } from "./dom";
import { onReload, watchTheme } from "./host";
import { STYLE } from "./look";
import { offline } from "./offline";
import { Panel } from "./panel";

export function render(): void {
  if (offline() === null) document.title = "GradFlow";
  document.documentElement.classList.toggle("offline", offline() !== null);
  document.documentElement.lang ||= "en";
  document.head.append(el("style", { text: STYLE }));
  const panel = new Panel();
  document.body.replaceChildren(panel.root);
  watchTheme((dark) => {
    document.documentElement.classList.toggle("dark", dark);
    panel.themed(dark);
  });
  onReload(() => void panel.refresh());
  void panel.start();
}

// A file that carries its data has nobody to call render().
if (offline() !== null) render();
