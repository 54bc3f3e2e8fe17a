"""Saved programs and parameter files: written whole or not at all, read strictly."""
