"""Weights that are functions of other parameters, under torch's names: weight norm and spectral norm.

A hook before `forward` computes the weight, an ordinary tensor, from the parameters that replace it.
"""

from __future__ import annotations

from typing import TypeVar

from graphwright.autograd import Parameter, Tensor, no_grad, randn
from graphwright.errors import UsageError
from graphwright.nn.hooks import HookHandle
from graphwright.nn.module import Buffer, Module

__all__ = ["remove_spectral_norm", "remove_weight_norm", "spectral_norm", "weight_norm"]
_Module = TypeVar("_Module", bound=Module)


class _Parametrization:
    """A hook that computes one weight of a module.

    Attributes:
        name: attribute of the weight.
        names: attributes of the parameters and buffers of which it is made.
    """

    names: tuple[str, ...]
    handle: HookHandle

    def __init__(self, module: Module, name: str) -> None:
        weight = getattr(module, name, None)
        if not isinstance(weight, Parameter):
            expected = ", ".join(n for n, _ in module.named_parameters(recurse=False))
            raise UsageError(
                "the module has no such parameter", where=type(module).__name__, expected=expected, got=name
            )
        self.name, self.shape = name, weight.shape
        delattr(module, name)
        self.attach(module, weight)
        self.set(module)
        self.handle = module.register_forward_pre_hook(self)
        module.__dict__.setdefault("_parametrized", {})[name] = self

    def __call__(self, module: Module, args: object) -> None:
        self.set(module)

    def set(self, module: Module) -> None:
        """Compute the weight."""
        module.__dict__[self.name] = self.weight(module)

    def attach(self, module: Module, weight: Parameter) -> None:
        """Give the module the parameters that replace the weight."""
        raise NotImplementedError

    def weight(self, module: Module) -> Tensor:
        """Return the weight."""
        raise NotImplementedError

    def remove(self, module: Module) -> None:
        """Make the present weight a parameter again."""
        value = Parameter(self.weight(module).detach().clone())
        self.handle.remove()
        for name in self.names:
            delattr(module, name)
        delattr(module, self.name)
        setattr(module, self.name, value)
        del module.__dict__["_parametrized"][self.name]


class _WeightNorm(_Parametrization):
    """g·v / ‖v‖, with a norm for each index of an axis, or one of all entries."""

    def __init__(self, module: Module, name: str, dim: int | None) -> None:
        self.dim, self.names = dim, (f"{name}_g", f"{name}_v")
        super().__init__(module, name)

    def _norm(self, v: Tensor) -> Tensor:
        if self.dim is None or self.dim == -1:
            return v.norm()
        return v.norm(2, tuple(a for a in range(v.ndim) if a != self.dim % v.ndim), True)

    def attach(self, module: Module, weight: Parameter) -> None:
        setattr(module, self.names[0], Parameter(self._norm(weight.detach())))
        setattr(module, self.names[1], Parameter(weight.detach()))

    def weight(self, module: Module) -> Tensor:
        g, v = (getattr(module, name) for name in self.names)
        return v * (g / self._norm(v))


class _SpectralNorm(_Parametrization):
    """W / σ, with the largest singular value σ = uᵀ W v, whose vectors a call in training improves."""

    def __init__(self, module: Module, name: str, iterations: int, eps: float, dim: int) -> None:
        self.iterations, self.eps, self.dim = iterations, eps, dim
        self.names = (f"{name}_orig", f"{name}_u", f"{name}_v")
        super().__init__(module, name)

    def _matrix(self, weight: Tensor) -> Tensor:
        return weight.movedim(self.dim, 0).reshape(weight.shape[self.dim], -1)

    def _unit(self, x: Tensor) -> Tensor:
        return x / x.norm().clamp(min=self.eps)

    def attach(self, module: Module, weight: Parameter) -> None:
        rows, columns = self._matrix(weight.detach()).shape
        setattr(module, self.names[0], Parameter(weight.detach()))
        for name, size in zip(self.names[1:], (rows, columns), strict=True):
            setattr(module, name, Buffer(self._unit(randn(size, dtype=weight.dtype)).concrete("a buffer")))

    def weight(self, module: Module) -> Tensor:
        weight, u, v = (getattr(module, name) for name in self.names)
        matrix, left, right = self._matrix(weight), u.detach(), v.detach()
        if module.trains:
            with no_grad():
                for _ in range(self.iterations):
                    right = self._unit(matrix.mT @ left)
                    left = self._unit(matrix @ right)
                u.assign(left)
                v.assign(right)
            left, right = left.clone(), right.clone()
        return weight / (left @ (matrix @ right))


def weight_norm(module: _Module, name: str = "weight", dim: int | None = 0) -> _Module:
    """Replace a weight by its norms `<name>_g` and directions `<name>_v` (Salimans and Kingma 2016).

    Args:
        dim: the axis whose indices have a norm each; None for one norm of all entries.
    Returns: the module. Raises: UsageError if it has no such parameter.
    """
    _WeightNorm(module, name, dim)
    return module


def spectral_norm(
    module: _Module, name: str = "weight", n_power_iterations: int = 1, eps: float = 1e-12, dim: int | None = None
) -> _Module:
    """Divide a weight by its largest singular value, found by power iteration (Miyato et al. 2018).

    The parameter is `<name>_orig`; the buffers `<name>_u` and `<name>_v` change in training.

    Args:
        n_power_iterations: iterations in each call in training.
        eps: smallest norm in a division.
        dim: the axis of outputs; by default 0, for transposed convolutions 1.
    Returns: the module. Raises: UsageError if it has no such parameter, or for fewer than 1 iterations.
    """
    if n_power_iterations < 1:
        raise UsageError("too few iterations", where="spectral_norm", expected=">= 1", got=n_power_iterations)
    axis = int(bool(getattr(module, "transposed", False))) if dim is None else dim
    _SpectralNorm(module, name, n_power_iterations, eps, axis)
    return module


def remove_weight_norm(module: _Module, name: str = "weight") -> _Module:
    """Make the weight of `weight_norm` a parameter again. Raises: UsageError without one."""
    return _removed(module, name, _WeightNorm)


def remove_spectral_norm(module: _Module, name: str = "weight") -> _Module:
    """Make the weight of `spectral_norm` a parameter again. Raises: UsageError without one."""
    return _removed(module, name, _SpectralNorm)


def _removed(module: _Module, name: str, kind: type[_Parametrization]) -> _Module:
    found = module.__dict__.get("_parametrized", {}).get(name)
    if not isinstance(found, kind):
        what = "the weight has no such parametrization"
        raise UsageError(what, where=f"{type(module).__name__}.{name}", got=type(found).__name__)
    found.remove(module)
    return module
