"""Options of `program.compile`, `gw.compile` and `gw.compile_step`: how a plan is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import TypedDict, Unpack

from graphwright.array import CPU, Device
from graphwright.errors import UsageError

VM, ATEN, CAPTURE = "vm", "aten", "capture"
_EXECUTORS = ("auto", VM, ATEN, CAPTURE)
CHOICES = {"rewrites": ("none", "exact", "fast"), "layout": ("reuse", "naive"), "executor": _EXECUTORS}


def refuse_string(option: str, names: object) -> None:
    """Raise UsageError if `names` is one string instead of a list of names."""
    if isinstance(names, str):
        raise UsageError(f"{option} is one string instead of a list of names", where="compile",
                         expected="a list or tuple of names", got=repr(names),
                         fix=f"{option}=[{names!r}]")  # fmt: skip


class _CommonKeywords(TypedDict, total=False):
    executor: str
    remat: int | None
    freeze: bool


class CompileKeywords(_CommonKeywords, total=False):
    """Options of `gw.compile`; see `CompileOptions`."""

    device: Device | str


class PlanKeywords(_CommonKeywords, total=False):
    """Options of `program.compile` besides `device` and `watch`; see `CompileOptions`."""

    rewrites: str
    layout: str
    poison: bool


@dataclass(frozen=True)
class CompileOptions:
    """Options of planning: rewrites, memory layout, executor, device and memory budget.

    Attributes:
        freeze: assume that weights change rarely: conversions and small values computed from weights alone are computed
            once per weight version, not in every run.
        rewrites: "exact" (only rewrites that keep all bits), "fast" (also rewrites that round differently, each listed
            with its error bound in `plan.rewrites`) or "none" (every node runs).
        layout: "reuse" (dead memory is reused) or "naive" (every buffer has its own memory, for comparison).
        watch: names of nodes whose values `Executable.watched(name)` returns after a run.
        executor: "aten" (the bits of `program.run`), "vm" (every op with a VM form runs on the VM), "auto" (the VM
            where it is faster; on a device with graphs, captured graphs) or "capture" (captured graphs of the device).
        device: device of the plan. Weights that it only reads are copied there once; weights that it writes move there.
        remat: maximum bytes of the arena; values are recomputed until it fits.
        poison: fill dead memory with NaN in every run, so that reading a value that was freed too early gives NaN.
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
    def of(
        cls, *, device: Device | str = CPU, watch: Sequence[str] = (), **given: Unpack[PlanKeywords]
    ) -> CompileOptions:
        """Return options; `device` may be given by name. Raises: UsageError if `watch` is one string."""
        refuse_string("watch", watch)
        return cls(device=Device.parse(device), watch=tuple(watch), **given)

    def check(self, where: str) -> None:
        """Raise UsageError at `where` for an unknown option value, or for the VM on a device other than the CPU."""
        for name, known in CHOICES.items():
            given = getattr(self, name)
            if given not in known:
                near = get_close_matches(str(given), known, 1, 0)[0]
                raise UsageError(f"unknown {name} {given!r}", where=where, expected=", ".join(known), got=repr(given),
                                 fix=f"program.compile(..., {name}={near!r})")  # fmt: skip
        if self.executor == VM and self.device != CPU:
            raise UsageError("the VM executor cannot run on this device", where=where, expected=CPU, got=self.device,
                             fix='executor="auto", or leave out device')  # fmt: skip

    @property
    def captures(self) -> bool:
        """True if executables capture and replay graphs of the device, such as CUDA graphs."""
        return self.device != CPU and self.executor in ("auto", CAPTURE)


DEFAULT = CompileOptions()
