"""Export levels: the forms in which a model can be written as a checkpoint for transformers.

A level "carries" a model or a deviation if its files can represent it. The plan of a level tells whether the level
carries the model, and if not, why. New levels are subclasses of `ExportLevel`, listed in `ladder.py`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.export.template_match import (
    Deviation,
)
from graphwright.models.export.write import exported_companions, write_model
from graphwright.report import Report

if TYPE_CHECKING:
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True)
class Reason(Report):
    """A reason why a level cannot carry a program; `path` names a node, or is "" for the whole program.

    If a size is the reason, `axis` names its units, e.g. `neurons`, and `field` the config field that counts them.
    `branch` is the number of the template branch, or None for the whole program.
    """

    path: str
    reason: str
    axis: str = ""
    field: str = ""
    branch: int | None = None
    HIDDEN: ClassVar = ("branch",)
    OPTIONAL: ClassVar = ("axis", "field")

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


@dataclass(frozen=True, slots=True)
class LevelPlan(Report):
    """Plan of an export at one level: names of the files that it would write, and bytes of the weights.

    Attributes:
        possible: whether this level can be requested.
        exact: whether the files compute the program's function, apart from rounding in float32.
        reasons: why the level is not possible or not exact; empty if it is impossible because a lower level suffices.
    """

    level: int
    name: str
    possible: bool = False
    exact: bool = False
    reasons: tuple[Reason, ...] = ()
    files: tuple[str, ...] = ()
    bytes: int = 0


class ExportCase:
    """A model with its deviations from what its class computes, shared by all levels.

    Attributes:
        edited: the model whose edits the files list.
        model: the same model as the levels write it.
        deviations: all differences from the class's program.
    """

    edited: Model
    model: Model
    deviations: Sequence[Deviation]

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the files that every level writes."""
        model = self.model
        companions = [f.name for f in exported_companions(model)]
        weights, source = ["model.safetensors"], model.checkpoint
        if source is not None and source.index is not None:
            weights = [source.index.name, *(f.path.name for f in source.files)]
        return tuple(sorted({"config.json", "README.md", "receipt.json", *weights, *companions}))


class ExportLevel(ABC):
    """Base class of the export levels; each instance serves one model.

    Attributes:
        number: position among the levels, stable across versions.
        name, summary: identifier in options and receipts; description in one line.
        true_size: whether removed units take no bytes; `prefer="size"` skips levels where they do.
        runs_code: whether transformers must run code of the directory (`trust_remote_code=True`). Graphwright
            itself can only open directories without such code.
    """

    number: ClassVar[int]
    name: ClassVar[str]
    summary: ClassVar[str]
    true_size: ClassVar[bool] = True
    runs_code: ClassVar[bool] = False

    def __init__(self, case: ExportCase) -> None:
        self.case = case

    @abstractmethod
    def plan(self) -> LevelPlan:
        """Return a plan that tells whether this level can carry the model, and if not, why; reads no weight payload."""

    @cached_property
    def written(self) -> Model:
        """The model that a loader of the files computes: the program, or the template that holds its weights."""
        return self.case.model

    @property
    def made_by(self) -> str:
        """The class of transformers that loads the files."""
        if self.case.model.task == LANGUAGE_MODEL:
            return "AutoModelForCausalLM"
        return "AutoModel" if self.runs_code else self.case.model.config["architectures"][0]

    @property
    def tables(self) -> frozenset[str]:
        """Keys of the integer tensors in the files, which count as no weights."""
        return frozenset()

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on limits of the files, for the receipt."""
        return ()

    @abstractmethod
    def carries(self, d: Deviation) -> bool:
        """Return True if this level's files can represent the deviation `d`."""

    def write(self, directory: Path, dtype: str = "keep", max_shard_size: int | str | None = None) -> None:
        """Write config, weights (as `dtype`, files of `max_shard_size`), tokenizer and other files into a directory."""
        write_model(self.written, directory, dtype=dtype, max_shard_size=max_shard_size)

    def _refused(self, *reasons: Reason) -> LevelPlan:
        return LevelPlan(self.number, self.name, reasons=reasons)

    def _accepted(self, nbytes: int, inexact: tuple[Reason, ...] = (), files: tuple[str, ...] = ()) -> LevelPlan:
        names = tuple(sorted((*self.case.files, *files)))
        return LevelPlan(self.number, self.name, True, not inexact, inexact, names, nbytes)


class SameClass(ExportLevel):
    """The original transformers class, config and shapes, for programs that differ from the template only in values."""

    number, name, summary = 1, "same_class", "same class, same shapes"

    def plan(self) -> LevelPlan:
        """Return the plan of this level, which is possible if there are no deviations."""
        found = [Reason(d.path, f"{d.kind}, {d.detail}", d.axis, d.field) for d in self.case.deviations]
        if found:
            return self._refused(*found)
        p = self.case.model.program
        return self._accepted(sum(p.spec(n).nbytes for n in p.params()))

    def carries(self, d: Deviation) -> bool:
        """Return False, because this level carries no deviation."""
        return False
