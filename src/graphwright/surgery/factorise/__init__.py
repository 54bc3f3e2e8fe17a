"""Factorise: low rank, tensor trains and rings that run as chains of products and go back to a matrix."""

from __future__ import annotations

from graphwright.surgery.errors import CompressionWouldGrow, NotFactorable
from graphwright.surgery.factorise.allocate import allocate
from graphwright.surgery.factorise.chain import densify, factored
from graphwright.surgery.factorise.compress import compress
from graphwright.surgery.factorise.curve import Point, curve
from graphwright.surgery.factorise.factors import LowRank, TensorRing, TensorTrain, compression_ratio
from graphwright.surgery.factorise.lora import lora, merge_lora
from graphwright.surgery.factorise.methods import asvd, svd
from graphwright.surgery.factorise.report import CompressionReport, FitRow

__all__ = [
    "CompressionReport",
    "CompressionWouldGrow",
    "FitRow",
    "LowRank",
    "NotFactorable",
    "Point",
    "TensorRing",
    "TensorTrain",
    "allocate",
    "asvd",
    "compress",
    "compression_ratio",
    "curve",
    "densify",
    "factored",
    "lora",
    "merge_lora",
    "svd",
]
