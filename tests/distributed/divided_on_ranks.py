"""Checks of divided programs, run by each rank; see `test_tensor_parallel.py`."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

import graphwright as gw
from graphwright import distributed
from graphwright.array import empty, from_numpy
from graphwright.array.world import world
from graphwright.distributed import saving
from graphwright.errors import GraphwrightError
from graphwright.program.axes.divide import divided_weights
from run_ranks import refusal


def feeds(p: gw.Program, batch: int = 2, length: int = 9) -> dict[str, np.ndarray]:
    """Return token ids and positions."""
    ids = np.random.default_rng(3).integers(0, 200, (batch, length))
    return {"ids": ids, "positions": np.broadcast_to(np.arange(length), ids.shape).copy()}


def bundled(selection: str = "layers.*") -> dict[str, Any]:
    """Divide the bundled model; return facts of this rank, distances of logits, and hashes before and after."""
    model = gw.open("bundled")
    p = model.program
    given, before = feeds(p), p.hash()
    wanted = p.run(given)["logits"].to_numpy()
    sizes = {key: v.shape for key, v in p.weights.items()}
    values = {key: v.data.to_numpy().copy() for key, v in p.weights.items()}
    with p.edit("divide") as e:
        division = distributed.tensor_parallel(e, p.select(selection))
    own = {key: v.shape for key, v in p.weights.items()}
    found = p.run(given)["logits"].to_numpy()
    planned = p.compile(ids=given["ids"].shape, positions=given["positions"].shape)(given)["logits"].to_numpy()
    divided = p.hash()
    drawn = model.generate("The following", 6, temperature=1.0).text
    other = "the following" if distributed.rank() else "The following"
    differ = [refusal(lambda: model.generate(text, 2)) for text in (other, other[3 * distributed.rank() :])]  # noqa: B023
    p.undo()
    undone, again = p.hash(), p.run(given)["logits"].to_numpy()
    p.redo()
    redone = p.hash()
    with distributed.gathered(p):
        inside = p.hash()
    for key, v in p.weights.items():  # as training would
        if own[key] != sizes[key]:
            v.data = from_numpy(2 * v.data.to_numpy())
    p.undo()
    doubled = [key for key, v in p.weights.items() if np.array_equal(v.data.to_numpy(), 2 * values[key])]
    return {
        "axes": {name: list(units) for name, units in division.axes.items()}, "sums": list(division.sums),
        "far": float(np.abs(found - wanted).max()), "planned": float(np.abs(planned - wanted).max()),
        "same": bool(np.array_equal(again, wanted)), "hashes": [before, undone, inside],
        "divided": [divided, redone], "share": sum(map(np.prod, own.values())) / sum(map(np.prod, sizes.values())),
        "doubled": sorted(doubled) == sorted(key for key in own if own[key] != sizes[key]),
        "journal": p.journal[-1].edits[-1], "drawn": drawn, "differ": differ,
    }  # fmt: skip


def outputs(p: gw.Program, given: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a program node by node."""
    run = p.run(given)
    return {name: run[name].to_numpy() for name in p.output_names()}


def close_to(p: gw.Program, given: dict[str, np.ndarray], selection: str = "*") -> dict[str, Any]:
    """Divide a program; return the axes, how far its outputs and those after undo are from the whole program's."""
    wanted = outputs(p, given)
    before = p.hash()
    with p.edit("divide") as e:
        division = distributed.tensor_parallel(e, p.select(selection))
    p.validate().check(p.name)
    far = max(float(np.abs(v - wanted[k]).max()) for k, v in outputs(p, given).items())
    scale = max(float(np.abs(v).max()) for v in wanted.values())
    p.undo()
    axes = {n: list(u) for n, u in division.axes.items()}
    return {"axes": axes, "far": far / scale, "same": p.hash() == before, "text": str(division)}


def modules() -> dict[str, Any]:
    """Divide programs of other structure: biases, fused projections, channels of convolutions, a chain of products."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    found = {}
    chain = nn.Sequential(nn.Linear(6, 11), nn.GELU(), nn.Linear(11, 7), nn.Tanh(), nn.Linear(7, 5))
    convs = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 4, 1)
    )
    groups = nn.Sequential(
        nn.Conv2d(3, 12, 3),
        nn.GroupNorm(3, 12),
        nn.ReLU(),
        nn.Conv2d(12, 15, 3, groups=3),
        nn.ReLU(),
        nn.Conv2d(15, 4, 1),
    )
    layer = nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, dropout=0.0).eval()
    for name, module, example in (
        ("chain", chain, torch.randn(3, 6)),
        ("convs", convs, torch.randn(2, 3, 6, 6)),
        ("groups", groups, torch.randn(2, 3, 6, 6)),
        ("slopes", attention_with_slopes(), torch.randn(2, 5, 12)),
        ("layer", layer, torch.randn(2, 5, 24)),
    ):
        p = gw.from_torch(module.eval(), (example,))
        found[name] = close_to(p, {p.input_names()[0]: example.numpy()})
    b, rng = gw.Builder("grouped"), np.random.default_rng(0)
    weight = lambda key, *shape: b.param(key, rng.normal(size=shape).astype("f4"))  # noqa: E731
    ends = b.input("offsets", (4,), "int64")
    inner = b.op("gelu", b.op("grouped_matmul", b.input("x", ("N", 6)), weight("a", 3, 6, 10), ends))
    rows = b.add(b.op("grouped_matmul", inner, weight("c", 3, 10, 7), ends), weight("bias", 7))
    b.output(rows, "y")
    given = {"x": rng.normal(size=(8, 6)).astype("f4"), "offsets": np.array([0, 3, 3, 8])}
    found["grouped"] = close_to(b.build(), given)
    return found


def attention_with_slopes() -> Any:
    """Return two layers of attention written as products, with a slope for each of their 4 heads (ALiBi)."""
    import torch
    from torch import nn

    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.slopes = nn.Buffer(0.5 ** torch.arange(1.0, 5.0)[:, None, None])
            self.qkv = nn.ModuleList(nn.Linear(12, 3 * 4 * 3) for _ in range(2))
            self.out = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for qkv, out in zip(self.qkv, self.out, strict=True):
                q, k, v = qkv(x).unflatten(-1, (4, 3, 3)).permute(3, 0, 2, 1, 4)
                scores = q @ k.mT + self.slopes * torch.arange(x.shape[1])
                x = x + out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
            return x

    return Layers()


def pruned() -> dict[str, Any]:
    """Divide a model of which every layer has other numbers of heads and neurons."""
    p = gw.open("bundled").program
    with p.edit("cut") as e:
        axes = p.axes()
        for i in range(4):
            e.cut_units(axes[f"layers.{i}.mlp.neurons"].units(list(range(0, 30 * i + 7))))
    return close_to(p, feeds(p), "layers.*")


def mixture() -> dict[str, Any]:
    """Divide a model with experts, one of which has too few neurons the second time: then they all stay whole."""
    found = close_to(p := with_experts(gw.open("bundled").program), feeds(p), "layers.*")
    few = with_experts(gw.open("bundled").program, cut=511)
    with few.edit("divide") as e:
        found["few"] = [*distributed.tensor_parallel(e, few.select("layers.*")).axes]
    return found


def mixing() -> dict[str, gw.Program]:
    """Return programs whose units cannot be divided: by a matrix from units to units, a weight of two axes, a norm."""
    rng, made = np.random.default_rng(0), {}
    for name, rows in (("pairs", 8), ("beside", 11), ("normed", 8)):
        b = gw.Builder(name)
        weight = lambda key, *shape, b=b: b.param(key, rng.normal(size=shape).astype("f4"))  # noqa: E731
        x = b.linear(b.input("x", ("B", 6)), weight("a", rows, 6))
        if name == "pairs":
            y = b.linear(b.add(x, b.linear(x, weight("w", 8, 8))), weight("c", 5, 8))
        elif name == "normed":
            y = b.linear(b.op("rms_norm", x, weight("scale", 8), name="norm"), weight("c", 5, 8))
        else:
            u, v = (b.op("slice", x, axis=1, start=start, size=size) for start, size in ((0, 8), (8, 3)))
            y = b.add(b.linear(u, weight("c", 5, 8)), b.linear(v, weight("d", 5, 3)))
        b.output(y, "y")
        made[name] = b.build()
    return made


def other_ranks_differ() -> dict[str, str]:
    """Return the errors of divisions and runs where the ranks have other weights, other structure, other arguments."""

    def of(seed: int) -> gw.Program:
        gw.manual_seed(seed)
        return gw.trace(gw.nn.Sequential(gw.nn.Linear(6, 12), gw.nn.ReLU(), gw.nn.Linear(12, 4)), np.ones((2, 6), "f4"))

    def divide(p: gw.Program, ranks: int | None = None) -> None:
        with p.edit("divide") as e:
            distributed.tensor_parallel(e, p.select("*"), ranks)

    rank, x = distributed.rank(), np.ones((2, 6), "f4")
    found = {"weights": refusal(lambda: divide(of(rank))), "arguments": refusal(lambda: divide(of(0), 1 + rank))}
    p = of(0)
    divide(p)
    planned = p.compile(x=(2, 6))
    assert np.isfinite(planned(x=x)["out"].to_numpy()).all()
    if rank == 1:
        with p.edit("on one rank") as e:
            e.insert(p.in_edges(p.output("out").node)[0], "tanh")
    found |= {"eager": refusal(lambda: p.run(x=x)), "planned": refusal(lambda: p.compile(x=(2, 6))(x=x))}
    found["adopted"] = refusal(lambda: planned(x=x))
    return found


def refused() -> dict[str, str]:
    """Return the errors of divisions that cannot be made."""
    found = {}
    for name, q in mixing().items():
        try:
            with q.edit("divide") as e:
                distributed.tensor_parallel(e, q.select("*"))
        except GraphwrightError as error:
            found[name] = f"{type(error).__name__}: {error}"
    model = gw.open("bundled")
    p = model.program
    calls = {"none": lambda e: distributed.tensor_parallel(e, p.select("layers.*"), ranks=0),
             "ranks": lambda e: distributed.tensor_parallel(e, p.select("layers.*"), ranks=5),
             "nothing": lambda e: distributed.tensor_parallel(e, p.select("embed"))}  # fmt: skip
    before, structure = p.hash(), p.structure_hash()
    for name, call in calls.items():
        try:
            with p.edit("divide") as e:
                call(e)
        except GraphwrightError as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["hash"] = str(p.hash() == before)
    found |= other_ranks_differ()
    with p.edit("divide") as e:
        distributed.tensor_parallel(e, p.select("layers.*"))
    inputs = feeds(p)

    def twice() -> None:
        with p.edit("again") as e:
            distributed.tensor_parallel(e, p.select("layers.*"))

    def trained(optimizer: Any, together: bool) -> None:
        step = gw.compile_step(p, Training.loss, optimizer, inputs)
        (distributed.data_parallel(step) if together else step)(inputs)

    matrices = [p.weights["model.layers.1.mlp.down_proj.weight"]]
    found["again"] = refusal(twice)
    found["alone"] = refusal(lambda: trained(gw.optim.SGD(p.parameters(), lr=0.1), together=False))
    found["matrices"] = refusal(lambda: trained(gw.optim.Muon(matrices), together=True))
    with TemporaryDirectory() as folder:
        found["export"] = refusal(lambda: model.export(f"{folder}/out", check="none"))
    with p.edit("more") as e:
        e.set_weight("model.norm.weight", lambda w: w * 1.0)
    length = len(p.journal)
    with distributed.gathered(p):
        found["gathered"] = str(p.structure_hash() == structure)
        try:
            p.undo()
        except GraphwrightError as error:
            found["inside"] = f"{type(error).__name__}: {error}"
    found["gathered"] += f", {len(p.journal) - length} entries"
    with p.edit("structure") as e:
        e.add("exp", p.output("logits"))
    with TemporaryDirectory() as folder:
        try:
            gw.save_state(f"{folder}/state", p)
        except GraphwrightError as error:
            found["later"] = f"{type(error).__name__}: {error}"
        found["written"] = str(os.listdir(folder))
    return found


def everything(folder: str) -> dict[str, Any]:
    """Return the facts of all checks; one start of the processes serves all."""
    return {"bundled": bundled(), "modules": modules(), "pruned": pruned(), "mixture": mixture(),
            "refused": refused(),
            "trained": trained(4, 0.5), "resumed": resumed(f"{folder}/state")}  # fmt: skip


def with_experts(p: gw.Program, cut: int = 7) -> gw.Program:
    """Return a program whose last MLP is now a mixture; one expert has fewer neurons."""
    gw.experts.upcycle(p, 3, 2, layers="layers.3.mlp", std=0.5)
    with p.edit("cut") as e:
        e.cut_units(p.axes()["layers.3.mlp.experts.1.neurons"].units(range(cut)))
    return p


class Training:
    """A training in float32 of the bundled model, its last MLP a mixture, divided among the ranks or whole."""

    def __init__(
        self, divide: bool, optimizer: str = "SGD", clip: float | None = None, ranks: int | None = None, batch: int = 2
    ) -> None:
        self.p, self.batch = with_experts(gw.open("bundled", dtype="float32").program), batch
        if divide:
            with self.p.edit("divide") as e:
                distributed.tensor_parallel(e, self.p.select("layers.*"), ranks)
        make = {"SGD": {"lr": 0.02, "momentum": 0.9}, "AdamW": {"lr": 1e-3}}[optimizer]
        self.optimizer = getattr(gw.optim, optimizer)(self.p.parameters(), **make)
        self.step = gw.compile_step(self.p, self.loss, self.optimizer, feeds(self.p, batch), clip=clip)
        if divide:
            distributed.data_parallel(self.step)

    @staticmethod
    def loss(logits: Any, ids: Any) -> Any:
        return gw.nn.functional.cross_entropy(logits[:, :-1], ids[:, 1:], dim=-1)

    def run(self, first: int, last: int, copy: int = 0, copies: int = 1) -> list[float]:
        """Train on the part of batches that a copy of the model has; return the losses."""
        given, losses = feeds(self.p, self.batch), []
        for n in range(first, last):
            ids = np.random.default_rng(n).integers(0, 200, (self.batch * copies, given["ids"].shape[1]))
            given["ids"] = ids[copy::copies]
            losses.append(self.step(given).item())
        return losses

    def save(self, folder: str) -> None:
        gw.save_state(folder, self.p, self.optimizer, compiled=self.step)

    def load(self, folder: str) -> None:
        gw.load_state(folder, self.p, self.optimizer, compiled=self.step)


def trained(steps: int, clip: float | None, divide: bool = True) -> dict[str, Any]:
    """Train divided or whole; return losses, and the weights at the end."""
    made = Training(divide, clip=clip)
    p, losses = made.p, made.run(0, steps)
    whole = [key for key in p.weights if key not in divided_weights(p)]
    replicas = {key: float(p.weights.array(key).to_numpy("float64").sum()) for key in whole}
    with distributed.gathered(p):
        sums = {key: float(np.abs(v.data.to_numpy("float64")).sum()) for key, v in p.weights.items()}
        keys = ["model.norm.weight", "model.layers.1.mlp.down_proj.weight", "model.layers.2.self_attn.q_proj.weight"]
        keys += [key for key in p.weights if "layers.3.mlp" in key]
        few = {key: p.weights.array(key).to_numpy("float64").ravel()[:2000:7].tolist() for key in keys}
    return {"losses": losses, "replicas": replicas, "sums": sums, "few": few}


def resumed(folder: str) -> dict[str, list[float]]:
    """Return losses of a divided training: uninterrupted, resumed from a folder, and continued after an undo."""
    one, two, three = (Training(True, "AdamW") for _ in range(3))
    losses = {"before": one.run(0, 2)}
    with one.p.edit("train"):
        losses["before"] += one.run(2, 3)
        one.save(folder)
    losses["after"] = one.run(3, 5)
    two.load(folder)
    losses["resumed"] = two.run(3, 5)
    three.load(folder)
    three.p.undo()
    losses["undone"] = three.run(3, 5)
    return losses


def copies(folder: str) -> dict[str, Any]:
    """Train two copies of a model that are divided among two ranks each."""
    here: dict[str, Any] = {}
    made = Training(True, "AdamW", clip=0.5, ranks=2, batch=1)
    now = world()
    here["world"] = [now.parts, now.part, now.copy, now.copies]
    loader = gw.data.DataLoader(gw.data.TensorDataset(np.arange(8)), 1)
    here["items"] = [int(np.asarray(rows[0])[0]) for rows in loader]
    here["losses"] = made.run(0, 3, now.copy, now.copies)
    here["sums"] = [float(v.data.to_numpy("float64").sum()) for v in made.p.weights.values()]
    made.save(folder)
    made.p.undo()
    here["losses"] += made.run(3, 5, now.copy, now.copies)
    made.p.redo()
    for name, call in {
        "batches": lambda: made.run(5, 6, now.rank, now.ranks),
        "three": lambda: Training(True, ranks=3),
        "four": lambda: Training(True, ranks=4),
    }.items():
        here[name] = refusal(call)
    return here


def killed_in_a_copy(at: int) -> str:
    """Train two copies of a divided model until rank 3 is killed before a step; return the error of this rank."""
    made, here = Training(True, "AdamW", ranks=2, batch=1), world()
    made.run(0, at, here.copy, here.copies)
    if here.rank == 3:
        os.kill(os.getpid(), 9)
    try:
        made.run(at, at + 1, here.copy, here.copies)
    except GraphwrightError as error:
        return f"{type(error).__name__}: {error}"
    return ""


DOUBLED = ("model.layers.1.mlp.up_proj.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight")


def killed(folder: str) -> None:
    """Save a model while rank 1 is killed."""
    model = gw.open("bundled")
    if distributed.rank() == 1:
        saving._write = lambda *args: os.kill(os.getpid(), 9)
    distributed.save(model, f"{folder}/out")


def saved(folder: str) -> dict[str, Any]:
    """Change weights of a divided model, save it by all ranks, and make a save fail on rank 1."""
    model = gw.open("bundled")
    p = model.program
    with p.edit("divide") as e:
        distributed.tensor_parallel(e, p.select("layers.*"))
    for key in DOUBLED:
        v = p.weights[key]
        v.data = empty(v.shape, v.dtype).copy_from(from_numpy(2 * v.data.to_numpy("float32")))
    distributed.save(model, f"{folder}/out")
    found: dict[str, Any] = {"again": "", "failed": ""}
    try:
        distributed.save(model, f"{folder}/out")
    except GraphwrightError as error:
        found["again"] = f"{type(error).__name__}: {error}"
    if distributed.rank() == 1:

        def fail(*args: Any) -> None:
            raise OSError("no space left")

        saving._write = fail
    try:
        distributed.save(model, f"{folder}/other")
    except GraphwrightError as error:
        found["failed"] = f"{type(error).__name__}: {error}"
    return found


def resident(path: str) -> int:
    """Return the bytes of the mapped files at a path that this process has read, as Linux counts them."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split()[0]:
            inside = path in line
        elif inside and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def loaded(folder: str) -> list[int]:
    """Divide and run a model of a file.

    Return the bytes of the file that this rank has read, and of the weights that are still mapped and those that are
    copies.
    """
    model = gw.open(folder, tokenizer=False)
    with model.program.edit("divide") as e:
        distributed.tensor_parallel(e, model.program.select("layers.*"))
    ids = np.zeros((1, 4), np.int64)
    model.program.run({"ids": ids, "positions": np.arange(4)[None]})
    arrays = [v.data for v in model.program.weights.values()]
    kinds = [a.storage.kind == "mapped" for a in arrays]
    sizes = [sum(a.nbytes for a, there in zip(arrays, kinds, strict=True) if there == kind) for kind in (True, False)]
    return [resident(folder), *sizes]
