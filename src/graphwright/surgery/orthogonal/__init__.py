"""Orthogonalise: nearest orthonormal factors, exact splits W = Q P, rotations and maps that stay orthogonal."""

from __future__ import annotations

from graphwright.surgery.errors import NotAbsorbable, NotRotation
from graphwright.surgery.orthogonal.lie import cayley, lie_exp, lie_log, skew, so_generator
from graphwright.surgery.orthogonal.methods import (
    condition,
    gain,
    gram_error,
    is_orthogonal,
    newton_schulz,
    polar,
    qr,
    stretch,
)
from graphwright.surgery.orthogonal.orthogonalize import orthogonalize
from graphwright.surgery.orthogonal.parametrize import bake, parametrize, parametrized, retract, settle, unbake
from graphwright.surgery.orthogonal.report import OrthoReport, OrthoRow

__all__ = [
    "NotAbsorbable",
    "NotRotation",
    "OrthoReport",
    "OrthoRow",
    "bake",
    "cayley",
    "condition",
    "gain",
    "gram_error",
    "is_orthogonal",
    "lie_exp",
    "lie_log",
    "newton_schulz",
    "orthogonalize",
    "parametrize",
    "parametrized",
    "polar",
    "qr",
    "retract",
    "settle",
    "skew",
    "so_generator",
    "stretch",
    "unbake",
]
