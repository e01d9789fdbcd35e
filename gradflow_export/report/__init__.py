"""What an exporter reports: issues, summary, files (floor 4)."""
