"""Dimensions that go together: solving for them, and cutting, growing and permuting their units."""
