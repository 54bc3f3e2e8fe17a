"""Autocast and loss scaling.

Each op has a casting class. Under autocast, ops of class `low` run in 16 bits and ops of class `f32` in float32; the
other classes promote or keep the dtypes of their operands. Casts are ordinary ops.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import DType, bfloat16, from_numpy, names_device
from graphwright.autograd import Parameter, Tensor, Variable, autocast_to, no_grad, scoped
from graphwright.errors import UsageError
from graphwright.ops import call, get
from graphwright.ops.casting import is_cast, low_dtype, target_dtype
from graphwright.program import Entry, Program, Value
from graphwright.program.kinds import KINDS

if TYPE_CHECKING:
    from graphwright.optim import Optimizer


@contextmanager
def autocast(device_type: object = None, dtype: object = None, enabled: bool = True) -> Iterator[None]:
    """Run matrix products and attention in `dtype`, losses and sums in float32; norms keep their input's dtype.

    A context manager for eager code and traces. A nested `autocast(enabled=False)` switches it off.

    Args:
        device_type: name of a device, which has no effect: casts are the same on all; or the dtype.
        dtype: bfloat16 by default, or float16.
    Raises: DTypeError if the dtype is not a 16-bit float.
    """
    given = dtype if dtype is not None or names_device(device_type) else device_type
    kind = low_dtype(bfloat16 if given is None else given)
    with autocast_to(kind if enabled else None):
        yield


def apply(program: Program, dtype: object = bfloat16, *, why: str = "") -> Entry | None:
    """Insert into a program, in one edit, the casts that `autocast` would make during a run; undo reverts them.

    A value is cast to a dtype once for all its readers.

    Args:
        program: a forward pass; gradients derived from it later include the casts.
        dtype: bfloat16 or float16.
        why: reason in the journal.
    Returns: the journal entry; None if no value needs a cast, or inside an open edit, to which the casts are added.
    Raises: DTypeError for another dtype; SpecMismatch, with nothing changed, if an op does not support 16-bit operands.
    """
    kind, entries = low_dtype(dtype), len(program.journal)
    with program.edit(why or f"mixed precision in {kind.name}", tool="amp") as e:
        made: dict[tuple[Value, DType], Value] = {}
        for node in list(program.order()):
            op = program.op(node)
            if op in KINDS:
                continue
            row, edges = get(op), program.in_edges(node)
            values = [program.edge_value(edge) for edge in edges]
            specs = [e.spec(v) for v in values]
            target = target_dtype(row, [(s.dtype, "array" if s.shape else "scalar0d") for s in specs], kind)
            for i, (edge, value, spec) in enumerate(zip(edges, values, specs, strict=True)):
                if target is None or not is_cast(row, i, spec.dtype, target):
                    continue
                if (value, target) not in made:
                    name = program.free_name(f"{program.path(value)}.{target.name}")
                    made[value, target] = Value(e.add("cast", value, name=name, dtype=target))
                e.rewire(edge, made[value, target])
    return program.journal[-1] if len(program.journal) > entries else None


class GradScaler:
    """Loss scaling: multiplies the loss, divides the gradients, and skips steps with an infinity or NaN.

    For float16, in which small gradients round to zero (Micikevicius et al. 2018, section 3.2). It is tensor code
    without device synchronisation, so it runs eagerly and, with its state, inside a plan.

        scaler.scale(loss).backward()
        scaler.unscale_(opt)          # only to clip or inspect gradients
        scaler.step(opt)
        scaler.update()

    Args:
        init_scale: initial scale.
        growth_factor, growth_interval: the scale grows by this factor after this many finite steps in a row.
        backoff_factor: the scale shrinks by this factor after a skipped step.
        enabled: False for bfloat16 and float32, which need no scale; all methods then pass their input through.
    """

    def __init__(
        self, init_scale: float = 65536.0, growth_factor: float = 2.0, backoff_factor: float = 0.5,
        growth_interval: int = 2000, *, enabled: bool = True,
    ) -> None:  # fmt: skip
        if isinstance(init_scale, str):
            raise UsageError("init_scale is not a number", where="GradScaler", expected="a number > 0", got=init_scale,
                             fix="leave the device out; the scaler follows that of the loss")  # fmt: skip
        if not (init_scale > 0 and growth_factor > 1 and 0 < backoff_factor < 1 and growth_interval >= 1):
            expected = "init_scale > 0, growth_factor > 1, backoff_factor in (0, 1), growth_interval >= 1"
            got = f"{init_scale}, {growth_factor}, {backoff_factor}, {growth_interval} (in the same order)"
            raise UsageError("an argument is out of range", where="GradScaler", expected=expected, got=got)
        self.enabled = enabled
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self._scale = Variable(from_numpy(np.asarray(init_scale, np.float32)), name="scaler.scale")
        self._good = Variable(from_numpy(np.asarray(0.0, np.float32)), name="scaler.good_steps")
        self._none = Tensor(from_numpy(np.asarray(0.0, np.float32)))
        self._found: dict[int, Tensor] = {}

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply the loss by the scale."""
        return loss * self._scale.to(loss.dtype) if self.enabled else loss

    def inverse(self) -> Tensor | float:
        """Return 1 / scale, by which gradients are unscaled; 1 if not enabled."""
        return 1.0 / self._scale if self.enabled else 1.0

    def get_scale(self) -> float:
        """Return the scale of the next step; 1 if not enabled. Synchronises with the device."""
        return self._scale.item() if self.enabled else 1.0

    def unscale_(self, optimizer: Optimizer, total: Callable[[Tensor], Tensor] | None = None) -> None:
        """Divide the optimizer's gradients by the scale, once per step, and record whether all are finite.

        `total` maps the record, a 0-d float32, to that of all gradients, if other processes have some; there may then
        be no gradient here.
        Raises: UsageError if this was already called since `update`, or no parameter has a gradient.
        """
        if not self.enabled:
            return
        if id(optimizer) in self._found:
            raise UsageError("unscale_ was already called in this step", fix="call update() at the end of each step")
        with no_grad(), scoped("scaler"):
            kinds: dict[DType, list[Parameter]] = {}
            for p in optimizer.parameters():
                if p.grad is not None:
                    kinds.setdefault(p.grad.dtype, []).append(p)
            if not kinds and total is None:
                raise UsageError("no parameter has a gradient", fix="call backward() first")
            found = self._none
            inverse = self.inverse()
            for members in kinds.values():
                found, *grads = call("unscale_check", inverse, found, *(p.grad for p in members))
                for p, g in zip(members, grads, strict=True):
                    p.grad = g
            self._found[id(optimizer)] = found if total is None else total(found)

    def step(self, optimizer: Optimizer, *, waiting: Tensor | None = None) -> None:
        """Run the optimizer's step, after `unscale_` if that was not called; skip the step if a gradient is not finite.

        Args:
            waiting: 0-d float32; if it is not 0, gradients are still being accumulated, and the step is skipped.
        """
        if not self.enabled:
            optimizer.step(found_inf=waiting)
            return
        if id(optimizer) not in self._found:
            self.unscale_(optimizer)
        found = self._found[id(optimizer)]
        optimizer.step(found_inf=found if waiting is None else call("maximum", found, waiting))

    def update(self, *, waiting: Tensor | None = None) -> None:
        """Lower the scale if a gradient was not finite; raise it after `growth_interval` finite steps in a row.

        `waiting` is 0-d float32; if it is above 0, gradients are still being accumulated, and nothing changes.
        """
        if not self.enabled:
            return
        if not self._found:
            raise UsageError("no step() was run since the last update()", fix="call step(optimizer) first")
        with no_grad(), scoped("scaler"):
            found = reduce(lambda a, b: call("maximum", a, b), self._found.values())
            bad, good = found > 0.0, self._good + 1.0
            grown = good >= float(self.growth_interval)
            scale = call("where", grown, self._scale * self.growth_factor, self._scale)
            scale = call("where", bad, self._scale * self.backoff_factor, scale)
            good = call("where", bad, 0.0, call("where", grown, 0.0, good))
            if waiting is not None:
                scale = call("where", waiting > 0.0, self._scale, scale)
                good = call("where", waiting > 0.0, self._good, good)
            self._scale.assign(scale)
            self._good.assign(good)
        self._found.clear()

    def variables(self) -> dict[str, Variable]:
        """Return a dict from name to variable of the state that a checkpoint must contain to resume a run."""
        return {v.name: v for v in (self._scale, self._good)}
