"""Surgery: what is wrong with a model, what it can do without, and what an operation cost it."""
