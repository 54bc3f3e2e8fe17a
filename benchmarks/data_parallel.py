"""A data-parallel step of the bundled model's shape on two processes of one thread each, beside torch's DDP on gloo.

Both take the same batches from the same weights, alternating in the same two processes. Waiting is the time in which a
rank can only wait for gradients: at the waits of the plan here, and from the last bucket to the end of the backward
there, in steps of their own, as noting it takes a hook.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness import Figure, interval

Step = Callable[[np.ndarray, np.ndarray], float]
BATCH, WINDOW, ROUNDS, INNER = 16, 256, 12, 2
LR, BETAS, DECAY, CLIP = 1e-4, (0.9, 0.95), 0.1, 1.0
NAMES = ("graphwright", "torch DDP", "graphwright, nothing sent", "torch, nothing sent", "A/A")


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, "-m", "benchmarks.data_parallel", str(out)], check=True, env=environment)
        found = json.loads(out.read_text())
    figure = Figure(
        "Data parallel: 2 processes of 1 thread, the bundled model's shape",
        f"f32, {BATCH} x {WINDOW} bytes in all, forward, backward, clipping, AdamW; gloo; alternating in the same run",
    )
    for name in NAMES:
        low, high = interval(found["seconds"][name])
        note = f"waits {100 * found['waiting'][name]:.1f} % of a step" if name in found["waiting"] else ""
        figure.add(name, 1e3 * median(found["seconds"][name]), "ms", note, 1e3 * low, 1e3 * high)
    times = {name: median(found["seconds"][name]) for name in NAMES}
    figure.notes.append(f"{times['torch DDP'] / times['graphwright']:.2f}x torch DDP's steps per second")
    figure.notes.append(f"losses differ by at most {found['loss']:.1e} on the first batches")
    return [figure]


def _on_rank(out: Path) -> None:
    """What each of the two processes does: losses on the same batches, then steps in turn."""
    from graphwright import distributed
    from graphwright.array.world import world

    distributed.setup(120.0, threads=1)
    group = world().group
    assert group is not None
    calls, noted = _steps(distributed.rank(), distributed.ranks())
    losses = {name: [calls[name](*b) for b in _batches(4)] for name in NAMES[:4]}
    mean = lambda values: distributed.all_reduce(np.asarray(values)).numpy() / distributed.ranks()  # noqa: E731
    apart = float(np.abs(mean(losses["torch DDP"]) - losses["graphwright"]).max())
    seconds: dict[str, list[float]] = {name: [] for name in NAMES}
    for r in range(ROUNDS):
        fed = _batches(INNER, 1 + r)
        for name in NAMES if r % 2 else reversed(NAMES):
            distributed.barrier()
            began = perf_counter()
            for b in fed:
                calls[name](*b)
            seconds[name].append((perf_counter() - began) / INNER)
    waits: dict[str, list[float]] = {"graphwright": [], "torch DDP": []}
    for b in _batches(ROUNDS * INNER, 1 + ROUNDS):
        distributed.barrier()
        before, began = group.waited, perf_counter()
        calls["graphwright"](*b)
        waits["graphwright"].append((group.waited - before) / (perf_counter() - began))
        distributed.barrier()
        waits["torch DDP"].append(noted(*b))
    share = [median(values) for values in waits.values()]
    share = mean(share).tolist()
    if distributed.is_main():
        waiting = dict(zip(NAMES, share, strict=False))
        out.write_text(json.dumps({"seconds": seconds, "waiting": waiting, "loss": apart}))
    distributed.close()


def _batches(count: int, seed: int = 0) -> list[tuple[np.ndarray, np.ndarray]]:
    """Inputs and targets of this rank: its rows of batches that are the same on all ranks."""
    from graphwright import distributed
    from graphwright.models.bundled import pydoc_split

    text, draw = np.frombuffer(pydoc_split()[0].encode(), np.uint8), np.random.default_rng(seed)
    made = []
    for _ in range(count):
        starts = draw.integers(0, len(text) - WINDOW - 1, BATCH)[distributed.rank() :: distributed.ranks(), None]
        rows = text[starts + np.arange(WINDOW + 1)].astype(np.int64)
        made.append((np.ascontiguousarray(rows[:, :-1]), np.ascontiguousarray(rows[:, 1:])))
    return made


def _steps(rank: int, ranks: int) -> tuple[dict[str, Step], Step]:
    """Return the steps to time by name, and a step of DDP that returns the share of its time that it waits."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    from benchmarks.training_step import torch_twin
    from graphwright import distributed, nn, optim
    from graphwright.models.bundled import CONFIG
    from graphwright.models.open import config_from, create

    positions = np.tile(np.arange(WINDOW), (BATCH // ranks, 1))

    def ours(share: bool) -> Step:
        model = create(config_from(CONFIG), seed=0)
        optimizer = optim.AdamW(model, LR, BETAS, 1e-8, DECAY, decay_matrices_only=True)
        inputs: dict[str, Any] = dict.fromkeys(("ids", "positions", "targets"), positions)
        loss = lambda logits, targets: nn.functional.cross_entropy(logits, targets, dim=-1)  # noqa: E731
        step = optim.compile_step(model.program, loss, optimizer, inputs, clip=CLIP)
        if share:
            distributed.data_parallel(step)
        return lambda ids, targets: step(ids=ids, positions=positions, targets=targets).item()

    def theirs(share: bool, note: bool = False) -> Step:
        twin: Any = torch_twin(create(config_from(CONFIG), seed=0), "sdpa")
        model: Any = DistributedDataParallel(twin, gradient_as_bucket_view=True) if share else twin
        groups = [
            {"params": [p for p in twin.parameters() if p.dim() > 1], "weight_decay": DECAY},
            {"params": [p for p in twin.parameters() if p.dim() < 2], "weight_decay": 0.0},
        ]
        adamw = torch.optim.AdamW(groups, lr=LR, betas=BETAS, fused=True)
        last = [0.0]

        def hook(state, bucket):  # without annotations, which DDP compares with its own
            last[0] = perf_counter()
            sent = bucket.buffer().div_(ranks)
            work: Any = torch.distributed.all_reduce(sent, async_op=True)
            return work.get_future().then(lambda f: f.value()[0])

        if note:
            model.register_comm_hook(None, hook)

        def step(ids: np.ndarray, targets: np.ndarray) -> float:
            began = perf_counter()
            adamw.zero_grad()
            logits = model(torch.from_numpy(ids), use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), torch.from_numpy(targets).flatten())
            loss.backward()
            waited = perf_counter() - last[0]
            torch.nn.utils.clip_grad_norm_(twin.parameters(), CLIP)
            adamw.step()
            return waited / (perf_counter() - began) if note else loss.item()

        return step

    mine = ours(True)
    steps = (mine, theirs(True), ours(False), theirs(False), mine)
    return dict(zip(NAMES, steps, strict=True)), theirs(True, note=True)


if __name__ == "__main__":
    _on_rank(Path(sys.argv[1]))
