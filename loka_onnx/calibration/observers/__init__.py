"""What is added to a graph so that it measures itself."""
