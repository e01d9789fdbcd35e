"""Sessions, files, profiles and pages of the debuggers."""
