"""Tools used by hand: tensors, parameters, gradients, latents, gradient checks."""
