"""`ExportLevel`: one form in which a model can leave as a checkpoint for transformers.

A level tells whether it can carry the model, and if not, why; then it writes the files. A new level is a subclass in a
file of its own, listed in `ladder.LEVELS`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass
from functools import cached_property
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

from graphwright.array import BY_TAG
from graphwright.models.export.conform import computed_weights
from graphwright.models.export.deviation import find_deviations
from graphwright.models.export.template_match import match_template
from graphwright.models.export.write import companion_files, write_model

if TYPE_CHECKING:
    from pathlib import Path

    from graphwright.array import DType
    from graphwright.models.export.deviation import Deviation
    from graphwright.models.model import Model


@dataclass(frozen=True, slots=True)
class Reason:
    """Why a level cannot carry a program.

    Attributes:
        path: of a node, or "".
        reason: in words.
        axis, field: units and the config field that counts them, if a size is the reason.
        branch: number of the template branch; None for the whole program.
    """

    path: str
    reason: str
    axis: str = ""
    field: str = ""
    branch: int | None = None

    def to_json(self) -> dict[str, str]:
        """Plain values; axis and field only if set."""
        facts = {"path": self.path, "reason": self.reason, "axis": self.axis, "field": self.field}
        return {name: value for name, value in facts.items() if value or name in ("path", "reason")}

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}" if self.path else self.reason


@dataclass(frozen=True, slots=True)
class LevelPlan:
    """What an export at one level would write.

    Attributes:
        level, name: number and name of the level.
        possible: whether it can be requested.
        exact: whether the files compute the program's function, apart from rounding in float32.
        reasons: why it is not possible or not exact; empty and not possible if a lower level carries the model.
        files: names of the files.
        bytes: of the weights.
    """

    level: int
    name: str
    possible: bool = False
    exact: bool = False
    reasons: tuple[Reason, ...] = ()
    files: tuple[str, ...] = ()
    bytes: int = 0

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {**asdict(self), "reasons": [r.to_json() for r in self.reasons]}


class ExportCase:
    """A model matched with its family's template; shared by all levels. Reads no weight payload."""

    def __init__(self, model: Model) -> None:
        self.model, self.match = model, match_template(model)
        self.deviations = find_deviations(self.match)

    @property
    def unmatched(self) -> list[Reason]:
        """Nodes that match nothing of the template, as reasons."""
        return [Reason(self.match.program.path(n), why) for n, why in self.match.unmatched.items()]

    def stored(self, path: str) -> DType:
        """Dtype in which a weight of the template will be stored."""
        source, key = self.model.checkpoint, self.model.keys[path]
        found = BY_TAG.get(source.info(key).tag) if source is not None and key in source else None
        return found or self.match.template.spec(path).dtype

    def rounded(self, dims: Any) -> list[tuple[str, DType]]:
        """Computed weights that are stored in 16 bits in a template of sizes `dims`."""
        return [(path, kind) for path in computed_weights(self.match, dims) if (kind := self.stored(path)).is_low]

    def template_bytes(self, dims: Any) -> int:
        """Bytes of all weights of a template of sizes `dims`."""
        weights = self.model.arch.weights(dims)
        return sum(prod(shape) * self.stored(path).itemsize for path, _, shape, _ in weights)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the files that every level writes."""
        model = self.model
        companions = [f.name for f in companion_files(model.directory)] if model.opened else []
        weights, source = ["model.safetensors"], model.checkpoint
        if source is not None and source.index is not None:
            weights = [source.index.name, *(f.path.name for f in source.files)]
        return tuple(sorted({"config.json", "README.md", "receipt.json", *weights, *companions}))


class ExportLevel(ABC):
    """One form of export, for one model.

    Attributes:
        number: position on the ladder; stable across versions.
        name: identifier in options and receipts.
        summary: one line for people.
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
        """Tell whether this level can carry the model, and why not; reads no payload."""

    @abstractmethod
    def carries(self, d: Deviation) -> bool:
        """True if this level can carry one deviation."""

    def conformed(self) -> Model:
        """The model as it is written; the same model by default."""
        return self.case.model

    def write(self, directory: Path, dtype: str = "keep", max_shard_size: int | str | None = None) -> None:
        """Write config, weights, tokenizer and companions into an existing directory."""
        write_model(self.conformed(), directory, dtype=dtype, max_shard_size=max_shard_size)

    def _refused(self, *reasons: Reason) -> LevelPlan:
        return LevelPlan(self.number, self.name, reasons=reasons)

    def _accepted(
        self, nbytes: int, *, inexact: tuple[Reason, ...] = (), exact: bool = True, files: tuple[str, ...] = ()
    ) -> LevelPlan:
        names = tuple(sorted((*self.case.files, *files)))
        return LevelPlan(self.number, self.name, True, exact and not inexact, inexact, names, nbytes)
