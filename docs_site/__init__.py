"""What makes the documentation site beside the pages that are written by hand; see `docs_site.hooks`."""
