"""What layers cannot do: stacks, copies and normalisations that leave nothing to learn."""
