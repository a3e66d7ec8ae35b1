"""What sites in low precision do to the model's outputs."""
