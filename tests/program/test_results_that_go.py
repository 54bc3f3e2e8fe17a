"""An edit that takes a result away: who named it is refused, or goes in the same edit."""

from __future__ import annotations

import numpy as np
import pytest

from graphwright.program import Builder, Program, SpecMismatch


def scaled() -> Program:
    """An op of as many results as it has operands."""
    b = Builder("scaled")
    operands = [b.input("inverse", ()), b.input("found", ()), *(b.input(f"g{i}", (3,)) for i in range(3))]
    found, *grads = b.unscale_check(*operands, name="u")
    for value, name in ((found, "found"), (grads[1], "kept"), (grads[2], "last")):
        b.output(value, name)
    return b.build()


def test_removing_the_result_of_an_output_raises() -> None:
    p = scaled()
    before = p.hash()
    with pytest.raises(SpecMismatch, match="output last") as caught, p.edit("cut an operand") as e:
        e.cut(p.in_edges("u")[-1])
    assert "set_outputs" in str(caught.value)
    assert (p.hash(), p.valid) == (before, True)
    with p.edit("and its output") as e:
        e.cut(p.in_edges("u")[-1])
        e.set_outputs(found=p.output("found"), kept=p.output("kept"))
    feeds = {"inverse": np.float32(2), "found": np.float32(0), **{f"g{i}": np.ones(3, np.float32) for i in range(3)}}
    assert p.run(feeds)["kept"].to_numpy().tolist() == [2, 2, 2]
    assert p.compile({name: np.shape(a) for name, a in feeds.items()})(feeds)["kept"].to_numpy().tolist() == [2, 2, 2]
    p.undo()
    assert p.hash() == before


def test_reading_a_removed_result_is_a_mismatch() -> None:
    p = scaled()
    with p.edit("read the last") as e:
        e.add("neg", p.output("last"), name="n")
        e.set_outputs(y="n")
    before = p.hash()
    with pytest.raises(SpecMismatch, match="n: a node reads a result that no longer exists"), p.edit("cut it") as e:
        e.cut(p.in_edges("u")[-1])
    assert p.hash() == before


def test_an_output_without_a_result_is_invalid_until_repaired() -> None:
    p = scaled()
    with p.edit("break it", check=False) as e:
        e.cut(p.in_edges("u")[-1])
    assert not p.valid
    with pytest.raises(SpecMismatch, match="output last"), p.edit("something else") as e:
        e.rename("g0", "first")
    assert not p.valid
    with p.edit("repair it") as e:
        e.set_outputs(found=p.output("found"))
    assert p.valid
    assert p.validate().ok
