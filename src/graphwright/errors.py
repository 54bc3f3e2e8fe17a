"""The root of all errors: what, where, expected, got and a fix, as attributes and as text.

Each layer defines its own classes beside the code that raises them. This file holds the root, the two bases (mistakes
of the caller, failures at run time), and the kinds that several layers raise.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

__all__ = [
    "AliasError", "BudgetUnreachable", "ComputeError", "CycleError", "DTypeError", "Diverged", "Facts",
    "GraphwrightError", "IndexOutOfRange", "MissingExtra", "NonFinite", "OutOfMemory", "ShapeError", "UsageError",
    "check_type",
]  # fmt: skip


class GraphwrightError(Exception):
    """Root of all errors of this package.

    Args:
        what: one sentence that states the problem.
        where: the path, key, file or line of the problem.
        expected: what would have been valid.
        got: what was found instead.
        fix: how to solve it, as a call or a command if there is one.
    """

    def __init__(
        self, what: str = "", *, where: object = None, expected: object = None, got: object = None,
        fix: str | None = None,
    ) -> None:  # fmt: skip
        self.what, self.where, self.expected, self.got, self.fix = what, where, expected, got, fix
        super().__init__(what)

    def to_json(self) -> dict[str, str]:
        """Return a dict of strings with the class name and the fields that are not None, as `--json` prints it."""
        facts = {"error": type(self).__name__, "what": self.what}
        for name in ("where", "expected", "got", "fix"):
            if (value := getattr(self, name)) is not None:
                facts[name] = str(value)
        return facts

    def __str__(self) -> str:
        head = self.what if self.where is None else f"{self.where}: {self.what}"
        rows = [("expected", self.expected), ("got", self.got), ("try", self.fix)]
        return "\n".join([head, *(f"  {label:<9}{value}" for label, value in rows if value is not None)])


class Facts(TypedDict, total=False):
    """Types of the keyword arguments of `GraphwrightError`, for subclasses that forward them as `**facts`."""

    where: object
    expected: object
    got: object
    fix: str | None


class UsageError(GraphwrightError, ValueError):
    """The caller passed invalid arguments or made an invalid request."""


class BudgetUnreachable(UsageError):
    """No result meets the budget `asked`; `best` is the reachable value closest to it."""

    def __init__(self, what: str, *, asked: float, best: float, where: object = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, expected=f"{asked:g}", got=f"{best:g} at best", fix=fix)
        self.asked, self.best = asked, best


class ComputeError(GraphwrightError, RuntimeError):
    """A computation failed on valid arguments."""


class IndexOutOfRange(ComputeError, IndexError):
    """An index is outside the axis that it indexes."""


class OutOfMemory(ComputeError, MemoryError):
    """There is too little memory for an array, or the array is too large for any machine."""


class NonFinite(ComputeError, ArithmeticError):
    """A check found a value that is infinite or NaN."""


class Diverged(ComputeError):
    """Loss or gradients were not finite in several consecutive steps, whose updates were skipped."""


class AliasError(UsageError):
    """A result would overwrite memory that the op still reads."""


class CycleError(UsageError):
    """An edge closes a cycle, or would; `path` lists the nodes on the cycle."""

    def __init__(self, what: str, *, path: tuple[Any, ...] = (), **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.path = path


class ShapeError(UsageError):
    """The shapes of operands are invalid for an operation."""


class DTypeError(UsageError, TypeError):
    """An operation or a column does not accept a value of this dtype."""


class MissingExtra(UsageError, ImportError):
    """A feature needs optional packages that are not installed."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the extra '{extra}'", fix=f"python -m pip install 'graphwright[{extra}]'")
        self.extra = extra


def check_type(name: str, value: object, kinds: type | tuple[type, ...], expected: str, fix: str | None = None) -> None:
    """Raise UsageError unless the argument `name` is an instance of one of `kinds`, which `expected` describes."""
    if not isinstance(value, kinds):
        raise UsageError("the argument has another type", where=name, expected=expected, got=shown(value), fix=fix)


def shown(value: object) -> str:
    """Return the start of the repr of a value, after its type if that is not obvious."""
    try:
        text = repr(value)[:80]
    except Exception:  # an object of the caller's
        text = ""
    plain = value is None or isinstance(value, str | bytes | bool | int | float)
    return text if plain and text else f"{type(value).__name__} {text}".rstrip()
