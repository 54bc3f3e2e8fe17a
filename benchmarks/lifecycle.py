"""What a commit of a life costs: bytes and time by the number of changed experts; opening; a commit every step."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save_file

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import experts as ex
from graphwright import lifecycle as lf
from graphwright import nn, optim
from graphwright.lifecycle import compaction
from graphwright.optim import save_state
from graphwright.testing.shift import Net, Stream, objective

EXPERTS, WIDTH, DENSE = 64, (256, 96), (256, 320)
PARTS = ("commits", "opening", "steps", "experts")


class Experts:
    """An eager step: Adam updates a dense matrix (5 % of all bytes) and the experts that are `touched`."""

    def __init__(self, dense: bool = True) -> None:
        rng = np.random.default_rng(0)
        b = gw.Builder("experts")
        x, y = b.input("x", (1, WIDTH[1])), b.input("z", (1, DENSE[1]))
        total = b.linear(y, b.param("dense", rng.normal(size=DENSE).astype("f4")))
        for i in range(EXPERTS):
            total = b.add(total, b.linear(x, b.param(f"experts.{i}", rng.normal(size=WIDTH).astype("f4"))))
        b.output(total, "y")
        self.source, self.inputs, self.touched, self.dense = b.build(), {"x": None}, range(EXPERTS), dense
        self.optimizer, self.settings = optim.Adam(self.source, 1e-3), SimpleNamespace(scaler=None)
        self.grads = {key: gw.tensor(rng.normal(size=v.shape).astype("f4")) for key, v in self.source.weights.items()}

    def variables(self) -> dict[str, Any]:
        return {}

    def options(self) -> dict[str, Any]:
        return {}

    def __call__(self, feeds: Any = None) -> Any:
        keys = {*(["dense"] if self.dense else []), *(f"experts.{i}" for i in self.touched)}
        for key, v in self.source.weights.items():
            v.grad = self.grads[key] if key in keys else None
        self.optimizer.step()
        return gw.tensor(1.0)

    def arrays(self) -> dict[str, np.ndarray]:
        found = {**self.source.variables(), **self.optimizer.variables()}
        return {name: np.atleast_1d(v.data.to_numpy()) for name, v in found.items()}


def commits() -> Figure:
    figure = Figure(
        f"A commit when k of {EXPERTS} experts changed",
        f"f32, experts {WIDTH[0]} x {WIDTH[1]} and a dense matrix of 5 % of the bytes, Adam; with fsync unless noted",
    )
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder, run = Path(name), Experts()
        run()
        lives = {}
        for durable in ("power", "process"):
            step = Experts()
            life = lf.birth(step.source, folder / durable, name=durable, durable=durable)
            lives[durable] = (life, life.segment(step), step)
        life, segment, step = lives["power"]
        segment.step({"x": 0})
        full = life.store.live_bytes
        calls: dict[str, Callable[[], Any]] = {}
        for k in (1, 4, 16, 64):
            step.touched = range(k)
            segment.step({"x": 0})
            figure.add(
                f"k = {k}: bytes of the commit", life.store.last.nbytes / full, "x all", f"{life.store.last.nbytes:,} B"
            )
        for k in (1, 4, 16, 64):
            calls[f"k = {k}"] = lambda k=k: _step(lives["power"], k)
        calls["k = 4, no fsync"] = lambda: _step(lives["process"], 4)
        calls["k = 4, step without a commit"] = lambda: (setattr(run, "touched", range(4)), run())
        tensors = {n: torch.from_numpy(a) for n, a in run.arrays().items()}
        calls["torch.save, all, no fsync"] = lambda: torch.save(tensors, folder / "all.pt")
        calls["safetensors, all, no fsync"] = lambda: save_file(run.arrays(), folder / "all.safetensors")
        calls["save_state, all"] = lambda: save_state(folder / "state", run.source, run.optimizer)
        add_rounds(figure, rounds(calls, n=15))
    figure.notes.append("each row of `k` includes the update of k experts, which `step without a commit` gives alone")
    return figure


def _step(life: tuple[lf.Life, lf.Segment, Experts], k: int) -> None:
    life[2].touched = range(k)
    life[1].step({"x": 0})


def opening() -> Figure:
    figure = Figure(
        "Opening a life of many commits, and its space",
        f"4 of {EXPERTS} experts change in each commit, without fsync; opening reads headers and checks hashes",
    )
    before = compaction.FILES, compaction.SLACK
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        try:
            for count, compacts in ((500, False), (500, True), (1000, True)):
                if not compacts:
                    compaction.FILES, compaction.SLACK = 10**9, 10**15
                folder, step = Path(name) / "life", Experts()
                life = lf.birth(step.source, folder, name="many", durable="process")
                segment, rng = life.segment(step), np.random.default_rng(0)
                for _ in range(count):
                    step.touched = rng.choice(EXPERTS, 4, replace=False).tolist()
                    segment.step({"x": 0})
                who = f"{count} commits" + ("" if compacts else ", never compacted")
                ratio = life.store.nbytes / life.store.live_bytes
                figure.add(f"{who}: space", ratio, "x live", f"{len(life.store.commits)} files")
                life.close()
                compaction.FILES, compaction.SLACK = before
                taken = rounds({f"{who}: open": lambda: lf.open(folder, readonly=True)}, n=7)
                add_rounds(figure, taken)
                shutil.rmtree(folder)
        finally:
            compaction.FILES, compaction.SLACK = before
    return figure


def steps() -> Figure:
    figure = Figure(
        "Training with a commit after every step",
        "MLP 256-512-512-10 on batches of 512, AdamW, compiled step; ms a step, all parameters change",
    )
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(512, 256)).astype("f4"), rng.integers(0, 10, 512)
    feeds = {"x": x, "y": y}

    def made() -> Any:
        gw.manual_seed(0)
        net = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10))
        p = gw.trace(net, gw.tensor(x))
        return gw.compile_step(p, lambda out, y: nn.functional.cross_entropy(out, y), optim.AdamW(p, 1e-4), feeds)

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        folder, calls = Path(name), {}
        plain, stated = made(), made()
        calls["no commit"] = lambda: plain(feeds).item()
        lives = []
        for who, options in {
            "life": {}, "life, no fsync": {"durable": "process"}, "life, asynchronous": {"asynchronous": True},
            "life, asynchronous, no fsync": {"asynchronous": True, "durable": "process"},
        }.items():  # fmt: skip
            train = made()
            lives.append(lf.birth(train.source, folder / who, name=who, **options))
            segment = lives[-1].segment(train)
            calls[who] = lambda segment=segment: segment.step(feeds)
        calls["save_state"] = lambda: (stated(feeds).item(), save_state(folder / "s", stated.source, stated.optimizer))
        add_rounds(figure, rounds(calls, n=15, inner=4))
        for life in lives:
            life.close()
    return figure


class FewClusters(Stream):
    """Batches of two of sixteen tight clusters, so that few experts have tokens."""

    def draw(self) -> dict[str, np.ndarray]:
        which = np.repeat(self.rng.integers(0, self.clusters, 2), self.batch // 2)
        offset = self.rng.normal(0, 0.1, (self.batch, self.dim))
        targets = np.einsum("nkd,nd->nk", self.world.maps[which], offset).argmax(axis=1)
        return {"x": (self.world.centres[which] + offset).astype(np.float32), "targets": targets}


def experts() -> Figure:
    figure = Figure(
        f"Training {EXPERTS} experts with commits by a thread",
        "threshold router, experts 64-128-64, tokens for about 10 of them in a batch of 512, lazy Adam, compiled step",
    )

    def made() -> tuple[Any, Stream]:
        gw.manual_seed(0)
        stream = FewClusters(0, 512, 64, 16)
        x = Stream.draw(stream)["x"]
        p = gw.trace(Net(64, EXPERTS, 128), x)
        ex.calibrate(p, {"x": x}, k0=2)
        optimizer, also = optim.Adam(p, lr=1e-3, lazy=True), [ex.sdl(2.0, 0.01, 0.01), ex.Regeneration().signals()]
        return gw.compile_step(p, objective, optimizer, stream.draw(), also=also), stream

    with tempfile.TemporaryDirectory(dir=Path.cwd()) as name:
        plain, stream = made()
        calls: dict[str, Callable[[], Any]] = {"no commit": lambda: plain(stream.draw()).item()}
        lives, lags = {}, {}
        for who, options in {"asynchronous": {}, "asynchronous, no fsync": {"durable": "process"}}.items():
            train, source = made()
            life = lives[who] = lf.birth(train.source, Path(name) / who, name=who, asynchronous=True, **options)
            segment, lag = life.segment(train), lags.setdefault(who, [])
            calls[who] = lambda segment=segment, source=source, lag=lag, life=life: (
                segment.step(source.draw()),
                lag.append(life.lag),
            )
        add_rounds(figure, rounds(calls, n=9, inner=300))
        for who, life in lives.items():
            figure.add(f"{who}: steps not on disk, mean", float(np.mean(lags[who])), "steps")
            life.close()
    return figure
