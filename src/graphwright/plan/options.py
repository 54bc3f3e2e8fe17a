"""Options of `program.compile`, `gw.compile` and `gw.compile_step`: how a plan is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypedDict, Unpack

from graphwright.array import CPU, Device
from graphwright.array.formulas import block_attention
from graphwright.array.formulas.experts import ALGORITHMS
from graphwright.errors import UsageError, check_type
from graphwright.settings import Range
from graphwright.signatures import keywords

VM, ATEN, CAPTURE = "vm", "aten", "capture"
_EXECUTORS = ("auto", VM, ATEN, CAPTURE)
_EXPERTS = ("auto", *ALGORITHMS)
CHOICES = {
    "attention": ("auto", *block_attention.ALGORITHMS),
    "experts": _EXPERTS,
    "rewrites": ("none", "exact", "fast"),
    "layout": ("reuse", "naive"),
    "executor": _EXECUTORS,
}


def refuse_string(option: str, names: object) -> None:
    """Raise UsageError if `names` is one string instead of a list of names."""
    if isinstance(names, str):
        raise UsageError(f"{option} is one string instead of a list of names", where="compile",
                         expected="a list or tuple of names", got=repr(names),
                         fix=f"{option}=[{names!r}]")  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class CompileOptions:
    """Options of planning: rewrites, memory layout, executor, device and memory budget.

    Attributes:
        freeze: assume that weights change rarely: conversions and small values computed from weights alone are computed
            once per weight version, not in every run.
        rewrites: "exact" (only rewrites that keep all bits), "fast" (also rewrites that round differently, each listed
            with its error bound in `plan.rewrites`) or "none" (every node runs).
        layout: "reuse" (dead memory is reused) or "naive" (every buffer has its own memory, for comparison).
        watch: names of nodes whose values `Executable.watched(name)` returns after a run.
        executor: "auto" (the VM where it is faster; on a device with graphs, captured graphs), "aten", "vm" (every op
            with a VM form runs on the VM) or "capture" (captured graphs of the device). On the VM, exp, tanh etc. have
            errors up to 2.5 ulp, and sums another order.
        experts: how mixtures of experts run: "sorted" (the tokens of each expert are gathered), "dense" (all tokens
            through all experts), "gather" (few pairs, as in decoding), "reference" (other ops), or "auto" (by a table).
        attention: how attention over patterns runs: "block" (edge by edge), "dense" (all pairs, with a mask),
            "reference" (slow loops), or "auto" (by a table).
        deterministic: give the bits of `program.run`, which runs node by node: "auto" then means "aten" on the CPU.
        device: device of the plan. Weights that it only reads are copied there once; weights that it writes move there.
        remat: maximum bytes of the arena; values are recomputed until it fits.
        poison: fill dead memory with NaN in every run, so that reading a value that was freed too early gives NaN.
    """

    freeze: bool = False
    rewrites: str = "exact"
    layout: str = "reuse"
    watch: tuple[str, ...] = ()
    executor: str = "auto"
    experts: str = "auto"
    attention: str = "auto"
    deterministic: bool = False
    device: Device = CPU
    remat: int | None = None
    poison: bool = False

    def check(self, where: str) -> None:
        """Raise UsageError at `where` for an unknown option value, or for the VM on a device other than the CPU."""
        for name, known in CHOICES.items():
            given = getattr(self, name)
            if not isinstance(given, str) or given not in known:
                near = get_close_matches(str(given), known, 1, 0)[0]
                raise UsageError(f"unknown {name} {given!r}", where=where, expected=", ".join(known), got=repr(given),
                                 fix=f"program.compile(..., {name}={near!r})")  # fmt: skip
        for name in ("freeze", "deterministic", "poison"):
            check_type(f"compile, {name}", getattr(self, name), bool, "True or False")
        if self.remat is not None:
            Range(0, whole=True).check("compile, remat", self.remat)
        if self.executor == VM and self.device != CPU:
            raise UsageError("the VM executor cannot run on this device", where=where, expected=CPU, got=self.device,
                             fix='executor="auto", or leave out device')  # fmt: skip
        if self.executor == VM and self.deterministic:
            raise UsageError("the VM does not give the bits of program.run", where=where, expected="auto or aten",
                             got=self.executor, fix="leave out executor or deterministic")  # fmt: skip

    @property
    def chosen(self) -> str:
        """The executor, given the device and `deterministic`."""
        return ATEN if self.deterministic and self.executor == "auto" and self.device == CPU else self.executor

    @property
    def captures(self) -> bool:
        """True if executables capture and replay graphs of the device, such as CUDA graphs."""
        return self.device != CPU and self.executor in ("auto", CAPTURE)


class CompileKeywords(TypedDict, total=False):
    """The fields of `CompileOptions`."""

    freeze: bool
    rewrites: str
    layout: str
    watch: Sequence[str]
    executor: str
    experts: str
    attention: str
    deterministic: bool
    device: Device | str
    remat: int | None
    poison: bool


@keywords(CompileOptions)
def compile_options(**options: Unpack[CompileKeywords]) -> CompileOptions:
    """Return options; `device` may be given by name. Raises: UsageError if `watch` is one string."""
    given: dict[str, Any] = {**options}
    refuse_string("watch", watch := given.get("watch", ()))
    check_type("compile, watch", watch, Iterable, "a list of names")
    given |= {"device": Device.parse(given.get("device", CPU)), "watch": tuple(watch)}
    return CompileOptions(**given)


DEFAULT = CompileOptions()
