"""The structure of a life as JSON: graph, facts of weights, journal stacks, and the undo data within the horizon.

It is written once per edit, under its digest. Arrays of undo data, and the moments of parameters that only undo can
reach, are tensors `undo.<digest>` of the commits.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from graphwright.array import NDArray
from graphwright.autograd import Parameter, Variable
from graphwright.errors import GraphwrightError
from graphwright.files import JsonError, blake2b_128, parse_json
from graphwright.lifecycle.contents import Digests
from graphwright.lifecycle.errors import CommitDamaged
from graphwright.lifecycle.moments import HeldMoments, read_moments
from graphwright.lifecycle.replay import Added
from graphwright.lifecycle.store import JOURNAL, STRUCTURE, Commit, Fold, Home, Store
from graphwright.optim.optimizer import Optimizer
from graphwright.program.editing.undo_storage import Packer
from graphwright.program.errors import ProgramFileError
from graphwright.program.files import forms
from graphwright.program.files.load import MAX_NESTING, mapped_array, rebuild
from graphwright.program.files.save import stacks_body, structure_body, tied_keys, weight_row
from graphwright.program.patterns import PatternVariable, pattern_form, read_pattern
from graphwright.safetensors import TensorFile

if TYPE_CHECKING:
    from graphwright.patterns import Pattern
    from graphwright.program import Program

_FIELDS = ("name", "version", "valid", "graph", "next_seq", "labels", "outputs", "weights", "stacks", "history",
           "constraints", "held", "base", "horizon", "generator")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Structure:
    """A structure as text.

    Attributes:
        key: what it depends on; while this is equal, the structure is.
        digest, text: the content of its file.
        arrays: digest -> array of undo data.
        added: digests of the values with which edits that can be undone added weights.
    """

    key: object
    digest: str
    text: str
    arrays: Mapping[str, NDArray]
    added: frozenset[str]


def structure_key(p: Program, generator: str | None) -> object:
    """Return what a structure depends on; `generator` as for `structure_of`."""
    flags = tuple(v.requires_grad for v in p.weights.values())
    return (
        p.version,
        generator,
        flags,
        tuple(p.history.marks.items()),
        json.dumps(p.constraints.to_json()),
        p.undo_horizon,
    )


def structure_of(
    p: Program, optimizer: object, held: HeldMoments, digests: Digests, generator: str | None
) -> Structure:
    """Return the structure of a program.

    Args:
        held: the moments that no optimizer holds.
        generator: key of the weight that is the key of the generator of its training, if it has one.
    """
    packer, tied = Packer(p, digests), tied_keys(p)
    history = packer.pack()
    moments = {}
    for i, variable in enumerate(packer.objects):
        owner, found = _moments(variable, optimizer, held)
        if found and "live" not in packer.variables[i]:
            moments[str(i)] = [owner, {label: packer.array(array)[0] for label, array in found.items()}]
    body = {
        **structure_body(p),
        "weights": {key: _row(key, v, tied) for key, v in p.weights.items()},
        "stacks": stacks_body(p),
        "history": history,
        "constraints": p.constraints.to_json(),
        "held": moments,
        "base": p.journal.chain.base,
        "horizon": p.undo_horizon,
        "generator": generator,
    }
    text = json.dumps(body, separators=(",", ":"), allow_nan=False)
    digests.keep(packer.arrays.values())
    entries = [e for e in (*p.history.undoable, *p.history.redoable) if e.undo is not None]
    values = frozenset(weight.digest for weight in Added.by(entries))
    return Structure(structure_key(p, generator), blake2b_128(text.encode()), text, packer.arrays, values)


def _row(key: str, variable: Variable, tied: Mapping[str, str]) -> dict[str, Any]:
    """Return the facts of a weight, or all arrays of an attention pattern: an edit writes the structure anyway."""
    if isinstance(variable, PatternVariable):
        return {"pattern": pattern_form(variable.pattern)}
    return {"tied": tied[key]} if key in tied else weight_row(variable)


def _moments(variable: Variable, optimizer: object, held: HeldMoments) -> tuple[str, dict[str, NDArray]]:
    """Return name of the optimizer and state of a parameter, by label; no state if the parameter has none."""
    if isinstance(optimizer, Optimizer) and isinstance(variable, Parameter) and variable in optimizer.state:
        state = optimizer.state[variable]
        if state.lineage is variable.lineage and state.spec == variable.spec:
            return optimizer.name, {label: v.data for label, v in state.variables().items()}
    found = held.of(variable)
    return ("", {}) if found is None else (found.owner, found.arrays)


@dataclass(slots=True)
class Restored:
    """A program made from a commit.

    Attributes:
        program: the program.
        held: the moments of its parameters, and of parameters that only undo can reach.
        names: names of the moments of its parameters in the commit.
        digests: array of undo data -> its digest.
        generator: key of the weight that was the key of the generator of its training; None without one.
    """

    program: Program
    held: HeldMoments = field(default_factory=HeldMoments)
    names: set[str] = field(default_factory=set)
    digests: dict[NDArray, str] = field(default_factory=dict)
    generator: str | None = None


def read_structure(store: Store, commit: Commit) -> dict[str, Any]:
    """Return the structure of a commit as JSON values. Raises: CommitDamaged."""
    where = store.folder / STRUCTURE / f"{commit.record.structure}.json"
    try:
        body = parse_json(store.structure(commit).encode(), nesting=MAX_NESTING, where=where)
        forms.text(forms.table(body, _FIELDS, "structure")["base"], "base")
    except (ProgramFileError, JsonError) as error:
        raise CommitDamaged("the structure of a commit is damaged", where=where, got=error.what) from error
    return body


def restore(store: Store, commit: Commit, state: Fold) -> Restored:
    """Return the program of a commit; its arrays map the commit files, and are checked when they are read.

    Raises: CommitDamaged, LogCorrupt, InvalidProgram.
    """
    body = read_structure(store, commit)
    where = store.folder / STRUCTURE / f"{commit.record.structure}.json"
    try:
        with MappedFiles() as files:
            base, horizon, generator = body.pop("base"), body.pop("horizon"), body.pop("generator")
            held = forms.table(body.pop("held"), None, "held")
            journal = store.lines(JOURNAL, base, commit)
            sources: list[_Tensors] = []

            def source(p: Program) -> _Tensors:
                sources.append(_Tensors(p, state, files))
                return sources[0]

            program, variables = rebuild(body, source, journal)
            program.undo_horizon = None if horizon is None else forms.integer(horizon, field="horizon")
            found = Restored(program, generator=forms.optional_text(generator, "generator"))
            for i, row in held.items():
                owner, moments = forms.array(row, 2, "held")
                variable = variables[forms.integer(int(i), 0, len(variables) - 1, "held")]
                arrays = {label: sources[0].undo_array(digest, None) for label, digest in moments.items()}
                found.held.add(forms.text(owner, "held"), variable, arrays)
            found.names = read_moments(found.held, program, state, sources[0].files)
            found.digests = {array: digest for (digest, _), array in sources[0].undo.items()}
    except ProgramFileError as error:
        raise CommitDamaged(
            "the structure of a commit is damaged", where=error.where or where, got=error.what
        ) from error
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, AssertionError) as error:
        if isinstance(error, GraphwrightError):
            raise
        raise CommitDamaged("the structure of a commit is damaged", where=where, got=repr(error)[:200]) from error
    return found


class _Tensors:
    """The stored arrays of a state, as a source for `rebuild`."""

    def __init__(self, p: Program, state: Fold, files: MappedFiles) -> None:
        self._p, self.files = p, files
        self._weights = {n.removeprefix("model."): home for n, home in state.items() if n.startswith("model.")}
        self._undo = {n.removeprefix("undo."): home for n, home in state.items() if n.startswith("undo.")}
        self.undo: dict[tuple[str, str | None], NDArray] = {}

    def keys(self) -> Collection[str]:
        """Return the keys of the weights."""
        return self._weights.keys()

    def weight(self, key: str, row: dict[str, Any]) -> NDArray:
        """Return the value of a weight."""
        return self.files.array(self._p, self._weights[key])

    def pattern(self, key: str, form: Mapping[str, Any]) -> Pattern:
        """Return a stored pattern."""
        return read_pattern(form)

    def undo_array(self, digest: str, reference: str | None) -> NDArray:
        """Return an array that undo data refers to."""
        if (digest, reference) not in self.undo:
            self.undo[digest, reference] = self.files.array(self._p, self._undo[digest], reference)
        return self.undo[digest, reference]


class MappedFiles:
    """Maps commit files, once each, in a `with` block; a file that is removed later stays readable through its map."""

    def __init__(self) -> None:
        self._files: dict[object, TensorFile] = {}

    def array(self, p: Program, home: Home, reference: str | None = None) -> NDArray:
        """Return a tensor as an array of a program, checked against its digest when it is read."""
        view, file = self.view(home)
        return mapped_array(p, home.info, lambda: view, file.check_mapped, home.digest, reference or home.reference,
                            home.where)  # fmt: skip

    def __enter__(self) -> MappedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        """Close all files; their maps, and so the arrays, stay."""
        for file in self._files.values():
            file.close()

    def view(self, home: Home) -> tuple[memoryview, TensorFile]:
        """Return the bytes of a tensor, and its file."""
        path = home.commit.path
        if path not in self._files:
            self._files[path] = TensorFile(path)
        return self._files[path].bytes(home.info.key), self._files[path]
