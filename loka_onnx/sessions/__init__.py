"""Loading and running a model or an engine."""
