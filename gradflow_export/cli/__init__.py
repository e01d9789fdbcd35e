"""The ``gradflow`` command (floor 4)."""
