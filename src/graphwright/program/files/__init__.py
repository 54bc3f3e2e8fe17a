"""Saved programs and parameter files: written atomically, read strictly."""
