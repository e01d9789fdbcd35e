"""Arrays and tensors read once: norms, statistics, samples, sketches, checksums."""
