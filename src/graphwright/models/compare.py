"""Compare two models: config fields, weights and structure."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.models.metrics import drift
from graphwright.models.model import Model
from graphwright.models.open import open
from graphwright.models.tokenizer import need_tokenizer
from graphwright.program.diff import ProgramDiff


@dataclass(frozen=True, slots=True)
class ModelDiff:
    """Differences of two models.

    Attributes:
        config: field -> [left, right] for fields that differ; None for an absent field.
        program: structure and weights.
        logits: for a given text, the drift of the logits; see `metrics.drift`.
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
    """Compare two models, or the models in two directories."""
    a, b = (open(m) if isinstance(m, str | Path) else m for m in (left, right))
    fields = sorted((a.config.keys() | b.config.keys()) - set(_NOT_COMPARED))
    config = {f: [a.config.get(f), b.config.get(f)] for f in fields if a.config.get(f) != b.config.get(f)}
    logits: dict[str, float] = {}
    if text is not None:
        ids = np.asarray(need_tokenizer(a).encode(text), np.int64)
        logits = drift([a.logits(ids)], [b.logits(ids)])
    return ModelDiff(config, b.program.diff(a.program), logits)
