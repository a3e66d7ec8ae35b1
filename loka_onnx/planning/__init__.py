"""From a profile to plans, and from measurements to a choice."""
