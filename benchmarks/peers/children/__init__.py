"""What runs in the environments of other tools: scripts that import nothing of this project."""
