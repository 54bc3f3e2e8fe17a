"""The root of all errors: what, where, expected, got and the way out, as fields and as text.

Each layer defines its own classes beside the code that raises them; this file holds the root, the two bases that tell
the caller's mistake from a failure at run time, and the kinds that several layers raise.
"""

from __future__ import annotations

from typing import Any, TypedDict, Unpack

__all__ = [
    "AliasError",
    "BudgetUnreachable",
    "ComputeError",
    "CycleError",
    "DTypeError",
    "Facts",
    "GraphwrightError",
    "IndexOutOfRange",
    "MissingExtra",
    "NonFinite",
    "ShapeError",
    "UsageError",
]


class GraphwrightError(Exception):
    """Root of all errors of this package.

    Args:
        what: one sentence that says what is wrong.
        where: path, key, file or line at which it is wrong.
        expected: what would have been right.
        got: what was found.
        fix: the way out, as a call or a command where there is one.
    """

    def __init__(
        self,
        what: str = "",
        *,
        where: object = None,
        expected: object = None,
        got: object = None,
        fix: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.got, self.fix = what, where, expected, got, fix
        super().__init__(what)

    def to_json(self) -> dict[str, str]:
        """The facts of the error, for `--json` and the studio."""
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
    """The keywords of the root, for errors that take facts of their own and pass these on."""

    where: object
    expected: object
    got: object
    fix: str | None


class UsageError(GraphwrightError, ValueError):
    """The caller asked for something that cannot be."""


class BudgetUnreachable(UsageError):
    """No result meets a budget `asked` for; `best` is the nearest figure that one does meet."""

    def __init__(self, what: str, *, asked: float, best: float, where: object = None, fix: str | None = None) -> None:
        super().__init__(what, where=where, expected=f"{asked:g}", got=f"{best:g} at best", fix=fix)
        self.asked, self.best = asked, best


class ComputeError(GraphwrightError, RuntimeError):
    """Something failed while running, on input that looked right."""


class IndexOutOfRange(ComputeError, IndexError):
    """An id or a place outside the axis it indexes."""


class NonFinite(ComputeError, ArithmeticError):
    """A value is infinite or NaN where a check refuses that."""


class AliasError(UsageError):
    """A result would be written over memory that the op still reads."""


class CycleError(UsageError):
    """An edge would close a cycle; `path` lists the nodes on it."""

    def __init__(self, what: str, *, path: tuple[Any, ...] = (), **facts: Unpack[Facts]) -> None:
        super().__init__(what, **facts)
        self.path = path


class ShapeError(UsageError):
    """Shapes that do not fit an operation."""


class DTypeError(UsageError, TypeError):
    """A dtype that an operation does not take."""


class MissingExtra(UsageError, ImportError):
    """A feature needs packages that are not installed."""

    def __init__(self, extra: str, needed_for: str) -> None:
        super().__init__(f"{needed_for} needs the extra '{extra}'", fix=f"python -m pip install 'graphwright[{extra}]'")
        self.extra = extra
