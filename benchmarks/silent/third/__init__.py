"""A third set, written later still by people who had read no rule; it is in neither half of the draw."""
