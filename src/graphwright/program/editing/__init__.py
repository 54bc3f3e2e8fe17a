"""Editing a program: primitive edits, transactions, commit, undo, journal, replay, recipes and proposals."""
