"""Saved trainings: written atomically and resumed bit for bit.

A saved training is a directory with two files. `state.safetensors` has every tensor once; a tied one under its first
name. `train.json` has the schema number, hashes of the model's structure and journal, options of the compiled step, a
checksum per tensor, the other names of tied tensors, the states of scheduler, loader and random generator, and a
checksum of itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from graphwright.array import BY_TAG, NDArray, Spec, from_numpy
from graphwright.array.world import CollectivesDiffer, RankLost, joined, world
from graphwright.autograd import Parameter, Tensor, Variable
from graphwright.errors import UsageError
from graphwright.files import JsonError, StrPath, atomic_directory, blake2b_128, read_json, read_whole
from graphwright.optim.exchange import whole
from graphwright.optim.optimizer import Optimizer, moment_remap
from graphwright.optim.training_step import CompiledStep
from graphwright.program.axes.divide import DividedWeight, assembled, division
from graphwright.program.editing.replay import replay
from graphwright.program.program import Program
from graphwright.safetensors import Checkpoint, CheckpointError, TensorData, write_checkpoint

if TYPE_CHECKING:
    from graphwright.program.editing.journal import Journal


SCHEMA = 2
_LIMIT = 64 << 20  # bytes of train.json: 10^5 tensors with names of 600 characters
_FIELDS = {"schema", "structure", "journal", "plan", "step", "tensors", "aliases", "states", "facts"}


class StateError(CheckpointError):
    """A saved training is damaged, has an unknown schema, does not match model or optimizer, or was not saved."""


class HasVariables(Protocol):
    """A model, optimizer or scaler, whose state is tensors."""

    def variables(self) -> Mapping[str, Variable]:
        """Return a dict from names to variables; a tied variable may have several names."""
        ...


class HasStructure(HasVariables, Protocol):
    """A module, program or model, whose structure has a hash."""

    def structure_hash(self) -> str:
        """Return a hash of the structure; models with equal hashes can load each other's saved states."""
        ...


class HasState(Protocol):
    """A scheduler, data loader or random generator, whose state fits in a small JSON object."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state as JSON values."""
        ...

    def load_state_dict(self, state: Any) -> Any:
        """Restore the state, or raise an error and change nothing."""
        ...


def save_state(
    directory: StrPath, model: HasStructure, optimizer: HasVariables | None = None, scheduler: HasState | None = None,
    scaler: HasVariables | None = None, loader: HasState | None = None, rng: HasState | None = None, step: int = 0, *,
    compiled: CompiledStep | None = None, facts: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write the state of a training atomically, replacing an older one in the directory.

    Of several ranks, rank 0 writes, and all call this: it returns when the state is written. What is written is whole,
    also of divided programs and states, and any number of ranks can load it.

    Args:
        directory: its parent must exist.
        compiled: the step made by `compile_step`; its options and the number of accumulated batches are saved.
        facts: additional JSON values, available as `SavedState.facts` after loading.
    Raises: UsageError if a state is not JSON, if a divided program was edited after the division, or if other ranks
        have sums of gradients; FileError if writing fails, with the old directory unchanged; StateError on other
        ranks than the one that failed; RankLost.
    """
    if compiled is not None and compiled.sums_apart:
        raise UsageError("the sums of gradients on other ranks would be missing", where="save_state",
                         got=f"a step with accumulate={compiled.settings.accumulate} between two updates",
                         fix="save after an update, or use shard_optimizer=True")  # fmt: skip
    with _together(directory), whole(optimizer, gather=True):
        here, divided = world(), DividedTensors(model, optimizer, compiled)
        if here.rank == 0 or (divided and here.copy == 0):
            tensors, aliases = training_variables(model, optimizer, scaler, compiled)
            arrays = divided.joined(tensors, keep=here.rank == 0)
            if here.rank == 0:
                states = _given(scheduler, loader, rng)
                _write(directory, model, arrays, aliases, divided.structure, states, step, compiled, facts)


@contextmanager
def _together(directory: StrPath) -> Iterator[None]:
    """Wait at the end of a block for the other ranks. Raises: StateError if the block failed on another rank."""
    group = joined("save_state").group
    try:
        yield
    except Exception as error:
        if group is not None:
            with suppress(RankLost, CollectivesDiffer):
                group.exchange(f"{type(error).__name__}: {error}".partition("\n")[0], "the end of save_state")
        raise
    errors = [] if group is None else group.exchange("", "the end of save_state")
    if failed := {r: text for r, text in enumerate(errors) if text}:
        raise StateError("the training was not saved", where=str(directory),
                            got="; ".join(f"rank {r}: {text}" for r, text in failed.items()))  # fmt: skip


def _write(
    directory: StrPath, model: HasStructure, arrays: Mapping[str, NDArray], aliases: Mapping[str, str], structure: str,
    states: Sequence[tuple[str, HasState]], step: int, compiled: CompiledStep | None, facts: Mapping[str, Any] | None,
) -> None:  # fmt: skip
    program = program_of(model)
    content: dict[str, Any] = {
        "schema": SCHEMA,
        "structure": structure,
        "journal": None if program is None else program.journal.hash,
        "plan": None if compiled is None else dict(compiled.options()),
        "step": step,
        "tensors": {name: blake2b_128(_bits(array)) for name, array in arrays.items()},
        "aliases": aliases,
        "states": {name: dict(part.state_dict()) for name, part in states},
        "facts": dict(facts or {}),
    }
    try:
        text = json.dumps({**content, "checksum": _checksum(content)}, indent=1, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UsageError("a state cannot be saved as JSON", where=str(directory), got=str(error)) from error
    items = [TensorData(n, a.dtype.safetensors, a.shape, lambda a=a: _bits(a)) for n, a in arrays.items()]
    with atomic_directory(directory, overwrite=True) as folder:
        write_checkpoint(folder, items, stem="state")
        (folder / "train.json").write_text(text + "\n", encoding="utf-8")


def load_state(
    directory: StrPath, model: HasStructure, optimizer: HasVariables | None = None, scheduler: HasState | None = None,
    scaler: HasVariables | None = None, loader: HasState | None = None, rng: HasState | None = None, *,
    compiled: CompiledStep | None = None, remap: Journal | None = None,
) -> int:  # fmt: skip
    """Resume a saved training; return its step. Everything is read and checked before anything changes.

    Args:
        compiled: the step made by `compile_step`, which must have the saved options.
        remap: the model's journal, if the model was edited since the state was saved: its edits are applied to the
            saved weights and moments. Weights that an edit added keep the model's values; their moments are 0.
    Raises: StateError or CheckpointError if files are damaged or do not match model, optimizer or step; UnreadableFile;
        with `remap` NotUndoable or ReplayConflict if edits cannot be replayed.
    """

    def read() -> int:
        saved = SavedState.read(directory)
        saved.restore(model, optimizer, scheduler, scaler, loader, rng, compiled=compiled, remap=remap)
        return saved.step

    return read_whole(Path(directory), read)


@dataclass(frozen=True)
class SavedState:
    """A saved training whose `train.json` was read and checked; its tensors are read by `restore`.

    Attributes:
        directory: directory of the saved training.
        step, facts: the arguments of `save_state`.
        structure, journal: hashes of the model's structure and of its journal; `journal` is None for a module.
        plan: options of the compiled step, or None.
        tensors: name of each tensor -> checksum of its bytes.
        aliases: other name of a tied tensor -> its first name.
        states: states of `scheduler`, `loader` and `rng`, by these names.
    """

    directory: Path
    step: int
    facts: Mapping[str, Any]
    structure: str
    journal: str | None
    plan: Mapping[str, Any] | None
    tensors: Mapping[str, str]
    aliases: Mapping[str, str]
    states: Mapping[str, Any]

    @classmethod
    def read(cls, directory: StrPath) -> SavedState:
        """Read and check `train.json`. Raises: StateError if it is invalid, UnreadableFile if it is missing."""
        path = Path(directory) / "train.json"
        try:
            content = read_json(path, _LIMIT)
        except JsonError as error:
            raise StateError("train.json is damaged", where=path, got=error.what) from error
        if not isinstance(content, dict) or type(content.get("schema")) is not int:
            expected = 'an object with an integer "schema"'
            raise StateError("train.json does not describe a saved training", where=path, expected=expected)
        if content["schema"] != SCHEMA:
            got, fix = content["schema"], "use a newer graphwright" if content["schema"] > SCHEMA else "train again"
            raise StateError("unknown schema of a saved training", where=path, expected=SCHEMA, got=got, fix=fix)
        checksum = content.pop("checksum", None)
        if content.keys() != _FIELDS or checksum != _checksum(content):
            raise StateError("train.json is damaged: wrong checksum or fields", where=path)
        del content["schema"]
        return cls(Path(directory), **content)

    def restore(
        self, model: HasStructure, optimizer: HasVariables | None = None, scheduler: HasState | None = None,
        scaler: HasVariables | None = None, loader: HasState | None = None, rng: HasState | None = None, *,
        compiled: CompiledStep | None = None, remap: Journal | None = None,
    ) -> None:  # fmt: skip
        """Restore model, optimizer and all other arguments that are given; see `load_state`."""
        with whole(optimizer, gather=False):
            self._restore(model, optimizer, scaler, _given(scheduler, loader, rng), compiled, remap)

    def _restore(
        self, model: HasStructure, optimizer: HasVariables | None, scaler: HasVariables | None,
        parts: Sequence[tuple[str, HasState]], compiled: CompiledStep | None, remap: Journal | None,
    ) -> None:  # fmt: skip
        divided = DividedTensors(model, optimizer, compiled)
        if remap is None and divided.structure != self.structure:
            fix = "load it into the same model; if that was edited after saving, pass remap=program.journal"
            raise StateError("the saved state is of a model with a different structure", where=self.directory, fix=fix)
        own, aliases = training_variables(model, optimizer, scaler, compiled)
        specs = {name: divided.spec(variable) for name, variable in own.items()}
        scope = tuple(sorted({name.partition(".")[0] for name in own}))
        wrong = [f"{name}: the training was saved without it" for name, _ in parts if name not in self.states]
        if compiled is not None:
            now, then = json.loads(json.dumps(dict(compiled.options()))), dict(self.plan or {})
            if now.pop("ranks") != then.pop("ranks", 1):  # each rank feeds another part of a batch
                now["inputs"], then["inputs"] = (_items_of(facts.get("inputs")) for facts in (now, then))
            wrong += [f"{n} of the step: expected {then.get(n)}, got {v}" for n, v in now.items() if then.get(n) != v]
        if remap is None:
            arrays = self._arrays(scope, wrong, specs, lambda name, whole: divided.own(own[name], whole))
            if {a: n for a, n in self.aliases.items() if a.partition(".")[0] in scope} != aliases:
                wrong.append("other tensors are tied in the saved state than in this model")
        else:
            program = program_of(model)
            if program is None or divided:
                what = "the model is divided among ranks" if divided else "the model has no program"
                raise StateError(f"`remap` is given but {what}", where=self.directory,
                                 got=type(model).__name__, fix="leave out remap")  # fmt: skip
            arrays = self._arrays(scope, wrong)
            arrays = remap_state(self, arrays, program, remap, optimizer if isinstance(optimizer, Optimizer) else None)
            wrong += _misfits(specs, {name: array.spec for name, array in arrays.items()})
        self._refuse(wrong)
        before = [(part, dict(part.state_dict())) for _, part in parts]
        try:
            for name, part in parts:
                part.load_state_dict(self.states[name])
        except Exception:
            for part, state in before:
                part.load_state_dict(state)
            raise
        for name, variable in own.items():
            variable.assign(Tensor(arrays[name]))

    def _refuse(self, wrong: Sequence[str]) -> None:
        if wrong:
            lines = "\n  ".join(dict.fromkeys(wrong))
            raise StateError(f"the saved state does not match the arguments:\n  {lines}", where=self.directory)

    def _arrays(
        self, scope: Sequence[str], wrong: list[str], own: Mapping[str, Spec] | None = None,
        take: Callable[[str, NDArray], NDArray] = lambda name, array: array,
    ) -> dict[str, NDArray]:  # fmt: skip
        """Return the saved tensors, by name, of the parts in `scope`, such as `model`, after verifying their checksums.

        Of each tensor, what `take` returns is kept. Raises: StateError listing the lines of `wrong` and all mismatches
        with the specs `own`, or for a checksum.
        """
        names = [name for name in self.tensors if name.partition(".")[0] in scope]
        arrays: dict[str, NDArray] = {}
        with Checkpoint(self.directory, stem="state") as checkpoint:
            infos = {name: checkpoint.info(name) for name in names}
            specs = {n: Spec(tuple(i.shape), BY_TAG[i.tag]) for n, i in infos.items() if i.tag in BY_TAG}
            wrong += [f"{n}: unknown dtype {i.tag}" for n, i in infos.items() if n not in specs]
            wrong += [] if own is None else _misfits(own, specs)
            self._refuse(wrong)
            for name, spec in specs.items():
                host = np.frombuffer(bytearray(checkpoint.bytes(name)), spec.dtype.numpy)
                if blake2b_128(host) != self.tensors[name]:
                    raise StateError("the saved tensor has a wrong checksum", where=f"{self.directory}: {name}")
                arrays[name] = take(name, from_numpy(host.reshape(spec.sizes), bits=spec.dtype))
        return arrays


class DividedTensors:
    """Which tensors of a training are parts, of which other ranks have the rest; none if the program is whole.

    Attributes:
        structure: hash of the structure of the whole model.

    Raises: UsageError if the structure was edited after the division, or if terms of the step have arrays.
    """

    def __init__(self, model: HasStructure, optimizer: HasVariables | None, compiled: HasVariables | None) -> None:
        program = program_of(model)
        made = None if program is None else division(program)
        self.structure = model.structure_hash() if made is None else made.structure
        self._weights: dict[int, DividedWeight] = {}
        if program is None or made is None:
            return
        self._weights = {id(program.weights[w.key]): w for w in made.weights}
        for _, p, state in optimizer.states() if isinstance(optimizer, Optimizer) else ():
            if (w := self._weights.get(id(p))) is not None:
                self._weights |= {id(v): w for v in state.variables().values() if v.shape == p.shape}
        own = {} if compiled is None else compiled.variables()
        if arrays := [name for name, variable in own.items() if variable.ndim]:
            raise UsageError("terms of the step have arrays, of which ranks may have parts", where="a saved training",
                             got=arrays[:3], fix="save a training of the whole program")  # fmt: skip

    def __bool__(self) -> bool:
        return bool(self._weights)

    def spec(self, variable: Variable) -> Spec:
        """Return the spec of the whole tensor."""
        w = self._weights.get(id(variable))
        return variable.spec if w is None else Spec(w.whole_shape(variable.shape), variable.dtype)

    def own(self, variable: Variable, array: NDArray) -> NDArray:
        """Return the part of this rank of a whole tensor."""
        w = self._weights.get(id(variable))
        return array if w is None else w.part(array, world().part)

    def joined(self, variables: Mapping[str, Variable], *, keep: bool) -> dict[str, NDArray]:
        """Return the whole tensors; without `keep` only send parts to the rank that keeps them. Raises: RankLost."""
        found = {}
        for name, variable in variables.items():
            w = self._weights.get(id(variable))
            array = variable.data if w is None else assembled(w, variable.data, keep=keep)
            if keep and array is not None:
                found[name] = array
        return found


def remap_state(
    saved: SavedState, arrays: Mapping[str, NDArray], program: Program, journal: Journal, optimizer: Optimizer | None
) -> dict[str, NDArray]:
    """Apply the edits since a training was saved to the saved tensors; return a dict of them by their new names.

    Args:
        arrays: saved tensors by name, with the prefix `model.` or `optimizer.`.
        journal: journal of the program.
    Raises: StateError if the edits do not lead from the saved program to the present one; NotUndoable or ReplayConflict
        if they cannot be replayed.
    """
    heads = {journal.chain.base: -1, **{entry.hash: entry.seq for entry in journal}}
    if saved.journal not in heads or journal.hash != program.journal.hash:
        fix = "pass remap=program.journal of the program that was trained and edited"
        raise StateError("the journal does not contain the edits from the saved program to this one",
                         where=program.name, expected=f"an entry with hash {saved.journal}", fix=fix)  # fmt: skip
    at = heads[saved.journal]
    past = (program.at(at) if len(journal) else program).fork()
    if past.structure_hash() != saved.structure:
        raise StateError("the saved structure differs from that of the program at the saved state of its journal",
                         where=f"{program.name}, after {at + 1} journal entries")  # fmt: skip
    for key, variable in past.variables().items():
        if f"model.{key}" not in arrays:
            raise StateError("a weight is missing in the saved state", where=key)
        variable.assign(Tensor(arrays[f"model.{key}"]))
    then = {key: (variable.spec, variable.lineage) for key, variable in past.variables().items()}
    replay(journal[at + 1 :], onto=past)
    if past.structure_hash() != program.structure_hash():
        raise StateError("replaying the journal did not reproduce the structure of the program", where=program.name)
    now = past.variables()
    found = {name: array for name, array in arrays.items() if not name.startswith(("model.", "optimizer."))}
    found |= {f"model.{key}": variable.data for key, variable in now.items()}
    if optimizer is None:
        return found
    keys = {id(variable): key for key, variable in program.variables().items()}
    names = {id(variable): name for name, variable in training_variables(program, optimizer)[0].items()}
    for group in optimizer.param_groups:
        found[f"optimizer.{group.rate.name}"] = arrays.get(f"optimizer.{group.rate.name}", group.rate.data)
    for _, p, state in optimizer.states():
        key = keys.get(id(p), "")
        twin, old = now.get(key), then.get(key)
        remap = moment_remap(*old, twin) if old is not None and isinstance(twin, Parameter) else None
        for variable in state.variables().values():
            name = names[id(variable)]
            if remap is None or name not in arrays:
                found[name] = variable.data
            else:
                moved = variable.shape == p.shape  # counts are numbers
                found[name] = from_numpy(remap(arrays[name].to_numpy().copy())) if moved else arrays[name]
    return found


def program_of(model: object) -> Program | None:
    """Return the program of a model, or the model itself if it is a program; None for a module."""
    found = getattr(model, "program", model)
    return found if isinstance(found, Program) else None


def _items_of(inputs: Mapping[str, str] | None) -> dict[str, str]:
    """Return the specs of inputs without the size of their first axis."""
    return {name: re.sub(r"\[\d+", "[*", spec) for name, spec in (inputs or {}).items()}


def _misfits(own: Mapping[str, Spec], saved: Mapping[str, Spec]) -> list[str]:
    """Return a line of text per tensor in `own` that is not in `saved`, or conversely, or whose spec differs."""
    wrong = sorted(f"{name}: missing in the saved state" for name in own.keys() - saved.keys())
    wrong += sorted(f"{name}: unexpected in the saved state" for name in saved.keys() - own.keys())
    both = [(name, spec, saved[name]) for name, spec in own.items() if name in saved]
    return wrong + [f"{name}: expected {here}, got {there}" for name, here, there in both if here != there]


def training_variables(
    model: HasVariables, optimizer: HasVariables | None = None, scaler: HasVariables | None = None,
    compiled: HasVariables | None = None,
) -> tuple[dict[str, Variable], dict[str, str]]:  # fmt: skip
    """Return a dict from names to all variables of a training, and one from other names of tied ones to the first.

    Names begin with `model`, `optimizer`, `scaler` or `compiled`. Moments are named by the key of their parameter in
    the model, so that the names do not depend on parameters that edits removed.
    """
    first: dict[int, str] = {}
    tensors: dict[str, Variable] = {}
    aliases: dict[str, str] = {}
    own = model.variables()
    for part, holder in (("model", model), ("optimizer", optimizer), ("scaler", scaler), ("compiled", compiled)):
        if isinstance(holder, Optimizer):
            found = _optimizer_variables(holder, {id(v): name for name, v in reversed(list(own.items()))})
        else:
            found = own if holder is model else {} if holder is None else holder.variables()
        for name, variable in found.items():
            full = f"{part}.{name}"
            if first.setdefault(id(variable), full) == full:
                tensors[full] = variable
            else:
                aliases[full] = first[id(variable)]
    return tensors, aliases


def _optimizer_variables(optimizer: Optimizer, keys: Mapping[int, str]) -> dict[str, Variable]:
    """Return the variables of an optimizer by name; `keys` maps the id of a parameter to its key in the model."""
    found = {group.rate.name: group.rate for group in optimizer.param_groups}
    for default, p, state in optimizer.states():
        wanted = f"{optimizer.name}.{keys[id(p)]}" if id(p) in keys else default
        for label, variable in state.variables().items():
            name = f"{wanted}.{label}"
            found[next(n for n in chain([name], (f"{name}_{i}" for i in count(2))) if n not in found)] = variable
    return found


def _given(*parts: HasState | None) -> list[tuple[str, HasState]]:
    """Return (name, part) for each of `scheduler`, `loader` and `rng` that is not None."""
    return [(n, part) for n, part in zip(("scheduler", "loader", "rng"), parts, strict=True) if part is not None]


def _bits(array: NDArray) -> np.ndarray:
    return np.ascontiguousarray(array.to_numpy(bits=True))


def _checksum(content: Mapping[str, Any]) -> str:
    return blake2b_128(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
