"""What the autograd graph of a loss shows before its backward pass (floor 2, torch)."""
