"""The effect of sites in low precision on the outputs of a model."""
