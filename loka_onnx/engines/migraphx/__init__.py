"""AMD MIGraphX."""
