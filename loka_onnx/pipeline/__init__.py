"""The stages in order, the run directory that they write to, and the demo."""
