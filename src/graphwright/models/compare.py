"""Comparing two model directories: config fields, tensors, and structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.models.model import Model
from graphwright.models.open import open

if TYPE_CHECKING:
    from graphwright.program.diff import ProgramDiff


@dataclass(frozen=True, slots=True)
class ModelDiff:
    """What two models differ in.

    Attributes:
        config: field -> [left, right] where they differ; None for an absent field.
        program: structure and weights.
        logits: of a text, if asked for: max_abs, mean_kl_nats, top1_agreement.
    """

    config: dict[str, list[Any]]
    program: ProgramDiff
    logits: dict[str, float] = field(default_factory=dict)

    @property
    def identical(self) -> bool:
        """True if nothing differs."""
        return not self.config and self.program.identical

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        facts = {"config": self.config, "program": self.program.to_json(), "logits": self.logits}
        return {"identical": self.identical, **facts}


_NOT_COMPARED = ("_name_or_path", "transformers_version")


def compare_models(left: str | Path | Model, right: str | Path | Model, *, text: str | None = None) -> ModelDiff:
    """Differences of two models, given as such or as directories."""
    a, b = (m if isinstance(m, Model) else open(m) for m in (left, right))
    fields = sorted((a.config.keys() | b.config.keys()) - set(_NOT_COMPARED))
    config = {f: [a.config.get(f), b.config.get(f)] for f in fields if a.config.get(f) != b.config.get(f)}
    logits: dict[str, float] = {}
    if text is not None:
        from graphwright.models.export.write import drift
        from graphwright.models.model import need_tokenizer

        ids = np.asarray(need_tokenizer(a).encode(text), np.int64)
        logits = drift([a.logits(ids)], [b.logits(ids)])
    return ModelDiff(config, b.program.diff(a.program), logits)
