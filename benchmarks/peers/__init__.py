"""The same models and rows through other tools, each in an environment of its own."""
