"""Evidence of silent mistakes: one file for each family (floor 3, torch)."""
