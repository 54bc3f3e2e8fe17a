"""How a plan is made: the options of `program.compile`, `gw.compile` and `gw.compile_step`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from graphwright.array import CPU, Device
from graphwright.errors import UsageError

VM, ATEN, CAPTURE = "vm", "aten", "capture"
_EXECUTORS = ("auto", VM, ATEN, CAPTURE)
CHOICES = {"rewrites": ("none", "exact", "fast"), "layout": ("reuse", "naive"), "executor": _EXECUTORS}


def refuse_string(option: str, names: object) -> None:
    """Raises: UsageError for one string where a list of names is expected."""
    if isinstance(names, str):
        what = f"{option} must be a list or tuple of names, got one string"
        fix = f"{option}=[{names!r}]"
        raise UsageError(what, where="compile", expected="a list or tuple of names", got=repr(names), fix=fix)


@dataclass(frozen=True)
class CompileOptions:
    """How a plan is made.

    Attributes:
        freeze: weights change rarely, so their conversions are computed once per weight version, not in every run.
        rewrites: "exact" (the same bits with less work), "fast" (also rewrites that round differently, each listed with
            its error bound in `plan.rewrites`) or "none" (every node runs).
        layout: "reuse" (dead memory is reused) or "naive" (every buffer has its own memory, for comparison).
        watch: names of nodes whose values `Executable.watched(name)` returns after a run.
        executor: "aten" (the bits of a run), "vm" (every op with a VM form), "auto" (the VM where it is faster, graphs
            on a device that has them) or "capture" (graphs of the device).
        device: where the plan runs. Weights that it only reads are copied there once; those that it writes move there.
        remat: maximum bytes of the arena; values are recomputed until it fits.
        poison: fill dead memory with NaN in every run, so that a value freed too early shows.
    """

    freeze: bool = False
    rewrites: str = "exact"
    layout: str = "reuse"
    watch: tuple[str, ...] = ()
    executor: str = ATEN
    device: Device = CPU
    remat: int | None = None
    poison: bool = False

    @classmethod
    def of(cls, *, device: Device | str = CPU, watch: Sequence[str] = (), **given: Any) -> CompileOptions:
        """Options with a device by name, and any sequence of names to watch. Raises: UsageError for one string."""
        refuse_string("watch", watch)
        return cls(device=Device.parse(device), watch=tuple(watch), **given)

    def check(self, where: str) -> None:
        """Raises: UsageError for an unknown value, or the VM on another device than the CPU."""
        for name, known in CHOICES.items():
            given = getattr(self, name)
            if given not in known:
                near = get_close_matches(str(given), known, 1, 0)[0]
                raise UsageError(f"unknown {name} {given!r}", where=where, expected=", ".join(known), got=repr(given),
                                 fix=f"program.compile(..., {name}={near!r})")  # fmt: skip
        if self.executor == VM and self.device != CPU:
            raise UsageError("the VM runs on the CPU only", where=where, expected=CPU, got=self.device,
                             fix='executor="auto", or no device')  # fmt: skip

    @property
    def captures(self) -> bool:
        """True if executables record graphs of the device."""
        return self.device != CPU and self.executor in ("auto", CAPTURE)


DEFAULT = CompileOptions()
