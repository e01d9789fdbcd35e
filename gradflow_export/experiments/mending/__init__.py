"""Changes to what a script says, each for a mistake that structure proves; tried only where a finding asks for it."""
