"""Writing, verifying, describing and sending bundles: what is deployed."""
