"""Does everything in a model fit: its program, and its program with the files it came from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from graphwright.models.open import EMBEDDING, TIED_HEAD
from graphwright.program import Mismatch

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program import AssemblyReport


def validate(model: Model) -> AssemblyReport:
    """What `program.validate()` finds, and `tied_mismatch`; reads the embedding if the file holds a second one."""
    report = model.program.validate()
    return replace(report, mismatches=(*report.mismatches, *_tied_mismatch(model)))


def _tied_mismatch(model: Model) -> list[Mismatch]:
    """The config ties head and embedding, and the file holds both with other bits: the embedding is used for both.

    `transformers` 5 believes the file there and does not tie (`PreTrainedModel.tie_weights`), so its logits are others.
    """
    source, embedding = model.checkpoint, model.keys.get(EMBEDDING)
    if source is None or embedding is None or not getattr(model.dims, "tied", False):
        return []
    found = []
    for head in (k for k in source if k.endswith(TIED_HEAD) and k not in model.keys.values()):
        tensors = [(source.info(k).tag, source.info(k).shape, source.bytes(k)) for k in (embedding, head)]
        if tensors[0][:2] != tensors[1][:2]:
            got = f"{tensors[1][0]}{list(tensors[1][1])} against {tensors[0][0]}{list(tensors[0][1])}"
        elif np.array_equal(np.asarray(tensors[0][2]), np.asarray(tensors[1][2])):
            continue
        else:
            rows = [np.asarray(data).reshape(shape[0], -1) for _, shape, data in tensors]
            differing = (rows[0] != rows[1]).any(axis=1)
            got = f"{int(differing.sum())} rows with other bits, the first is {int(differing.argmax())}"
        what = (
            "the config ties head and embedding, and the file holds two: the embedding is used, transformers uses both"
        )
        found.append(Mismatch("tied_mismatch", head, what, expected=f"the bits of {embedding}", got=got))
    return found
