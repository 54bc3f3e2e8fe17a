"""Axes of a program: solving for dimensions that are resized together; cutting, growing and permuting their units."""
