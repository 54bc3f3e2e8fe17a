"""A saved training of a compiled step: resumed exactly, refused for mismatches, remapped along edits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from step_edits import insert_sigmoid, link_input_and_result

import graphwright as gw
from graphwright import amp, nn, optim
from graphwright.autograd import Tensor
from graphwright.errors import GraphwrightError
from graphwright.optim import StateError
from graphwright.program import Program

F = nn.functional
INPUTS = {"x": (8, 6), "y": np.zeros(8, np.int64)}


class Net(nn.Module):
    def __init__(self) -> None:
        self.up, self.drop, self.down = nn.Linear(6, 12), nn.Dropout(0.2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(self.drop(x)).tanh())


class Run:
    """A program, its optimizer and its step; the i-th batch is always the same."""

    def __init__(self, p: Program | None = None, make: Any = optim.AdamW, **options: Any) -> None:
        gw.manual_seed(1)
        self.p = p or gw.trace(Net(), np.zeros((8, 6), np.float32))
        self.optimizer = make(self.p, lr=1e-2)
        self.scaler = amp.GradScaler(2.0**10, growth_interval=3)
        self.step = optim.compile_step(
            self.p,
            lambda out, y: F.cross_entropy(out, y),
            self.optimizer,
            INPUTS,
            **{"executor": "aten", "accumulate": 2, "clip": 0.5, "scaler": self.scaler, **options},
        )

    def parts(self) -> dict[str, Any]:
        return {
            "model": self.p,
            "optimizer": self.optimizer,
            "scaler": self.scaler,
            "rng": gw.rng,
            "compiled": self.step,
        }

    def run(self, first: int, last: int) -> list[float]:
        found = []
        for i in range(first, last):
            rng = np.random.default_rng(i)
            x, y = rng.normal(size=(8, 6)).astype("f4"), rng.integers(0, 4, 8)
            found.append(self.step(x=x, y=y).item())
        return found

    def bits(self) -> dict[str, bytes]:
        parts = {"p": self.p, "o": self.optimizer, "s": self.scaler, "c": self.step}
        return {f"{k}.{n}": v.data.tobytes() for k, part in parts.items() for n, v in part.variables().items()}


def test_resuming_within_an_accumulation_is_exact(tmp_path: Path) -> None:
    whole = Run()
    losses = whole.run(0, 10)
    first = Run()
    half = first.run(0, 3)
    gw.save_state(tmp_path / "state", **first.parts(), step=3)
    then = first.bits()
    again = Run()
    again.run(5, 6)
    assert gw.load_state(tmp_path / "state", **again.parts()) == 3
    assert again.bits() == then
    assert half + again.run(3, 10) == losses
    assert again.bits() == whole.bits()


EDITS: dict[str, Any] = {
    "prune": lambda p, e: e.cut_units(p.axes()["up.neurons"].units([1, 7])),
    "grow": lambda p, e: e.grow("up.neurons", 3),
    "insert": insert_sigmoid,
    "link": link_input_and_result,
}


@pytest.mark.parametrize("saved", [False, True])
@pytest.mark.parametrize(("edit", "make"), [*((e, optim.AdamW) for e in EDITS), ("grow", optim.NAdam)])
def test_a_state_is_remapped_along_the_journal(edit: str, make: Any, saved: bool, tmp_path: Path) -> None:
    donor = Run()
    with donor.p.edit(edit) as e:
        EDITS[edit](donor.p, e)
    whole = Run(make=make)
    whole.run(0, 4)
    gw.save_state(tmp_path / "state", **whole.parts(), step=4)
    gw.replay(donor.p, onto=whole.p)
    losses = whole.run(4, 10)
    then = whole.bits()

    if saved:
        donor.p.save(tmp_path / "program")
        fresh = Run(gw.load(tmp_path / "program"), make)
    else:
        fresh = Run(make=make)
        gw.replay(donor.p, onto=fresh.p)
    before = fresh.bits()
    with pytest.raises(StateError, match="different structure"):
        gw.load_state(tmp_path / "state", **fresh.parts())
    assert fresh.bits() == before
    assert gw.load_state(tmp_path / "state", **fresh.parts(), remap=fresh.p.journal) == 4
    assert fresh.run(4, 10) == losses
    assert fresh.bits() == then


def test_mismatched_options_journals_schemas_and_files_change_nothing(tmp_path: Path) -> None:
    first = Run()
    first.run(0, 3)
    gw.save_state(tmp_path / "state", **first.parts(), step=3)
    other = Run(accumulate=4, clip=None)
    before = other.bits()
    with pytest.raises(StateError, match="accumulate of the step: expected 2, got 4") as error:
        gw.load_state(tmp_path / "state", **other.parts())
    assert "clip of the step: expected 0.5, got None" in str(error.value)
    assert other.bits() == before

    edited = Run()
    with edited.p.edit("insert") as e:
        EDITS["insert"](edited.p, e)
    unrelated = Run()
    with pytest.raises(StateError, match="does not contain the edits"):
        gw.load_state(tmp_path / "state", **edited.parts(), remap=unrelated.p.journal)

    undone = Run()
    with undone.p.edit("insert") as e:
        EDITS["insert"](undone.p, e)
    gw.save_state(tmp_path / "later", **undone.parts())
    undone.p.undo()
    with pytest.raises(GraphwrightError):  # the state is of a program that has what this one has not
        gw.load_state(tmp_path / "later", **undone.parts())

    first.p.save_parameters(tmp_path / "params.safetensors")
    for path in (tmp_path, tmp_path / "params.safetensors"):
        with pytest.raises(GraphwrightError):
            gw.load_state(path, **Run().parts())
    text = (tmp_path / "state" / "train.json").read_text()
    (tmp_path / "state" / "train.json").write_text(text.replace('"schema": 2', '"schema": 1'))
    with pytest.raises(StateError, match="unknown schema"):
        gw.load_state(tmp_path / "state", **Run().parts())
