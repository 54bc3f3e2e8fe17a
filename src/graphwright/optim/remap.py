"""A saved training carried along the edits that its program had since: weights and moments alike.

The program as it was saved comes out of its history, gets the saved values, and has the edits of the journal made on it
again; what an edit of an axis does to a weight it does to the moments of the weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from graphwright.array import NDArray, from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.optim.errors import StateError
from graphwright.optim.optimizer import Optimizer, carrier
from graphwright.program import Journal, Program, replay


class Saved(Protocol):
    """What is told of a saved training."""

    @property
    def structure(self) -> str:
        """Hash of the program's structure."""
        ...

    @property
    def journal(self) -> str | None:
        """Hash of the program's journal."""
        ...


def remapped(
    saved: Saved, arrays: Mapping[str, NDArray], program: Program, journal: Journal, optimizer: Optimizer | None
) -> dict[str, NDArray]:
    """Tensors of a saved training as they are after the edits made since, under their names of now.

    Args:
        arrays: by name, `model.` and `optimizer.` in front.
        journal: that of the program.
    Raises: StateError if the edits do not lead from what was saved to the program as it is; NotUndoable,
        ReplayConflict.
    """
    heads = {journal.chain.base: -1, **{entry.hash: entry.seq for entry in journal}}
    if saved.journal not in heads or journal.hash != program.journal.hash:
        raise StateError(
            "the journal does not lead from the saved program to this one",
            where=program.name,
            expected=saved.journal,
            fix="remap=program.journal of the program that was trained, opened or edited on",
        )
    at = heads[saved.journal]
    past = (program.at(at) if len(journal) else program).fork()
    if past.structure_hash() != saved.structure:
        raise StateError("the program had another structure when the state was saved", where=f"entry {at}")
    for key, variable in past.variables().items():
        if f"model.{key}" not in arrays:
            raise StateError("a weight was not saved", where=key)
        variable.assign(Tensor(arrays[f"model.{key}"]))
    then = {key: (variable.spec, variable.lineage) for key, variable in past.variables().items()}
    replay(journal[at + 1 :], onto=past)
    if past.structure_hash() != program.structure_hash():
        raise StateError("the edits lead to another program", where=program.name)
    now = past.variables()
    found = {name: array for name, array in arrays.items() if not name.startswith(("model.", "optimizer."))}
    found |= {f"model.{key}": variable.data for key, variable in now.items()}
    if optimizer is None:
        return found
    keys = {id(variable): key for key, variable in program.variables().items()}
    for group in optimizer.param_groups:
        found[f"optimizer.{group.rate.name}"] = arrays.get(f"optimizer.{group.rate.name}", group.rate.data)
        for p in group.parameters():
            key = keys.get(id(p))
            twin = None if key is None else now.get(key)
            old = then.get(key) if key is not None else None
            carry = carrier(*old, twin) if old is not None and isinstance(twin, Parameter) else None
            state = optimizer.state_of(p)
            for variable in state.variables():
                name = f"optimizer.{variable.name}"
                if carry is None or name not in arrays:
                    found[name] = variable.data
                elif variable is state.steps:
                    found[name] = arrays[name]
                else:
                    host = carry(arrays[name].to_numpy().copy())
                    found[name] = from_numpy(host)
    return found


__all__ = ["remapped"]
