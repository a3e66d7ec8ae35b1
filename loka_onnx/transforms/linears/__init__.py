"""Linear layers: reading them, moving factors into them, merging, splitting, padding and smoothing them."""
