"""Write a checkpoint by all ranks: each writes a shard, rank 0 the index; the directory appears whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from graphwright.array.world import world
from graphwright.distributed.balance import owners
from graphwright.errors import ComputeError, GraphwrightError
from graphwright.files import StrPath, atomic_directory, atomic_write
from graphwright.models.export.ladder import Ladder
from graphwright.models.export.write import file_items, write_companions
from graphwright.program.axes.divide import gathered
from graphwright.safetensors import INDEX_SUFFIX, TensorData, index_file, write_tensors

if TYPE_CHECKING:
    from graphwright.array.process_group import ProcessGroup
    from graphwright.models import Model

ORIGINAL_CLASS = 1
"""The export level in which only values of weights differ from the files that were opened."""


class SaveFailed(ComputeError):
    """A rank could not write its part of a checkpoint; the target is unchanged.

    Attributes:
        reasons: rank -> its reason.
    """

    def __init__(self, reasons: dict[int, str], where: str) -> None:
        self.reasons = reasons
        got = "; ".join(f"rank {r}: {why}" for r, why in sorted(reasons.items()))
        super().__init__("a rank could not write its part of the checkpoint; nothing was saved", where=where, got=got)


def save(model: Model, directory: StrPath, *, overwrite: bool = False) -> Path:
    """Write a model of which only values of weights changed, for transformers and `gw.open`; every rank calls it.

    Units that are on other ranks are gathered first, see `gathered`. Each rank writes about the same number of bytes to
    a directory that all ranks can reach.

    Args:
        model: a model opened from files.
        directory: must not exist, or be empty, unless `overwrite`.
        overwrite: replace an existing directory once the new one is complete.
    Raises: ExportLevelImpossible if the structure changed: `model.export` inside `gathered` writes it on rank 0;
        SaveFailed on all ranks if one cannot write; DestinationExists, UnwritableTarget on rank 0; RankLost. The target
        is then unchanged.
    """
    group = world().group
    with gathered(model.program):
        ladder = Ladder(model)
        ladder.choose(ladder.plan(), ORIGINAL_CLASS)
        items = list(file_items(model)[0])
        if group is None:
            with atomic_directory(directory, overwrite) as folder:
                _write(folder, items, 0, 1)
                write_companions(model, folder)
            return Path(directory)
        own = _shares(items, group.ranks)
        if group.rank:
            return _follow(group, own[group.rank], directory)
        return _lead(group, model, own, directory, overwrite)


def _shares(items: Sequence[TensorData], ranks: int) -> list[list[TensorData]]:
    """Divide tensors among ranks, equally on all of them; those of a rank are sorted by key."""
    ordered = sorted(items, key=lambda item: item.key)
    owner = owners([item.size for item in ordered], [0] * ranks)
    return [[item for item, r in zip(ordered, owner, strict=True) if r == rank] for rank in range(ranks)]


def _file(rank: int, ranks: int) -> str:
    return f"model-{rank + 1:05d}-of-{ranks:05d}.safetensors" if ranks > 1 else "model.safetensors"


def _write(folder: Path, items: Sequence[TensorData], rank: int, ranks: int) -> None:
    write_tensors(folder / _file(rank, ranks), items)


def _tell(group: ProcessGroup, folder: str, error: Exception | None) -> list[list[str]]:
    """Exchange [folder, reason of a failure or ""] of all ranks."""
    why = "" if error is None else str(getattr(error, "what", "") or error)
    return [json.loads(text) for text in group.exchange(json.dumps([folder, why]), "save")]


def _follow(group: ProcessGroup, own: Sequence[TensorData], directory: StrPath) -> Path:
    """Write the shard of another rank than 0 to the folder that rank 0 has made."""
    folder = ""
    for step in ("begin", "write", "end"):
        error: Exception | None = None
        if step == "write":
            try:
                _write(Path(folder), own, group.rank, group.ranks)
            except (GraphwrightError, OSError) as failure:
                error = failure
        answers = _tell(group, "", error)
        folder = answers[0][0]
        if reasons := {r: why for r, (_, why) in enumerate(answers) if why}:
            raise SaveFailed(reasons, str(directory)) from error
    return Path(directory)


def _lead(
    group: ProcessGroup, model: Model, own: Sequence[Sequence[TensorData]], directory: StrPath, overwrite: bool
) -> Path:
    """Make the folder, write the shard of rank 0 and the index, and rename the folder to the target."""
    exchanged = 0
    try:
        with atomic_directory(directory, overwrite) as folder:
            _tell(group, str(folder.resolve()), None)
            exchanged = 1
            error: Exception | None = None
            try:
                _write(folder, own[0], 0, group.ranks)
                shards = {item.key: _file(r, group.ranks) for r, items in enumerate(own) for item in items}
                total = sum(item.size for items in own for item in items)
                atomic_write(folder / f"model{INDEX_SUFFIX}", index_file(shards, total))
                write_companions(model, folder)
            except (GraphwrightError, OSError) as failure:
                error = failure
            answers = _tell(group, "", error)
            exchanged = 2
            if reasons := {r: why for r, (_, why) in enumerate(answers) if why}:
                raise SaveFailed(reasons, str(directory)) from error
    except SaveFailed:
        raise
    except (GraphwrightError, OSError) as failure:
        if exchanged in (0, 2):  # the others wait for the folder, or for the end
            _tell(group, "", failure)
        raise
    _tell(group, "", None)
    return Path(directory)
