"""Live rows against a profile."""
