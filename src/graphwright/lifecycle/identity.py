"""Who a life is: `identity.json`, written once when it is born and never changed.

A renaming is an event of the log. Copies of the directory have the same identity; a fork has its own, which names its
parent.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from graphwright.files import JsonError, UnreadableFile, atomic_write, read_json
from graphwright.lifecycle.errors import NoLife, StoreDamaged, SubstrateMismatch
from graphwright.program.errors import ProgramFileError
from graphwright.program.files import forms

if TYPE_CHECKING:
    from graphwright.program import Program

SCHEMA = 1
FILE = "identity.json"


@dataclass(frozen=True, slots=True)
class Identity:
    """The identity of a life.

    Attributes:
        id: UUID, version 4.
        name: name at birth.
        time: UTC, ISO 8601.
        seed: seed that was given at birth.
        structure: hash of the structure at birth.
        substrate: physical sizes at birth: name of an axis, such as `embed.channels` -> its size.
        parent: for a fork, `id`, `step` and `commit` of the life that it comes from; else None.
    """

    id: str
    name: str
    time: str
    seed: int
    structure: str
    substrate: Mapping[str, int]
    parent: Mapping[str, Any] | None = None

    @classmethod
    def new(cls, p: Program, name: str, seed: int) -> Identity:
        """Return a new identity for a program."""
        return cls(str(uuid4()), name, now(), seed, p.structure_hash(), substrate(p))

    @classmethod
    def fork(cls, parent: Identity, name: str, origin: Mapping[str, Any]) -> Identity:
        """Return a new identity with the substrate, the structure and the seed of its parent."""
        return replace(parent, id=str(uuid4()), name=name, time=now(), parent=origin)

    def write(self, folder: Path) -> None:
        """Write the file. Raises: UnwritableTarget."""
        text = json.dumps({"schema": SCHEMA, **asdict(self)}, indent=1, sort_keys=True, allow_nan=False)
        atomic_write(folder / FILE, (text + "\n").encode())

    @classmethod
    def read(cls, folder: Path) -> Identity:
        """Read and check the file. Raises: NoLife; StoreDamaged."""
        path = folder / FILE
        if not path.is_file():
            fix = "lf.birth(program, directory, name=...) or `graphwright train --life DIR` starts one"
            raise NoLife("the directory has no life", where=folder, fix=fix)
        try:
            data = forms.table(read_json(path), {"schema", *cls.__dataclass_fields__}, FILE)
            if forms.integer(data.pop("schema"), 1, field="schema") != SCHEMA:
                what, fix = "unknown schema of an identity", "update graphwright"
                raise StoreDamaged(what, where=path, expected=SCHEMA, fix=fix)
            for field in ("id", "name", "time", "structure"):
                forms.text(data[field], field)
            forms.integer(data["seed"], field="seed")
            for axis, size in forms.table(data["substrate"], None, "substrate").items():
                forms.integer(size, field=f"substrate.{axis}")
            if data["parent"] is not None:
                parent = forms.table(data["parent"], ("id", "step", "commit"), "parent")
                forms.text(parent["id"], "parent.id")
                for field in ("step", "commit"):
                    forms.integer(parent[field], field=f"parent.{field}")
        except (JsonError, ProgramFileError, UnreadableFile) as error:
            raise StoreDamaged("the identity of the life is damaged", where=path, got=error) from error
        return cls(**data)

    def check(self, p: Program) -> None:
        """Check that a program, as it was before any edit, has the sizes of the life. Raises: SubstrateMismatch."""
        given = substrate(p)
        for axis in dict.fromkeys((*self.substrate, *given)):
            own, other = self.substrate.get(axis), given.get(axis)
            if own != other:
                expected, got = ("no such axis" if n is None else n for n in (own, other))
                what, fix = "the model has other sizes than the life", "open the life that was born from this model"
                raise SubstrateMismatch(what, where=axis, expected=expected, got=got, fix=fix)


def substrate(p: Program) -> dict[str, int]:
    """Return the physical sizes of a program: name of each axis -> its size."""
    return {name: axis.size for name, axis in p.axes().items()}


def now() -> str:
    """Return the time, UTC, ISO 8601 in milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
