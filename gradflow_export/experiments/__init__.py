"""Runs a training script again with one thing changed at a time, and says which change makes it learn (floor 9).

``battery`` decides what is run next, ``laboratory`` starts runs in child processes, ``patient`` is what stands inside
such a process between the script and torch, ``treatments`` are the changes, and ``decision`` judges what came of them.
"""
