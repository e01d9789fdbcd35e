"""What to do about NaN and Inf: found before the optimizer steps, repaired, skipped or taken back."""
