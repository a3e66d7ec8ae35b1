"""What a bundle is on disk: its files, documents, signature and single-file form; all that a loader reads."""
