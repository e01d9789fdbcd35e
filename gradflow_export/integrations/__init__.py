"""One line in a framework's trainer: step numbers, log directory, W&B run and end are the framework's.

Each module imports its framework, and nothing else does. ``docs/integrations.md`` has a line for each.
"""
