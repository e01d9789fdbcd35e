"""What stands between this package and torch."""
