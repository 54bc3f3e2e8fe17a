"""Orthonormal factors of matrices, rotations and their generators, and weights that stay orthonormal in training."""
