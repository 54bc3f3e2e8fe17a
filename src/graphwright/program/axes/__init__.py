"""Axes of a program: inference of dimensions that are resized together; cutting, growing and permuting their units."""
