"""Dead, saturated and zero outputs of activations, as modules and as functions."""
