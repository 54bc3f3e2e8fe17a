"""A saved training: resumed exactly, atomic under any fault or kill, corrupted bytes detected."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.amp import GradScaler
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.data import DataLoader, TensorDataset
from graphwright.errors import GraphwrightError
from graphwright.optim import AdamW, SavedState, StateError
from graphwright.optim.lr_scheduler import WarmupCosineLR
from graphwright.safetensors import CheckpointError
from graphwright.testing.faults import check_atomic
from seeds import deep

rng = np.random.default_rng(0)
X, Y = rng.normal(size=(20, 3)).astype("f4"), rng.integers(0, 4, 20)


class Tied(nn.Module):
    """A net with a tied weight, a persistent buffer and one that is not."""

    def __init__(self) -> None:
        self.drop = nn.Dropout(0.2)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4, bias=False)
        self.second.weight = self.first.weight
        self.seen = nn.Buffer(init_zero())
        self.table = nn.Buffer(init_zero(), persistent=False)

    def forward(self, x):
        self.seen.assign(self.seen + 1.0)
        return self.first(self.drop(x)) + self.second(x.tanh())


def init_zero():
    return from_numpy(np.zeros((), np.float32))


class Run:
    """Everything of a training, and one step of it."""

    def __init__(self, seed: int = 0, compiled: bool = False) -> None:
        gw.manual_seed(seed)
        self.model = Tied()
        self.optimizer = AdamW(self.model, 0.1)
        self.scheduler = WarmupCosineLR(self.optimizer, warmup=3, total=20)
        self.scaler = GradScaler(256.0, growth_interval=3)
        self.loader = DataLoader(TensorDataset(X, Y), 6, shuffle=True, seed=seed)
        self.batches = self.flow()
        self.go: Any = gw.compile(self.one) if compiled else self.one

    def flow(self):
        while True:
            yield from self.loader

    def parts(self) -> dict[str, Any]:
        names = ("model", "optimizer", "scheduler", "scaler", "loader")
        return {"rng": gw.rng, **{name: getattr(self, name) for name in names}}

    def one(self, x, y):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(x), y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss

    def steps(self, n: int) -> list[float]:
        losses = []
        for _ in range(n):
            losses.append(self.go(*next(self.batches)).item())
            self.scheduler.step()
        return losses

    def bits(self) -> dict[str, Any]:
        found = {f"{k}.{n}": v.data.tobytes() for k, p in self.parts().items() if k in TENSORS for n, v in all_of(p)}
        states = {name: dict(getattr(self, name).state_dict()) for name in ("scheduler", "loader")}
        return {**found, **states, "rng": gw.rng.state_dict()}


TENSORS = ("model", "optimizer", "scaler")


def all_of(part):
    return part.variables().items()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_resumed_run_equals_the_uninterrupted_one_bit_for_bit(tmp_path, compiled):
    whole = Run(compiled=compiled)
    losses = whole.steps(15)
    first = Run(compiled=compiled)
    half = first.steps(5)
    gw.save_state(tmp_path / "state", **first.parts(), step=5)
    again = Run(seed=0, compiled=compiled)
    if compiled:
        again.steps(1)  # its plan was made for other values
    assert gw.load_state(tmp_path / "state", **again.parts()) == 5
    again.batches = again.flow()
    assert again.bits() == first.bits()
    assert half + again.steps(10) == losses
    assert again.bits() == whole.bits()


def test_contents_of_the_saved_files(tmp_path):
    from safetensors.numpy import load_file

    run = Run()
    run.steps(2)
    odd = np.array([0x7FC00001, 0xFF800001, 0x80000000], np.uint32).view(np.float32)  # NaNs with payloads, -0
    assert run.model.first.bias is not None
    run.model.first.bias.assign(Tensor(from_numpy(np.resize(odd, 4))))
    facts = {"note": "x"}
    gw.save_state(tmp_path / "state", **run.parts(), facts=facts)
    assert facts == {"note": "x"}
    stored = load_file(tmp_path / "state/state.safetensors")
    assert {n for n in stored if n.startswith("model.")} == {"model.first.weight", "model.first.bias", "model.seen"}
    assert stored["model.first.bias"].tobytes() == np.resize(odd, 4).tobytes()
    saved = SavedState.read(tmp_path / "state")
    assert saved.aliases == {"model.second.weight": "model.first.weight"}
    assert saved.facts == facts
    other = Run(seed=9)
    saved.restore(other.model)
    assert other.model.first.bias is not None
    assert other.model.first.bias.data.tobytes() == np.resize(odd, 4).tobytes()
    assert other.model.second.weight is other.model.first.weight
    assert not other.optimizer.state  # what is not named is left alone


def test_a_program_can_be_saved_as_the_model(tmp_path):
    def program(fill: float) -> gw.Program:
        b = gw.Builder()
        x = b.input("x", ("B", 3))
        b.output(b.linear(x, b.param("w", np.full((2, 3), fill, np.float32))), "y")
        return b.build()

    p, q = program(1.0), program(2.0)
    gw.save_state(tmp_path / "state", p, step=3)
    assert gw.load_state(tmp_path / "state", q) == 3
    assert q.weights.array("w").to_numpy().tolist() == [[1.0] * 3] * 2
    with q.edit("another graph") as e:
        e.insert(q.in_edges("linear")[0], "relu")
    q.weights["w"].data.copy_from(from_numpy(np.zeros((2, 3), np.float32)))
    with pytest.raises(StateError, match="structure"):
        gw.load_state(tmp_path / "state", q)
    q.undo()
    assert gw.load_state(tmp_path / "state", q) == 3
    p.save_parameters(tmp_path / "state.safetensors")
    (tmp_path / "alone").mkdir()
    (tmp_path / "state.safetensors").rename(tmp_path / "alone" / "state.safetensors")
    before = q.weights.array("w").tobytes()
    with pytest.raises(GraphwrightError, match=r"train\.json"):
        gw.load_state(tmp_path / "alone", q)  # params are no training
    assert q.weights.array("w").tobytes() == before


class Other(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(2, 2)


class Untied(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(3, 4, bias=False)


def change(**parts: Any):
    return lambda run: {**run.parts(), **parts}


class Refusing:
    def state_dict(self):
        return {"last_step": 0}

    def load_state_dict(self, state):
        raise StateError("refused")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        (lambda run: {**run.parts(), "model": Other()}, "structure"),
        (lambda run: {**run.parts(), "model": Untied()}, "structure"),
        (lambda run: {**run.parts(), "optimizer": AdamW(run.model, amsgrad=True)}, "largest_v: missing"),
        (lambda run: {**run.parts(), "optimizer": gw.optim.SGD(run.model)}, "m: unexpected"),
        (lambda run: {**run.parts(), "rng": run.scheduler}, "state of a scheduler"),
        (lambda run: {**run.parts(), "scheduler": Refusing()}, "refused"),
        (lambda run: {**run.parts(), "loader": DataLoader(TensorDataset(X), 5)}, "different seed or batch size"),
    ],
)
def test_a_mismatched_state_is_refused_and_changes_nothing(tmp_path, parts, words):
    gw.save_state(tmp_path / "state", **Run().parts())
    run = Run()
    run.steps(3)
    given, before = parts(run), run.bits()
    with pytest.raises(GraphwrightError, match=words):
        gw.load_state(tmp_path / "state", **given)
    assert run.bits() == before


def test_a_state_that_is_not_json_is_refused_before_writing(tmp_path):
    run = Run()
    gw.save_state(tmp_path / "state", run.model, step=1)
    for facts in ({"x": float("nan")}, {"x": object()}):
        with pytest.raises(gw.GraphwrightError, match="JSON"):
            gw.save_state(tmp_path / "state", run.model, facts=facts)
    assert SavedState.read(tmp_path / "state").step == 1


# -- faults ------------------------------------------------------------------------------------------------------------
def test_a_failing_save_leaves_the_old_or_the_new_state(tmp_path):
    old, new = Run(), Run()
    new.steps(2)

    def save(run: Run):
        return lambda folder: gw.save_state(folder / "state", **run.parts())

    survived = check_atomic(tmp_path, before=save(old), save=save(new), kinds=("EIO", "ENOSPC", "short"), seeds=1)
    assert survived.faults > 20


KILLED = """
import sys
sys.path.insert(0, sys.argv[2])
import graphwright as gw
from test_saved_trainings import Run
run, step = Run(), 0
while True:
    run.steps(1)
    step += 1
    gw.save_state(sys.argv[1], **run.parts(), step=step)
    print(step, flush=True)
"""


def test_a_killed_process_leaves_a_whole_state(tmp_path):
    source = [str(Path(__file__).parent), str(Path(__file__).parents[1]), str(Path(gw.__file__).parents[1])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(source), "OMP_NUM_THREADS": "1"}
    for trial in range(deep(4, 1)):
        directory = tmp_path / "state"
        command = [sys.executable, "-c", KILLED, str(directory), source[0]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.Random(trial).uniform(0.0, 0.15))
            process.send_signal(signal.SIGKILL)
            printed = [int(line) for line in process.stdout.read().split()]
        reference = Run()
        reference.steps(SavedState.read(directory).step)
        expected = reference.bits()
        run = Run(seed=5)
        run.loader.seed = 0
        step = gw.load_state(directory, **run.parts())
        assert step >= max(printed, default=1)
        assert run.bits() == expected


def small() -> tuple[nn.Module, AdamW]:
    gw.manual_seed(0)
    model = nn.Linear(2, 2)
    return model, AdamW(model)


def contents(model: nn.Module, opt: AdamW) -> list[bytes]:
    return [v.data.tobytes() for v in (*model.variables().values(), *opt.variables().values())]


@pytest.mark.parametrize("name", ["train.json", "state.safetensors"])
def test_corrupted_bytes_give_a_typed_error_or_equal_data(tmp_path, name):
    model, opt = small()
    model(Tensor(from_numpy(np.ones((1, 2), "f4")))).sum().backward()
    opt.step()
    gw.save_state(tmp_path / "state", model, opt, step=7)
    good, path = contents(model, opt), tmp_path / "state" / name
    raw = path.read_bytes()
    damages = [raw[:n] for n in range(0, len(raw), deep(1, 3))]
    for i in range(0, len(raw), deep(1, 3)):
        damages += [raw[:i] + bytes([raw[i] ^ mask]) + raw[i + 1 :] for mask in (0x01, 0x80, 0xFF)]
    target = small()
    before = contents(*target)
    refused = 0
    for damaged in damages:
        path.write_bytes(damaged)
        try:
            step = gw.load_state(tmp_path / "state", *target)
        except CheckpointError:
            refused += 1
            assert contents(*target) == before
        else:
            assert (step, contents(*target)) == (7, good)
            for v, old in zip((*target[0].variables().values(), *target[1].variables().values()), before, strict=True):
                v.assign(Tensor(from_numpy(np.frombuffer(old, v.dtype.numpy).reshape(v.shape))))
    assert refused > 0.9 * len(damages)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": 3}, "schema"),
        ({"schema": 1}, "schema"),
        ({"schema": True}, "not describe a saved training"),
        ({"step": 8}, "checksum"),
        ({"checksum": None}, "checksum"),
        ({"more": 1}, "checksum"),
    ],
)
def test_a_changed_train_json_is_refused(tmp_path, change, words):
    model, opt = small()
    gw.save_state(tmp_path / "state", model, opt)
    path = tmp_path / "state/train.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(StateError, match=words):
        gw.load_state(tmp_path / "state", model, opt)
    path.write_text("[]")
    with pytest.raises(StateError, match="not describe a saved training"):
        gw.load_state(tmp_path / "state", model, opt)
