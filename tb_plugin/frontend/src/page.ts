// The views of a run's page, as they are filled.
import type { ArchitectureView } from "./views/architecture";
import type { Curves } from "./views/curves";
import type { Header } from "./views/header";
import type { LosingCard } from "./views/losing";
import type { MapView } from "./views/map";
import type { RidgeView } from "./views/ridge";
import type { StripView } from "./views/strip";
import type { HealthTable } from "./views/table";
import type { VerdictView } from "./views/verdict";

export interface Views {
  readonly page: HTMLElement;
  readonly header: Header;
  readonly verdict: VerdictView;
  readonly strip: StripView;
  readonly map: MapView;
  /** The map of the run compared with. */
  readonly second: MapView;
  readonly curves: Curves;
  readonly losing: LosingCard;
  readonly architecture: ArchitectureView;
  readonly table: HealthTable;
  readonly ridges: RidgeView;
  /** Shows the chosen step, and the pinned layers, in every view. */
  showStep(): void;
  showPins(): void;
  /** What is chosen goes into the address. */
  save(): void;
  /** Says what went wrong, nothing where all is well. */
  showError(message: string): void;
}
