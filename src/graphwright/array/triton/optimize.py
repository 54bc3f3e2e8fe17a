"""Steps of Adam, AdamW and SGD for any number of parameters, and the unscaling of gradients: two launches each.

The addresses of all tensors are in a table on the device, a column per parameter. A first launch counts the steps and
computes the numbers of each parameter; a second one updates all entries, a program per `each` entries of a parameter.
The host reads nothing: a parameter that `found_inf` excludes keeps its values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import inf, log
from typing import Any

import torch
import triton
import triton.language as tl

from graphwright.array.backend import Attrs
from graphwright.array.cpu.kernel import Bind, Tensors, Work
from graphwright.array.dtype import float32, float64
from graphwright.array.spec import Spec
from graphwright.array.triton.kernel import FLOATS, Launch, compiled, kernel
from graphwright.array.triton.rows import narrow, wide

BLOCK = 1024
"""Entries that a program updates at once."""
PARAMETERS = 128
"""Parameters whose steps a program counts."""
PROGRAMS = 4096
"""Programs from which on each updates more entries."""


@triton.jit
def _excluded(found, index, there, EACH: tl.constexpr):
    """Return whether found_inf excludes parameters: it has a number for EACH of them, or one for all."""
    at = index if EACH else index * 0
    return tl.load(found + at, mask=there, other=1.0) != 0


@triton.jit
def _at(table, row, parameters, index, like, ALIGNED: tl.constexpr):
    """Return the address in a row of the table for one parameter, of elements as at `like`."""
    address = tl.load(table + row * parameters + index, mask=index < parameters, other=0).to(like.dtype)
    if ALIGNED:
        address = tl.multiple_of(address, 16)
    return address


@compiled
def count_steps(
    lr, found, table, numbers, like, parameters: tl.int32, steps: tl.int32, log1: tl.float64, log2: tl.float64,
    EACH: tl.constexpr, ADAM: tl.constexpr, PARAMETERS: tl.constexpr,
):  # fmt: skip
    """Write the step counts t + 1 and, for Adam, lr / (1 - β1ᵗ) and 1 / √(1 - β2ᵗ); for SGD lr and whether t is 0.

    `numbers` [2, parameters] is float64; log1 and log2 are ln β1 and ln β2; `steps` is the table's row of old counts,
    the next one that of new ones.
    """
    index = tl.program_id(0) * PARAMETERS + tl.arange(0, PARAMETERS)
    there = index < parameters
    kept = _excluded(found, index, there, EACH)
    old = tl.load(table + steps * parameters + index, mask=there, other=0).to(like.dtype)
    new = tl.load(table + (steps + 1) * parameters + index, mask=there, other=0).to(like.dtype)
    t = tl.load(old, mask=there, other=1.0).to(tl.float32)
    rate = tl.load(lr + index * 0, mask=there, other=0.0).to(tl.float64)
    if ADAM:
        count = (t + 1.0).to(tl.float64)
        rate, scale = rate / (1.0 - tl.exp(count * log1)), tl.rsqrt(1.0 - tl.exp(count * log2))
    else:
        scale = (t == 0.0).to(tl.float64)
    tl.store(numbers + index, rate, mask=there)
    tl.store(numbers + parameters + index, scale, mask=there)
    tl.store(new, tl.where(kept, t, t + 1.0), mask=there)


@triton.jit
def _own(first_program, sizes, parameters, each, search):
    """Return the parameter of this program, the first of its entries and their end.

    `first_program` has the number of the first program of each parameter, in ascending order.
    """
    program = tl.program_id(0)
    low, high = 0, parameters
    for _ in range(0, search):  # the last parameter whose first program is not after this one
        middle = (low + high) // 2
        at = tl.load(first_program + middle, mask=middle < parameters, other=2**31 - 1)
        if at <= program:
            low = middle
        else:
            high = middle
    start = (program - tl.load(first_program + low, mask=low < parameters, other=0).to(tl.int64)) * each
    size = tl.load(sizes + low, mask=low < parameters, other=0)
    return low, start, tl.minimum(start + each, size)


@compiled
def adam_entries(
    lr, found, table, first_program, sizes, numbers, like, parameters: tl.int32, each: tl.int32, search: tl.int32,
    beta1: tl.float64, beta2: tl.float64, fresh1: tl.float64, fresh2: tl.float64, eps: tl.float64, decay: tl.float64,
    EACH: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, AMSGRAD: tl.constexpr,
    MAXIMIZE: tl.constexpr, DECOUPLED: tl.constexpr,
):  # fmt: skip
    """Update entries of one parameter by Adam. Rows of the table: g, θ, m, v(, largest v), then the results."""
    index, start, stop = _own(first_program, sizes, parameters, each, search)
    here = index < parameters
    kept = _excluded(found, index, here, EACH)
    kind: tl.constexpr = like.dtype.element_ty
    RESULTS: tl.constexpr = 5 if AMSGRAD else 4
    step = tl.load(lr + index * 0, mask=here, other=0.0).to(kind)
    rate = tl.load(numbers + index, mask=here, other=0.0).to(kind)
    scale = tl.load(numbers + parameters + index, mask=here, other=0.0).to(kind)
    g_at, p_at = _at(table, 0, parameters, index, like, ALIGNED), _at(table, 1, parameters, index, like, ALIGNED)
    m_at, v_at = _at(table, 2, parameters, index, like, ALIGNED), _at(table, 3, parameters, index, like, ALIGNED)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < stop
        g = tl.load(g_at + at, mask=inside, other=0.0).to(kind)
        p = tl.load(p_at + at, mask=inside, other=0.0).to(kind)
        m = tl.load(m_at + at, mask=inside, other=0.0).to(kind)
        v = tl.load(v_at + at, mask=inside, other=0.0).to(kind)
        if MAXIMIZE:
            g = -g
        if DECOUPLED:
            shrunk = p - p * step * tl.full([], decay, kind)
        else:
            shrunk = p
            g = g + p * tl.full([], decay, kind)
        new_m = m * tl.full([], beta1, kind) + g * tl.full([], fresh1, kind)
        new_v = v * tl.full([], beta2, kind) + g * g * tl.full([], fresh2, kind)
        root = new_v
        if AMSGRAD:
            largest = tl.load(_at(table, 4, parameters, index, like, ALIGNED) + at, mask=inside, other=0.0).to(kind)
            root = tl.maximum(largest, new_v, propagate_nan=tl.PropagateNan.ALL)
            to = _at(table, RESULTS + 3, parameters, index, like, ALIGNED)
            tl.store(to + at, tl.where(kept, largest, root), mask=inside)
        new_p = shrunk - rate * new_m / (tl.sqrt(root) * scale + tl.full([], eps, kind))
        to = _at(table, RESULTS, parameters, index, like, ALIGNED)
        tl.store(to + at, tl.where(kept, p, new_p), mask=inside)
        to = _at(table, RESULTS + 1, parameters, index, like, ALIGNED)
        tl.store(to + at, tl.where(kept, m, new_m), mask=inside)
        to = _at(table, RESULTS + 2, parameters, index, like, ALIGNED)
        tl.store(to + at, tl.where(kept, v, new_v), mask=inside)


@compiled
def sgd_entries(
    lr, found, table, first_program, sizes, numbers, like, parameters: tl.int32, each: tl.int32, search: tl.int32,
    mu: tl.float64, fresh: tl.float64, decay: tl.float64,
    EACH: tl.constexpr, ALIGNED: tl.constexpr, BLOCK: tl.constexpr, MOMENTUM: tl.constexpr,
    MAXIMIZE: tl.constexpr, NESTEROV: tl.constexpr,
):  # fmt: skip
    """Update entries of one parameter by SGD. Rows of the table: g, θ(, b), then the results."""
    index, start, stop = _own(first_program, sizes, parameters, each, search)
    here = index < parameters
    kept = _excluded(found, index, here, EACH)
    kind: tl.constexpr = like.dtype.element_ty
    RESULTS: tl.constexpr = 3 if MOMENTUM else 2
    rate = tl.load(lr + index * 0, mask=here, other=0.0).to(kind)
    g_at, p_at = _at(table, 0, parameters, index, like, ALIGNED), _at(table, 1, parameters, index, like, ALIGNED)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < stop
        g = tl.load(g_at + at, mask=inside, other=0.0).to(kind)
        p = tl.load(p_at + at, mask=inside, other=0.0).to(kind)
        if MAXIMIZE:
            g = -g
        g = g + p * tl.full([], decay, kind)
        if MOMENTUM:
            is_first = tl.load(numbers + parameters + index, mask=here, other=0.0) != 0
            b = tl.load(_at(table, 2, parameters, index, like, ALIGNED) + at, mask=inside, other=0.0).to(kind)
            new_b = b * tl.full([], mu, kind) + g * tl.full([], fresh, kind)
            new_b = tl.where(is_first, g, new_b)
            to = _at(table, RESULTS + 1, parameters, index, like, ALIGNED)
            tl.store(to + at, tl.where(kept, b, new_b), mask=inside)
            if NESTEROV:
                g = g + tl.full([], mu, kind) * new_b
            else:
                g = new_b
        to = _at(table, RESULTS, parameters, index, like, ALIGNED)
        tl.store(to + at, tl.where(kept, p, p - rate * g), mask=inside)


@compiled
def unscale_entries(
    inverse, table, first_program, sizes, flags, like, parameters: tl.int32, each: tl.int32, search: tl.int32,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Multiply entries of one gradient by `inverse`; flag the programs that found an infinity or NaN."""
    index, start, stop = _own(first_program, sizes, parameters, each, search)
    factor = tl.load(inverse + index * 0, mask=index < parameters, other=0.0).to(tl.float32)
    g_at, to = _at(table, 0, parameters, index, like, ALIGNED), _at(table, 1, parameters, index, like, ALIGNED)
    bad = tl.zeros([BLOCK], tl.int32)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        inside = at < stop
        g = wide(tl.load(g_at + at, mask=inside, other=0.0))
        bad = bad | (inside & ((g - g) != 0)).to(tl.int32)
        tl.store(to + at, narrow(g * factor, to), mask=inside)
    tl.store(flags + tl.program_id(0), tl.max(bad, 0).to(tl.float32), mask=index < parameters)


@compiled
def any_flag(flags, found, out, count: tl.int32, BLOCK: tl.constexpr):
    """Write 1 if some flag is set, else `found`."""
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(0, count, BLOCK):
        at = first + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(flags + at, mask=at < count, other=0.0).to(tl.float32))
    before = tl.load(found, mask=count >= 0, other=0.0).to(tl.float32)
    tl.store(out, tl.where(tl.max(most, 0) != 0, 1.0, before), mask=count >= 0)


@compiled
def nonzero_entries(
    table, first_program, sizes, flags, like, parameters: tl.int32, each: tl.int32, search: tl.int32,
    ALIGNED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Flag the programs that found an entry of a gradient that is not 0."""
    index, start, stop = _own(first_program, sizes, parameters, each, search)
    g_at = _at(table, 0, parameters, index, like, ALIGNED)
    found = tl.zeros([BLOCK], tl.int32)
    for first in range(start, stop, BLOCK):
        at = first + tl.arange(0, BLOCK)
        found = found | (wide(tl.load(g_at + at, mask=at < stop, other=0.0)) != 0).to(tl.int32)
    tl.store(flags + tl.program_id(0), tl.max(found, 0).to(tl.float32), mask=index < parameters)


@compiled
def without_flag(flags, first_program, found, out, parameters: tl.int32, programs: tl.int32, BLOCK: tl.constexpr):
    """Write 1 for the parameter of this program if none of its programs set a flag, else `found`."""
    index = tl.program_id(0)
    start = tl.load(first_program + index, mask=index < parameters, other=0)
    stop = tl.load(first_program + index + 1, mask=index + 1 < parameters, other=2**31 - 1)
    most = tl.zeros([BLOCK], tl.float32)
    for first in range(start, tl.minimum(stop, programs), BLOCK):
        at = first + tl.arange(0, BLOCK)
        most = tl.maximum(most, tl.load(flags + at, mask=at < tl.minimum(stop, programs), other=0.0).to(tl.float32))
    before = tl.load(found, mask=index < parameters, other=0.0).to(tl.float32)
    tl.store(out + index, tl.where(tl.max(most, 0) != 0, before, tl.maximum(before, 1.0)), mask=index < parameters)


@dataclass(frozen=True, slots=True)
class _Table:
    """Addresses of tensors on the device, and how programs share their entries.

    Attributes:
        table: int64 [rows, parameters].
        first_program: int32 [parameters], of each the first program.
        sizes: int64 [parameters], numbers of entries.
        programs: number of programs.
        each: entries of a program.
        aligned: True if all addresses are multiples of 16.
    """

    table: torch.Tensor
    first_program: torch.Tensor
    sizes: torch.Tensor
    programs: int
    each: int
    aligned: bool

    @property
    def numbers(self) -> tuple[int, int, int]:
        """Arguments of kernels: parameters, entries of a program, steps of the search for a program's parameter."""
        return len(self.sizes), self.each, len(self.sizes).bit_length()

    @property
    def constants(self) -> dict[str, Any]:
        return {"ALIGNED": self.aligned, "BLOCK": BLOCK}


def _each(sizes: Sequence[int]) -> int:
    """Return how many entries a program updates, a multiple of BLOCK."""
    return BLOCK * max(1, sum(sizes) // (BLOCK * PROGRAMS))


def _programs(sizes: Sequence[int]) -> list[int]:
    """Return how many programs each parameter has."""
    return [-(-n // _each(sizes)) for n in sizes]


def _addresses(rows: Sequence[Tensors]) -> _Table:
    """Return the table of rows of tensors, of which those of a column have one size or are a step count."""
    sizes = [t.numel() for t in rows[0]]
    starts = [0, *accumulate(_programs(sizes))]
    addresses = [[t.data_ptr() for t in row] for row in rows]
    made = (torch.tensor(addresses), torch.tensor(starts[:-1], dtype=torch.int32), torch.tensor(sizes))
    on_device = (t.to(rows[0][0].device) for t in made)
    aligned = all(address % 16 == 0 for row in addresses for address in row)
    return _Table(*on_device, starts[-1], _each(sizes), aligned)


def _columns(tensors: Tensors, width: int) -> list[list[torch.Tensor]]:
    n = len(tensors) // width
    return [list(tensors[c * n : (c + 1) * n]) for c in range(width)]


def _takes(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if not all(t.is_contiguous() for t in (*ins, *outs)):
        return "an operand is not contiguous"
    return "" if ins[2].dtype in FLOATS else f"no kernel for {ins[2].dtype}"


class _Step:
    """What the steps of Adam and SGD share: columns of tensors, their table, the launch that counts steps."""

    def __init__(self, outs: Tensors, ins: Tensors, moments: int) -> None:
        self.lr, self.found = ins[:2]
        self.grads, *old = _columns(ins[2:], 3 + moments)
        new = _columns(outs, 2 + moments)
        self.like, self.steps = self.grads[0], old[-1][0]
        self.entries = _addresses([self.grads, *old[:-1], *new[:-1]])
        self.counts = _addresses([old[-1], new[-1]])
        self.each = self.found.dim() > 0

    def count(self, numbers: torch.Tensor, adam: bool, log1: float = 0.0, log2: float = 0.0) -> Launch:
        n = len(self.grads)
        args = (self.lr, self.found, self.counts.table, numbers, self.steps, n, 0, log1, log2)
        constants = {"EACH": self.each, "ADAM": adam, "PARAMETERS": PARAMETERS}
        return Launch(count_steps, (-(-n // PARAMETERS),), args, constants)

    def update(self, function: Any, numbers: torch.Tensor, values: Sequence[float], **constants: bool) -> Launch:
        t = self.entries
        args = (self.lr, self.found, t.table, t.first_program, t.sizes, numbers, self.like, *t.numbers, *values)
        return Launch(function, (t.programs,), args, {"EACH": self.each, **t.constants, **constants})


def _adam(decoupled: bool) -> Bind:
    def bind(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Launch]:
        step, (numbers,) = _Step(outs, ins, 3 if attrs["amsgrad"] else 2), work
        beta1, beta2 = attrs["beta1"], attrs["beta2"]
        logs = (log(b) if b > 0 else -inf for b in (beta1, beta2))
        values = (beta1, beta2, 1 - beta1, 1 - beta2, attrs["eps"], attrs["weight_decay"])
        return [
            step.count(numbers, True, *logs),
            step.update(adam_entries, numbers, values, AMSGRAD=attrs["amsgrad"], MAXIMIZE=attrs["maximize"],
                        DECOUPLED=decoupled),
        ]  # fmt: skip

    return bind


def _numbers(width: Callable[[Attrs], int]) -> Work:
    """Return the function that states the scratch of a step with so many operands per parameter."""
    return lambda outs, ins, attrs: [Spec((2, (len(ins) - 2) // width(attrs)), float64)]


_adam_numbers = _numbers(lambda attrs: 6 if attrs["amsgrad"] else 5)
kernel("adam_step", _adam_numbers, takes=_takes)(_adam(False))
kernel("adamw_step", _adam_numbers, takes=_takes)(_adam(True))


@kernel("sgd_step", _numbers(lambda attrs: 4 if attrs["momentum"] else 3), takes=_takes)
def sgd_step(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Launch]:
    """Update parameters by SGD; the first step of a parameter sets its momentum buffer to the gradient."""
    momentum = bool(attrs["momentum"])
    step, (numbers,) = _Step(outs, ins, int(momentum)), work
    values = (attrs["momentum"], 1 - attrs["dampening"], attrs["weight_decay"])
    flags = {"MOMENTUM": momentum, "MAXIMIZE": attrs["maximize"], "NESTEROV": attrs["nesterov"]}
    return [step.count(numbers, False), step.update(sgd_entries, numbers, values, **flags)]


def _flags(outs: Sequence[Spec], ins: Sequence[Spec], attrs: Attrs) -> list[Spec]:
    """Return scratch for a flag of each program; the gradients are the last operands."""
    first = 2 if len(outs) > 1 else 1
    return [Spec((max(sum(_programs([i.size for i in ins[first:]])), 1),), float32)]


def _takes_check(outs: Tensors, ins: Tensors, attrs: Attrs) -> str:
    if not all(t.is_contiguous() for t in (*ins, *outs)):
        return "an operand is not contiguous"
    return "" if ins[-1].dtype in FLOATS else f"no kernel for {ins[-1].dtype}"


@kernel("unscale_check", _flags, takes=_takes_check)
def unscale_check(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Launch]:
    (inverse, found, *grads), (out, *scaled), (flags,) = ins, outs, work
    t = _addresses([grads, scaled])
    args = (inverse, t.table, t.first_program, t.sizes, flags, grads[0], *t.numbers)
    return [
        Launch(unscale_entries, (t.programs,), args, t.constants),
        Launch(any_flag, (1,), (flags, found, out, t.programs), {"BLOCK": BLOCK}),
    ]


@kernel("zero_check", _flags, takes=_takes_check)
def zero_check(outs: Tensors, ins: Tensors, attrs: Attrs, work: Tensors) -> list[Launch]:
    (found, *grads), (out,), (flags,) = ins, outs, work
    t = _addresses([grads])
    args = (t.table, t.first_program, t.sizes, flags, grads[0], *t.numbers)
    return [
        Launch(nonzero_entries, (t.programs,), args, t.constants),
        Launch(without_flag, (len(grads),), (flags, t.first_program, found, out, len(grads), t.programs),
               {"BLOCK": BLOCK}),
    ]  # fmt: skip
