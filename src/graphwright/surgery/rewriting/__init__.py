"""Rewrites of users: a pattern that is found in a program and replaced, as one edit."""
