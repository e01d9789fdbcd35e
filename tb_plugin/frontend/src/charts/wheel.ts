// The wheel over a map or a chart zooms, but never takes the page away from somebody who is scrolling past.

const GESTURE_MS = 250;
const SPEED = 0.0022;

let scrolled = -Infinity;
window.addEventListener("wheel", (event) => (scrolled = event.defaultPrevented ? -Infinity : event.timeStamp), {
  passive: true,
});

/**
 * Calls back with a factor for the range in view: below 1 to look closer. `zoom` returns whether anything changes; where
 * nothing does, as when all steps are in view and the wheel asks for more, the page scrolls.
 */
export function onWheel(root: HTMLElement, zoom: (factor: number, event: WheelEvent) => boolean): void {
  root.addEventListener(
    "wheel",
    (event) => {
      const passing = event.timeStamp - scrolled < GESTURE_MS && !event.ctrlKey;
      // With Shift some browsers report the turn of the wheel as sideways.
      const turned = event.shiftKey && event.deltaY === 0 ? event.deltaX : event.deltaY;
      if (passing || Math.abs(event.deltaX) > Math.abs(turned)) return;
      const lines = event.deltaMode === WheelEvent.DOM_DELTA_PIXEL ? 1 : 30;
      const delta = Math.max(-400, Math.min(400, turned * lines));
      if (zoom(Math.exp(delta * SPEED), event)) event.preventDefault();
    },
    { passive: false },
  );
}
