"""Formulas written once in plain Python, and `specialise`, which copies them for another kind of operands.

A formula uses Python operators and the primitives below (`exp`, `fma`, ...). As imported, it computes on numpy arrays.
`specialise(module, primitives, wrap)` returns a copy of a module of formulas in which the primitives are replaced:
the VM and the population loops compile it with numba for vectors of 16 float32, tensors trace it.
Importing this folder loads no numba.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import FunctionType, ModuleType
from typing import Any

import numpy as np

exp: Any = np.exp
log: Any = np.log
log1p: Any = np.log1p
tanh: Any = np.tanh
sine: Any = np.sin
cosine: Any = np.cos
sqrt: Any = np.sqrt
absolute: Any = np.abs
maximum: Any = np.maximum
select: Any = np.where


def erf(x: Any) -> Any:
    """The error function, elementwise, in float64."""
    from math import erf as one

    return np.vectorize(one, otypes=[np.float64])(x)


def fma(x: Any, y: Any, z: Any) -> Any:
    """x·y + z; it is rounded once in compiled code, and after each operation in numpy."""
    return x * y + z


def specialise(
    formulas: ModuleType, primitives: Mapping[str, Any], wrap: Callable[[FunctionType], Any] = lambda f: f
) -> Any:
    """Return a copy of a module of formulas bound to other primitives.

    Args:
        formulas: a module of this folder.
        primitives: replacements by name, for primitives or for whole formulas (a native sigmoid, say).
        wrap: applied to each function, for instance `numba.njit`; formulas call each other's wrapped forms.
    """
    made = ModuleType(formulas.__name__, formulas.__doc__)
    space = vars(made)
    space.update({**vars(formulas), **primitives})
    for name, value in vars(formulas).items():
        if isinstance(value, FunctionType) and value.__module__ == formulas.__name__ and name not in primitives:
            space[name] = wrap(FunctionType(value.__code__, space, name, value.__defaults__))
    return made
