"""Orthonormal factors of matrices, rotations and their generators, and weights that remain orthonormal in training."""
