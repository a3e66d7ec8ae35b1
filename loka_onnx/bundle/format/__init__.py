"""Format of a bundle on disk: its files, documents, signature and single-file form."""
