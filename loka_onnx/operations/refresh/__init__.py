"""A run brought to a retrained checkpoint of the same structure."""
