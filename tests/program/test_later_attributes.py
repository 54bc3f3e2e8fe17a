"""Attributes that an op got later: hashes of programs without them stay, and older files load."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import numpy as np

from graphwright.ops import OPS
from graphwright.program import Builder, Program, load
from graphwright.program.files.save import MIDDLE, PREFIX, SUFFIX


def attention(**attrs: float) -> Program:
    b = Builder("attention")
    q = b.input("q", ("B", 2, "T", 4))
    b.output(b.sdpa(q, q, q, scale=0.5, name="sdpa", **attrs), "y")
    return b.build()


def test_a_default_is_not_hashed_and_another_value_is() -> None:
    """The hash is that of programs from before the attribute."""
    assert OPS["sdpa"].added == ("softcap",)
    assert attention().hash() == "11fc1f055033b4e8a0df1506bc8feef416e12a2e234f2ac0bc1d0d7c3a941783"
    assert attention(softcap=3.0).hash() != attention().hash()


def test_a_file_without_the_attribute_loads_with_the_default(tmp_path: Path) -> None:
    p = attention()
    p.save(tmp_path / "saved")
    file = tmp_path / "saved" / "program.json"
    text = file.read_bytes()[len(PREFIX) + 64 + len(MIDDLE) : -len(SUFFIX)]
    older = text.replace(b',"softcap":null', b"").replace(b'"softcap":null,', b"")
    assert len(older) < len(text)
    file.write_bytes(PREFIX + sha256(older).hexdigest().encode() + MIDDLE + older + SUFFIX)
    again = load(tmp_path / "saved")
    assert again.hash() == p.hash()
    x = np.random.default_rng(0).normal(size=(1, 2, 3, 4)).astype("f4")
    np.testing.assert_array_equal(again.run(q=x)["y"].to_numpy(), p.run(q=x)["y"].to_numpy())
