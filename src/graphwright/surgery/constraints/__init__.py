"""Conditions on a program; their violations are findings with repairs."""
