"""What arrives of an update in weights on a grid or in a coarse number format."""
