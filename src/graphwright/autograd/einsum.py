"""Einstein summation as permutes, reshapes and batched matrix products, from left to right."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

from graphwright.autograd.apply import as_tensor
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

Labels = list[str | int]
"""One label per axis: a letter, or for an axis of `...` its negative index counted from the right end."""


def einsum(equation: str, *operands: Any) -> Tensor:
    """Sum products of operands over the labels that are not in the result: `einsum("bij,bjk->bik", a, b)`.

    Labels are letters, `...` stands for further axes, which broadcast. Without `->` the result has the axes of `...`,
    then the labels that occur once, in alphabetical order. A label repeated in one term selects its diagonal. Sizes of
    1 broadcast.

    Args:
        operands: floating tensors, one per comma-separated term, or a list of them.
    Raises: UsageError for an invalid equation, ShapeError if sizes differ.
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    given = operands[0] if len(operands) == 1 and isinstance(operands[0], list | tuple) else operands
    tensors = [as_tensor(o) for o in given]
    if len(terms) != len(tensors):
        expected = f"{len(terms)} operands"
        raise UsageError("terms and operands differ in number", where=equation, expected=expected, got=len(tensors))
    labels = [_labels(term, t.ndim, equation) for term, t in zip(terms, tensors, strict=True)]
    seen = [x for each in labels for x in each]
    free = sorted({x for x in seen if isinstance(x, int)})
    if arrow:
        result = _spread(right, free, equation)
    else:
        result = [*free, *sorted(x for x in seen if isinstance(x, str) and seen.count(x) == 1)]
    if len(set(result)) < len(result):
        raise UsageError("the result repeats a label", where=equation, got=right)
    if not set(result) <= set(seen):
        raise UsageError("the result has a label that no term has", where=equation, got=right)
    parts = [_diagonal(t, each) for t, each in zip(tensors, labels, strict=True)]
    _check_sizes(parts, equation)
    x, have = parts[0]
    for count, (y, other) in enumerate(parts[1:], 2):
        later = {label for _, each in parts[count:] for label in each}
        x, have = contract(x, have, y, other, later | set(result))
    x, have = _without(x, have, set(result))
    return call("permute", x, axes=tuple(have.index(label) for label in result))


def _labels(term: str, rank: int, equation: str) -> Labels:
    letters = term.replace("...", "", 1)
    if not all(c.isascii() and c.isalpha() for c in letters):
        raise UsageError("a label is not a letter", where=equation, got=term)
    if (len(letters) > rank) if "..." in term else (len(letters) != rank):
        what, least = f"the operand of term {term!r} has a wrong number of axes", "at least " if "..." in term else ""
        raise ShapeError(what, where=equation, expected=f"{least}{len(letters)}", got=rank)
    return _spread(term, list(range(len(letters) - rank, 0)), equation)


def _spread(term: str, free: Sequence[int], equation: str) -> Labels:
    head, dots, tail = term.partition("...")
    if "." in head + tail:
        raise UsageError("a term has dots other than a single `...`", where=equation, got=term)
    return [*head, *(free if dots else ()), *tail]


def _diagonal(x: Tensor, labels: Labels) -> tuple[Tensor, Labels]:
    """Replace axes that have the same label by their diagonal; return tensor and remaining labels."""
    for label in dict.fromkeys(labels):
        while labels.count(label) > 1:
            a, b = [i for i, have in enumerate(labels) if have == label][:2]
            n = x.shape[a]
            if x.shape[b] != n:
                what = f"axes with the same label, {label}, have different sizes"
                raise ShapeError(what, expected=n, got=x.shape[b])
            x = call("diagonal", x, axes=(a, b))
            labels = [*(have for i, have in enumerate(labels) if i not in (a, b)), label]
    return x, labels


def _check_sizes(parts: Sequence[tuple[Tensor, Labels]], equation: str) -> None:
    sizes: dict[str | int, int] = {}
    for x, labels in parts:
        for label, size in zip(labels, x.shape, strict=True):
            known = sizes.setdefault(label, size)
            if 1 in (known, size):
                sizes[label] = known if size == 1 else size
            elif known != size:
                name = label if isinstance(label, str) else f"axis {label} of `...`"
                what = f"axes with the same label, {name}, have different sizes"
                raise ShapeError(what, where=equation, expected=known, got=size)


def _without(x: Tensor, labels: Labels, keep: set[str | int]) -> tuple[Tensor, Labels]:
    """Sum over the axes whose labels are not in `keep`; return the sum and its labels."""
    axes = tuple(i for i, label in enumerate(labels) if label not in keep)
    return (x.sum(axes) if axes else x), [label for label in labels if label in keep]


def contract(a: Tensor, la: Labels, b: Tensor, lb: Labels, keep: set[str | int]) -> tuple[Tensor, Labels]:
    """Multiply operands with labels `la` and `lb`, sum over labels not in `keep`; return the result and its labels."""
    a, la = _without(a, la, keep | set(lb))
    b, lb = _without(b, lb, keep | set(la))
    shared = [x for x in la if x in lb]
    batch, inner = [x for x in shared if x in keep], [x for x in shared if x not in keep]
    own_a, own_b = [x for x in la if x not in lb], [x for x in lb if x not in la]
    labels = [*batch, *own_a, *own_b]
    if not inner:
        a, b = _ordered(a, la, [*batch, *own_a]), _ordered(b, lb, [*batch, *own_b])
        a = a.reshape(*a.shape, *(1 for _ in own_b))
        return a * b.reshape(*b.shape[: len(batch)], *(1 for _ in own_a), *b.shape[len(batch) :]), labels
    size = {x: max(a.shape[la.index(x)], b.shape[lb.index(x)], key=lambda n: n != 1) for x in shared}
    a, b = (t.expand(*(size.get(x, n) for x, n in zip(ls, t.shape, strict=True))) for t, ls in ((a, la), (b, lb)))
    rows, columns = ([t.shape[ls.index(x)] for x in own] for t, ls, own in ((a, la, own_a), (b, lb, own_b)))
    lead, depth = [size[x] for x in batch], prod(size[x] for x in inner)
    left = _ordered(a, la, [*batch, *own_a, *inner]).reshape(*lead, prod(rows), depth)
    right = _ordered(b, lb, [*batch, *inner, *own_b]).reshape(*lead, depth, prod(columns))
    return (left @ right).reshape(*lead, *rows, *columns), labels


def _ordered(x: Tensor, have: Labels, want: Labels) -> Tensor:
    return x.permute(*(have.index(label) for label in want)) if want != have else x
