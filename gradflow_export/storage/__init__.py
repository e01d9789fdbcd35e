"""How records are stored, and read back (floor 1: numpy and protos, no torch)."""
