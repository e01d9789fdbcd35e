"""What an evaluation shows: its mode, the size of its outputs, and its loss."""
