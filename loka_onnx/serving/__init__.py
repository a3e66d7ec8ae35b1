"""A reference HTTP server for one bundle; it speaks the open inference protocol v2 (KServe)."""
