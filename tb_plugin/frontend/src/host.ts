// What the panel takes from the TensorBoard page around it. Everything is optional: the panel also runs alone.
import { toStorage, type UrlState } from "./model/url";

interface Storage {
  setString(key: string, value: string, options: { defaultValue: string; useLocalStorage: boolean }): void;
}

interface HostWindow extends Window {
  readonly tensorboard?: { readonly tf_storage?: Storage };
}

function host(): HostWindow | null {
  try {
    return window.parent !== window && window.parent.document !== null ? (window.parent as HostWindow) : null;
  } catch {
    return null;
  }
}

export function hostHash(): string {
  return host()?.location.hash ?? window.location.hash;
}

export function saveState(state: UrlState): void {
  const page = host();
  if (page === null) {
    const parts = toStorage(state)
      .filter(([, value]) => value !== "")
      .map(([key, value]) => `${key}=${encodeURIComponent(value)}`);
    // The page has a base address, to which a bare "#" would be relative.
    window.history.replaceState(null, "", `${window.location.pathname}${window.location.search}#${parts.join("&")}`);
    return;
  }
  for (const [key, value] of toStorage(state)) {
    page.tensorboard?.tf_storage?.setString(key, value, { defaultValue: "", useLocalStorage: false });
  }
}

/** Calls back with the theme now and at each change: TensorBoard's own toggle, else the system's. */
export function watchTheme(changed: (dark: boolean) => void): void {
  const body = host()?.document.body;
  if (body !== undefined) {
    const tell = (): void => changed(body.classList.contains("dark-mode"));
    new MutationObserver(tell).observe(body, { attributes: true, attributeFilter: ["class"] });
    tell();
    return;
  }
  const query = window.matchMedia("(prefers-color-scheme: dark)");
  query.addEventListener("change", () => changed(query.matches));
  changed(query.matches);
}

/** Whether somebody can see the panel: TensorBoard keeps hidden tabs alive in a frame without size. */
export function isVisible(): boolean {
  return document.visibilityState === "visible" && window.innerWidth > 0 && window.innerHeight > 0;
}

/** Calls back once the window rests: whether it has another width, null where a tab is shown again as it was. */
export function watchSize(rest: number, changed: (wider: boolean | null) => void): void {
  let [width, height, timer] = [window.innerWidth, window.innerHeight, 0];
  const rested = (): void => {
    if (!isVisible()) return;
    const [wider, higher] = [window.innerWidth !== width, window.innerHeight !== height];
    [width, height] = [window.innerWidth, window.innerHeight];
    changed(wider || higher ? wider : null);
  };
  window.addEventListener("resize", () => {
    window.clearTimeout(timer);
    timer = window.setTimeout(rested, rest);
  });
}

export function onReload(reload: () => void): void {
  const frame = window.frameElement as (Element & { reload?: () => void }) | null;
  if (frame !== null) frame.reload = reload;
}
