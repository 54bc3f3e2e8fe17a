"""Plans of programs, cached per input signature.

Invariant: `plan_for` returns only plans of the current program version; its first call after an edit plans again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Device, DType, Spec, UnboundDim
from graphwright.autograd import as_tensor
from graphwright.errors import check_type
from graphwright.plan.options import DEFAULT, CompileOptions, compile_options, refuse_string
from graphwright.plan.plan import make_plan
from graphwright.plan.planning.plan_tables import tables_lock
from graphwright.program.derived.rewrite import PatchPoint, patched
from graphwright.program.exclusive import exclusive

if TYPE_CHECKING:
    from graphwright.plan.plan import Plan
    from graphwright.program.program import Program

CACHED = 32
"""Plans per program, and traces per compiled function; the least recently used one is dropped."""


def plan_for(
    p: Program, inputs: Mapping[str, Spec], outputs: Sequence[str] | None = None, options: CompileOptions = DEFAULT
) -> Plan:
    """Return the cached plan of a program for input specs; make the plan if it is missing or older than an edit."""
    plans: OrderedDict[Any, Plan] = p.derived.setdefault("plans", OrderedDict())
    try:
        hash(options)
    except TypeError:
        options.check(p.name)
        raise
    check_type("outputs", outputs, (Iterable, type(None)), "a list of names of outputs")
    names = None if outputs is None else tuple(outputs)
    key = (tuple(sorted(inputs.items(), key=lambda item: item[0])), names, options)
    with exclusive(p), tables_lock:  # one thread at a time updates a builder
        found = plans.get(key)
        if found is None or not found.fresh:
            before, found = found, make_plan(p, inputs, outputs, options, before=found)
            plans[key] = found if before is None else before.hand_over(found)
            if len(plans) > CACHED:
                plans.popitem(last=False)
        plans.move_to_end(key)
    return found


def compile_program(
    p: Program, inputs: Mapping[str, Any] | None = None, *, outputs: Sequence[str] | None = None,
    patch: Sequence[PatchPoint] = (), freeze: bool = DEFAULT.freeze, rewrites: str = DEFAULT.rewrites,
    layout: str = DEFAULT.layout, watch: Sequence[str] = DEFAULT.watch, executor: str = DEFAULT.executor,
    experts: str = DEFAULT.experts, attention: str = DEFAULT.attention, deterministic: bool = DEFAULT.deterministic,
    device: Device | str = DEFAULT.device, remat: int | None = DEFAULT.remat, poison: bool = DEFAULT.poison,
    **named: Any,
) -> Plan:  # fmt: skip
    """Plan a program for given inputs: `program.compile(x=(64, 8), freeze=True)`.

    Args:
        inputs: per input a shape, a Spec, or an example array.
        outputs: names of the outputs to compute; all by default.
        patch: nodes, values or edges whose value the caller feeds: a run takes an additional input `patch.<path>` for
            each, and nodes needed for the replaced value alone do not run.
        freeze, rewrites, layout, watch, executor, experts, attention, deterministic, device, remat, poison: see
            `CompileOptions`.
        named: further inputs.
    Raises: UnboundDim if an input has a dimension without a value; UsageError if `outputs` or `patch` is one string;
        the errors of `make_plan`.
    """
    refuse_string("outputs", outputs)
    refuse_string("patch", patch)
    check_type("inputs", inputs, (Mapping, type(None)), "a dict from inputs to shapes", "program.compile(x=(64, 8))")
    shapes, own = {**(inputs or {}), **named}, len(p.inputs())
    if patch:
        p = patched(p, patch)
    specs, dims = {}, {}
    for node in p.inputs():
        name = p.path(node)
        if name in shapes:
            spec = spec_of(shapes.pop(name), p.spec(node).dtype)
            assert spec is not None
            if spec.symbolic:
                fix = f"compile({name}=(64, 8)), or gw.compile(program), which plans at each call"
                raise UnboundDim("an input has a dimension without a value", where=f"{p.name}: {name}",
                                 expected="a number per dimension", got=spec, fix=fix)  # fmt: skip
            specs[name] = spec
            p.spec(node).match(specs[name].shape, dims)
    for node in p.inputs()[: len(p.inputs()) - own]:  # the inputs of patches come first
        specs.setdefault(p.path(node), p.spec(node).bind(dims))
    specs.update({name: Spec((), p.spec(p.inputs()[0]).dtype) for name in shapes})  # make_plan lists unknown names
    options = compile_options(freeze=freeze, rewrites=rewrites, layout=layout, watch=watch, executor=executor,
                              experts=experts, attention=attention, deterministic=deterministic, device=device,
                              remat=remat, poison=poison)  # fmt: skip
    return plan_for(p, specs, outputs, options)


def spec_of(value: Any, dtype: DType | None) -> Spec | None:
    """Return the spec of a Spec or an array, or of a shape with the dtype `dtype`; None for a shape if that is None."""
    if isinstance(value, Spec):
        return value
    if isinstance(value, tuple | list) and all(isinstance(n, int | np.integer | str) for n in value):
        return None if dtype is None else Spec(tuple(n if isinstance(n, str) else int(n) for n in value), dtype)
    return as_tensor(value).spec
