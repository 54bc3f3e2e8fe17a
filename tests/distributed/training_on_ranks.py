"""What a rank does in `test_data_parallel.py`; each function returns JSON."""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import signal
import sys
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from threading import Timer
from time import monotonic, sleep
from typing import Any

import collectives_on_ranks
import numpy as np

import graphwright as gw
from graphwright import distributed as d
from graphwright.models.bundled import bundled
from run_ranks import refusal
from seeds import DEEP

SIZES = (12, 24, 24, 4)


def network() -> Any:
    """A small network, of equal weights in every process."""
    rng = np.random.default_rng(0)
    b = gw.Builder("net")
    x = b.input("x", ("B", SIZES[0]))
    for i, (n, m) in enumerate(pairwise(SIZES)):
        w = b.param(f"w{i}", (rng.normal(size=(m, n)) / np.sqrt(n)).astype("float32"))
        bias = b.param(f"b{i}", np.zeros(m, "float32"))
        x = b.op("linear", x, w, bias)
        if i < len(SIZES) - 2:
            x = b.op("tanh", x)
    b.output(x, "y")
    return b.build()


def batches(steps: int, size: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Batches for all ranks together."""
    rng = np.random.default_rng(1)
    teacher = rng.normal(size=(SIZES[0], SIZES[-1]))
    made = []
    for _ in range(steps):
        x = rng.normal(size=(size, SIZES[0])).astype("float32")
        made.append((x, np.tanh(x @ teacher).astype("float32")))
    return made


def loss_of(y: Any, targets: Any) -> Any:
    return ((y - targets) ** 2).mean()


def compiled(
    size: int, optimizer: str = "AdamW", groups: Sequence[Sequence[str]] = (), **options: Any
) -> tuple[Any, Any]:
    p = network()
    given = [{"params": [p.weights[key] for key in keys]} for keys in groups]
    opt = getattr(gw.optim, optimizer)(given or p, 1e-2)
    inputs = {"x": np.zeros((size, SIZES[0]), "f4"), "targets": np.zeros((size, SIZES[-1]), "f4")}
    return p, gw.compile_step(p, loss_of, opt, inputs, **options)


def weights(p: Any) -> list[float]:
    return np.concatenate([v.numpy().ravel() for v in p.variables().values()]).tolist()


def trained(step: Any, given: list[tuple[np.ndarray, np.ndarray]], rank: int = 0, ranks: int = 1) -> list[float]:
    """Train on this rank's part of each batch; return the losses."""
    losses = []
    for x, t in given:
        n = len(x) // ranks
        part = slice(rank * n, (rank + 1) * n)
        losses.append(step(x=x[part], targets=t[part]).item())
    return losses


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clip": {"clip": 0.05},
    "accumulate": {"accumulate": 4, "clip": 0.5},
    "aten": {"deterministic": True},
    "groups": {"groups": [["w0", "b1"], ["w2", "b0"], ["w1", "b2"]], "clip": 0.05},
    "one weight": {"groups": [["w1"]], "clip": 0.05},  # so that one rank owns nothing
}


def single(name: str, steps: int) -> dict[str, Any]:
    p, step = compiled(12, **OPTIONS[name])
    losses = trained(step, batches(steps, 12))
    return {"losses": losses, "weights": weights(p)}


def parallel(name: str, steps: int, **options: Any) -> dict[str, Any]:
    p, step = compiled(12 // d.ranks(), **OPTIONS[name])
    if d.rank():
        for v in p.variables().values():  # those of rank 0 count
            v.assign(gw.zeros(*v.shape))
    d.data_parallel(step, bucket_mb=0.001, **options)
    losses = trained(step, batches(steps, 12), d.rank(), d.ranks())
    order = [i.op for i in step.plan.instrs]
    moments = sum(v.numel() for _, _, state in step.optimizer.states() for v in state.moments.values())
    return {"losses": losses, "weights": weights(p), "order": order, "moments": moments}


# -- edits, saved trainings, errors ------------------------------------------------------------------------------------
def _edit(p: Any, step: int) -> None:
    """Change the program between steps: cut units, freeze weights for a step, insert a layer, undo."""
    if step == 3:
        with p.edit("cut units") as e:
            e.cut_units(p.axes().of("w1", 0)[0].units(range(1, 19)))
    if step in (4, 5):  # w1 is now smaller than w0, so that new owners would be others
        with p.edit("freeze or thaw") as e:
            for key in ("w0", "w1"):
                e.set_attr(p.node(key), trainable=step == 5)
    if step == 6:
        with p.edit("insert") as e:
            (edge,) = [x for x in p.out_edges(p.node("tanh")) if p.op(p.graph.target(x)) == "linear"]
            e.insert(edge, "gelu")
    if step == 9:
        p.undo()


def edited(ranks: int, rank: int, **options: Any) -> dict[str, Any]:
    p, step = compiled(12 // ranks, clip=0.5)
    if ranks > 1:
        d.data_parallel(step, bucket_mb=0.001, **options)
    losses = []
    for i, given in enumerate(batches(12, 12)):
        _edit(p, i)
        losses += trained(step, [given], rank, ranks)
    return {"losses": losses, "weights": weights(p)}


def resumed(folder: str, first: int, last: int, optimizer: str, load: bool) -> dict[str, Any]:
    """Train from step `first` to `last` with divided states, loading and saving the training."""
    p, step = compiled(12 // d.ranks(), optimizer, clip=0.5)
    d.data_parallel(step, bucket_mb=0.001, shard_optimizer=True)
    if load:
        assert gw.load_state(folder, p, step.optimizer, compiled=step) == first
    losses = trained(step, batches(last, 12)[first:], d.rank(), d.ranks())
    gw.save_state(folder, p, step.optimizer, step=last, compiled=step)
    assert json.loads(Path(folder, "train.json").read_text())["step"] == last  # it is there, on all ranks
    return {"losses": losses, "weights": weights(p)}


def different() -> dict[str, Any]:
    """Programs of other structure, and of other collectives."""
    p, step = compiled(6)
    found = {}
    if d.rank() == 1:
        with p.edit("another program") as e:
            e.rename(p.node("tanh"), "other")
    try:
        d.data_parallel(step)
    except d.ProgramsDiffer as error:
        found["structure"] = [len(set(error.hashes)), "rank 1" in str(error)]
    p, step = compiled(6, clip=0.5 if d.rank() else None)
    d.data_parallel(step, bucket_mb=1.0 if d.rank() else 0.001)
    before = weights(p)
    try:
        trained(step, batches(1, 6))
    except d.CollectivesDiffer as error:
        found["collectives"] = [len({*error.calls.values()}), weights(p) == before]
    p, step = compiled(6)
    d.data_parallel(step)
    text = refusal(lambda: gw.save_state("/nowhere/state", p, step.optimizer, compiled=step))
    found["not saved"] = "/nowhere" in text
    return found


# -- ranks that are lost -----------------------------------------------------------------------------------------------
def killed(folder: str, at: int, shard: bool) -> dict[str, Any]:
    """Train and save every second step; rank 1 is killed at some moment of step `at`. Return what the others raise."""
    p, step = compiled(12 // d.ranks(), clip=0.5)
    d.data_parallel(step, bucket_mb=0.001, shard_optimizer=shard)
    given = batches(12, 12)
    began = 0.0
    try:
        for i, batch in enumerate(given):
            if i == at:
                began = monotonic()
                if d.rank() == 1:
                    Timer(
                        float(np.random.default_rng().random()) * 2e-3, os.kill, (os.getpid(), signal.SIGKILL)
                    ).start()
            trained(step, [batch], d.rank(), d.ranks())
            if i % 2 == 1:
                gw.save_state(folder, p, step.optimizer, step=i + 1, compiled=step)
            if i == at and d.rank() == 1:
                sleep(5)
    except d.RankLost as error:
        first = [error.collective, sorted(error.waiting), list(error.missing), monotonic() - began]
        try:
            d.barrier()
        except d.RankLost as again:
            return {"error": first, "again": again is error, "text": str(error)}
    return {}


def continued(folder: str, shard: bool) -> dict[str, Any]:
    """Resume what `killed` saved, to its end."""
    p, step = compiled(12 // d.ranks(), clip=0.5)
    d.data_parallel(step, bucket_mb=0.001, shard_optimizer=shard)
    first = gw.load_state(folder, p, step.optimizer, compiled=step) if folder else 0
    losses = trained(step, batches(12, 12)[first:], d.rank(), d.ranks())
    return {"first": first, "losses": losses, "weights": weights(p)}


def not_together() -> dict[str, Any]:
    """Rank 0 waits for a collective that rank 1 does not reach within the timeout."""
    began = monotonic()
    try:
        if d.rank() == 0:
            d.all_reduce(gw.ones(3))
        else:
            sleep(5)
            d.barrier()
    except d.RankLost as error:
        waiting = {str(r): at.partition(" ")[0] for r, at in error.waiting.items()}
        return {"waiting": waiting, "missing": list(error.missing), "seconds": monotonic() - began}
    return {}


def failed_apart() -> list[str]:
    """Rank 0 catches an error of a run while rank 1 waits in a collective of this run."""
    p, found = collectives_on_ranks.summed_rows(), []
    for ids in (d.rank() or 9, 1):
        try:
            p.compile(ids=(1,))(ids=np.array([ids]))
        except gw.GraphwrightError as error:
            found.append(type(error).__name__)
    return found


KINDS: dict[str, dict[str, Any]] = {"plain": {}, "sharded": {"shard_optimizer": True}}
NAMES = {
    "plain": ["plain", "clip", "accumulate", "aten"],
    "sharded": ["plain", "clip", "accumulate", "groups", "one weight"],
}
OPTIMIZERS = ("AdamW",)


def command(folder: str, *more: str) -> dict[str, Any]:
    """`graphwright train` as torchrun starts it on each rank; return what this rank printed, and what is written."""
    from graphwright.cli import app

    printed = io.StringIO()
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 256,
        "max_position_embeddings": 64, "tie_word_embeddings": True, "rms_norm_eps": 1e-5, "hidden_act": "silu",
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
    }  # fmt: skip
    home = Path(folder, f"model{d.rank()}")
    home.mkdir(parents=True)
    (home / "config.json").write_text(json.dumps(config))
    (home / "tokenizer.json").write_bytes((bundled() / "tokenizer.json").read_bytes())
    (home / "text.txt").write_text("To be or not to be, that is the question. " * 20)
    options = ["--steps", "4", "--batch", "4", "--window", "16", "--warmup", "1", "--save-every", "2", "--json"]
    options += ["--out", f"{folder}/out"] if d.ranks() > 1 else []
    options += more
    given = [str(home / "config.json"), "--text", str(home / "text.txt"), "--state", f"{folder}/state", *options]
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        app(["train", *given], standalone_mode=False)
    d.barrier()
    text = printed.getvalue()
    written = [Path(folder, name).is_file() for name in ("state/train.json", "out/config.json")]
    return {"printed": json.loads(text) if text else None, "saved": written}


def example(name: str, folder: str) -> str:
    """Run a file of `examples/`; return what this rank printed."""
    printed = io.StringIO()
    path = Path(__file__).parents[2] / "examples" / f"{name}.py"
    sys.argv = [str(path), "--quick", "--out", f"{folder}/{name}"]
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(path), run_name="__main__")
    return printed.getvalue()


def joined(members: Sequence[int], port: int, timeout: float) -> bool:
    """Join a run of some of the processes, by their numbers; return whether this one is among them."""
    number = int(os.environ["NUMBER"])
    if number not in members:
        return False
    rank, ranks = str(members.index(number)), str(len(members))
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ["MASTER_PORT"] = str(port)
    d.setup(timeout)
    return True


def on_all(folder: str, at: int, ports: list[int]) -> dict[str, Any]:
    """What each of four processes does in turn as a rank of two, of two others, alone, and as a rank of three.

    The last one is killed in the first run, in step `at`.
    """
    os.environ["NUMBER"] = os.environ["RANK"]
    found: dict[str, Any] = {}
    if joined((0, 3), ports[0], 60.0):
        found["killed"] = killed(f"{folder}/killed", at, shard=False)
        d.close()
    if joined((0, 1), ports[1], 60.0):
        found["two"] = on_two(folder)
        d.close()
    begun = Path(folder, "three ranks begin")
    if os.environ["NUMBER"] == "0":
        begun.touch()
        found["one"] = {o: resumed(f"{folder}/{o}", 6, 9, o, load=True) for o in OPTIMIZERS}
    while os.environ["NUMBER"] == "2" and not begun.exists():
        sleep(0.05)  # a rank that is early asks for the first one less and less often
    if joined((0, 1, 2), ports[2], 90.0):
        found["three"] = on_three(folder)
        d.close()
    if joined((0, 1), ports[3], 4.0):
        found["failed apart"] = failed_apart()  # the group cannot be used after it
        d.close()
    if joined((0, 1), ports[4], 4.5):
        found["not together"] = not_together()  # nor this one
    return found


def on_two(folder: str) -> dict[str, Any]:
    """All that two ranks do: collectives, trainings, edits, what a killed training saved, the start of another."""
    found: dict[str, Any] = {"collectives": collectives_on_ranks.everything()}
    for kind, options in KINDS.items():
        for name in NAMES[kind]:
            found[f"{kind} {name}"] = parallel(name, 20, **options)
        found[f"{kind} edited"] = edited(d.ranks(), d.rank(), **options)
    found["continued"] = continued(f"{folder}/killed", shard=False)
    found["uninterrupted"] = continued("", shard=False)
    for optimizer in OPTIMIZERS:
        found[optimizer] = resumed(f"{folder}/{optimizer}", 0, 6, optimizer, load=False)
    found["example"] = example("data_parallel", folder)
    if DEEP:
        found["command"] = command(f"{folder}/command")
    found["different"] = different()
    found["divided"] = example("divided_model", folder)  # afterwards the ranks share a model
    found["command_divided"] = command(f"{folder}/divided-command", "--tensor-parallel", "2")
    return found


def on_three(folder: str) -> dict[str, Any]:
    """All that three ranks do: collectives, and the end of saved trainings."""
    found: dict[str, Any] = {"collectives": collectives_on_ranks.everything()}
    for optimizer in OPTIMIZERS:
        found[optimizer] = resumed(f"{folder}/{optimizer}", 9, 12, optimizer, load=True)
    return found
