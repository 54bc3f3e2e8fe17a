"""Factored matrices: low rank, tensor trains and rings that run as chains of products, and LoRA branches."""
