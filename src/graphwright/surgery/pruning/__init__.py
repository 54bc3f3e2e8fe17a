"""Pruning of trained models: scores, least-squares restoring, allocation, residual branches, plans and healing."""
