// What every view that shows steps can ask for.

export interface Navigate {
  /** Chooses a step. */
  step(step: number): void;
  /** Shows these steps only; null shows all. */
  zoom(range: readonly [number, number] | null): void;
  /** Makes the range in view `factor` times as long around a step; returns whether anything changes. */
  zoomBy(factor: number, at: number): boolean;
  /** Moves the range in view by a share of its length; returns whether anything changes. */
  pan(share: number): boolean;
}
