"""Writing, verifying, signing, moving and describing bundles: the directory or file that is deployed."""
