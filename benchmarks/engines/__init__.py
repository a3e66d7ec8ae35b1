"""Speed, and speed with accuracy, of engines on a GPU."""
