"""``colibri quality``: what a format of weights and activations costs, measured against the original checkpoint."""
