"""Encoding of ops on arrays as VM instructions (the `vm` field of definitions in `ops/`), splitting and fusion."""
