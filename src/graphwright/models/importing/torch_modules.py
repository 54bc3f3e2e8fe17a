"""`from_torch`: a torch module as a program that shares its weights."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from graphwright.array import Spec
from graphwright.array import dtype as named
from graphwright.errors import UsageError
from graphwright.models.importing.report import Imported
from graphwright.program.builder import record
from graphwright.program.patterns import adopt_all
from graphwright.program.program import Program
from graphwright.program.residual_sums import join_residuals

if TYPE_CHECKING:
    from graphwright.models.importing.capture import Shape


def from_torch(
    module: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, *,
    sizes: Mapping[str, Shape] | None = None, name: str | None = None, train: bool = False, recover: bool = True,
    share: bool = True,
) -> Program:  # fmt: skip
    """Capture a `torch.nn.Module` as a program over the same weights.

    The module's code runs once on symbols (`torch.export`), and each of its operators is traced by the function of the
    same meaning here. Nodes are named after modules, params as in `state_dict()`.

    Args:
        module: the module; it is left as it was.
        args, kwargs: example arguments: tensors of torch, alone or in tuples, lists and dicts, and constants.
        sizes: dict from input name to its shape with named sizes, such as `{"x": ("B", 3, "H", "W")}`; None is the size
            of the example. Sizes without a name are fixed. Examples should have different sizes above 1 for them.
        name: name of the program; by default that of the module's class.
        recover: replace regions of plain ops by the ops that they mean (attention, norms, rotary embedding, ...);
            each is proved on random values first.
        train: capture the module in training mode: dropout, statistics of batches.
        share: share the memory of the module's weights until they are first written, by an edit or a training step;
            False copies them.
    Returns: a program with the arguments' tensors as inputs and the outputs `out`, `out_1`, ... or the result's keys;
        its attribute `imported` reports what was captured and recovered.
    Raises: CaptureError if the module's code depends on values, or on sizes in ways that have no graph;
        UnsupportedOperator naming all operators that cannot be imported; UsageError for arguments that do not fit.
    """
    options = {"name": name, "train": train, "recover": recover, "share": share}
    return program_of(module, args, kwargs or {}, sizes=sizes or {}, **options)


@contextmanager
def _without_cache(module: Any) -> Iterator[None]:
    """Context manager: models of transformers return no cache of keys and values, which is not a tensor."""
    every = (getattr(m, "config", None) for m in module.modules())
    configs: dict[int, Any] = {id(c): c for c in every if getattr(c, "use_cache", False)}
    nested = (getattr(c, name, None) for c in configs.values() for name in ("text_config", "decoder", "encoder"))
    configs |= {id(c): c for c in nested if getattr(c, "use_cache", False)}
    for config in configs.values():
        config.use_cache = False
    try:
        yield
    finally:
        for config in configs.values():
            config.use_cache = True


def program_of(
    module: Any, args: Sequence[Any], kwargs: Mapping[str, Any], *, sizes: Mapping[str, Shape], name: str | None = None,
    train: bool = False, recover: bool = True, share: bool = True, values: Mapping[str, Any] | None = None,
    rename: Mapping[str, str] | None = None,
) -> Program:  # fmt: skip
    """Capture a module, which may be on the meta device: its weights are then abstract.

    Args:
        values: tensors by name that replace those of the module, such as buffers that no checkpoint has.
        rename: names of inputs here, by the module's names.
        module, args, kwargs, sizes, name, train, recover, share: as in `from_torch`.
    """
    import torch

    from graphwright.models.importing.capture import capture
    from graphwright.models.importing.lower import Lowered
    from graphwright.models.importing.recover import recover as recover_meaning
    from graphwright.models.importing.scans import without_loops

    if not isinstance(module, torch.nn.Module):
        raise UsageError("this is not a torch module", where="module", expected="torch.nn.Module",
                         got=type(module).__name__)  # fmt: skip
    with _without_cache(module), without_loops(module):
        captured = capture(module, args, kwargs, sizes, train)
    lowered = Lowered(captured, share, dict(values or {}))
    known = rename or {}
    specs = [Spec(tuple(t.shape), named(str(t.dtype).removeprefix("torch."))) for t in captured.examples.values()]
    names = tuple(known.get(n, n) for n in captured.examples)
    shapes = {known.get(n, n): shape for n, shape in captured.sizes.items()}
    program, recorder, _ = record(lowered, specs, None, names, shapes or None, stops=True)
    join_residuals(program, {program.node(recorder.program.path(n)) for n in recorder.recomputed.backward})
    found = recover_meaning(program) if recover else None
    adopt_all(program)
    program.imported = Imported.of(type(module).__name__, lowered.counts, found, captured.fixed)
    program.module_state = lowered.state(module.state_dict(keep_vars=True), frozenset(program.weights))
    program.name = name or type(module).__name__
    return program
