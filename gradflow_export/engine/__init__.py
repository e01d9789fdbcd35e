"""The training thread and the worker thread: what is read when, and what becomes of it (floor 3)."""
