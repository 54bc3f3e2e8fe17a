"""Draw the pictures of the docs: `python scripts/pictures.py [NAME ...]` writes docs/pictures/."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from runpy import run_path
from typing import Any

import numpy as np

import graphwright as gw
from graphwright import evolve as ev
from graphwright import structure as st
from graphwright import surgery as sg
from graphwright.evolve.pictures import network
from graphwright.program.draw.shapes import HEIGHT, chart, label, legend, lines, picture, shape
from graphwright.structure.report import probabilities
from graphwright.surgery import diagnose
from graphwright.testing.planted import Edges

PAINTS = {"text": {"font_size": 12, "fill": "#24292f"}, "n": {"font_weight": "bold"}}
FOLDER = Path(__file__).parents[1] / "docs" / "pictures"


def edit() -> str:
    """A branch cut and a skip added in the bundled model, beside what it was."""
    p = gw.open("bundled").program
    with p.edit("cut the MLP of block 1, skip the block") as e:
        e.cut("layers.1.mlp.down -> layers.1.out")
        e.link("layers.0.out", "layers.2.out", np.zeros((192, 192), np.float32))
    return p.to_svg(diff=p.at(-1), expanded={"layers", "layers.1"})


def gates(steps: int = 300) -> str:
    """The probability of each of 56 edges over 300 steps, 12 of which carry signal."""
    problem = Edges(0)
    problem.gate("sigmoid", init=st.init_for(0.9, "sigmoid"))
    view = st.DifferentiableGraph(problem.program, schedule=st.TemperatureSchedule(1.0, 0.1, steps))
    opt = st.JointOptimizer(view, "loss", [st.sparsity(0.1)], params=0.01, gates=0.1)
    rows = []
    for step in range(steps):
        if step % 4 == 0:
            rows.append(list(view.probabilities("T").values()))
        opt.step(problem.batch())
    names = list(view.probabilities())
    return probabilities(np.array(rows), names, [name in problem.planted for name in names], steps)


def findings() -> str:
    """What a diagnosis finds in the bundled model after five defects were planted, coloured by severity."""
    p = gw.open("bundled").program
    with p.edit("five defects", check=False) as e:
        e.cut("layers.0.mid -> layers.0.out")
        e.insert("layers.1.mlp.mul -> layers.1.mlp.down", "stop_gradient", name="layers.1.mlp.stopped")
        e.add("tanh", "layers.1.attn.o", name="layers.1.attn.idle")
        e.cut("layers.1.attn.v -> layers.1.attn.v_split")
        e.set_weight("layers.1.mlp.up.weight", lambda w: np.where(w > w.max() / 2, np.nan, w))
    found = diagnose(p)
    shown = {"layers", "layers.0", "layers.1", "layers.1.attn", "layers.1.mlp"}
    return p.to_svg(overlay=found.overlay(), expanded=shown)


def attention() -> str:
    """The probability of each of twelve edges in `examples/attention_pruning.py`."""
    values, names, kept = example("attention_pruning")["toy"]()
    return probabilities(values, names, kept, len(values))


def orthogonal() -> str:
    """How far each method of `examples/orthogonalisation.py` moves the logits of the bundled model."""
    moved = example("orthogonalisation")["compared"]("bundled", "layers.*.attn.{q,k,v,o}", 1024)
    return bars({name: max(value, 1e-16) for name, value in moved.items()}, "logits moved, relative to the largest")


def skips() -> str:
    """The structure that `examples/architecture_search.py` finds for seed 0, beside the chain that it began with."""
    found, student, _ = example("architecture_search")["one"](0, "gates", 4000, ())
    return found.program.to_svg(diff=student)


def example(name: str) -> dict[str, Any]:
    """What a file of examples/ defines."""
    return run_path(str(FOLDER.parents[1] / "examples" / f"{name}.py"))


def bars(values: dict[str, float], what: str) -> str:
    """Positive numbers on a logarithmic scale as SVG."""
    wide, left, high = 420, 210, 20
    logs = np.log10(list(values.values()))
    low, span = np.floor(logs.min()), max(np.ceil(logs.max()) - np.floor(logs.min()), 1.0)
    height = high * len(values) + 40
    parts = []
    for k, (name, at) in enumerate(zip(values, (logs - low) / span, strict=True)):
        y, length = 10 + high * k, round(max(wide * at, 2.0))
        parts.append(label(6, y + 11, name))
        parts.append(shape("rect", x=left, y=y, width=length, height=13, fill="#0969da"))
        parts.append(label(left + length + 6, y + 11, f"{values[name]:.1e}"))
    parts.append(label(left, height - 12, f"{what}; logarithmic"))
    return picture(left + wide + 80, height, parts, PAINTS)


def prune() -> str:
    """Half of a block's neurons gone, in every matrix that has them, beside what it was."""
    model = gw.open("bundled")
    model.select("layers.1.mlp").neurons[:256].prune()
    return _change(model.program, "layers.1.mlp")


def orthogonalize() -> str:
    """The queries' matrix as an orthonormal one and, before it, the symmetric factor."""
    p = gw.open("bundled").program
    sg.orthogonalize(p, "layers.1.attn.q", fold="insert")
    return _change(p, "layers.1.attn", "layers.1.attn.q")


def compress() -> str:
    """A matrix of an MLP as two thin ones."""
    p = gw.open("bundled").program
    sg.compress(p, "layers.1.mlp.up", "svd", sg.Ratio(0.3))
    return _change(p, "layers.1.mlp", "layers.1.mlp.up")


def recipe() -> str:
    """What the recipe of docs/export.md does to blocks 0 and 1 of the bundled model: neurons, a head, a whole layer."""
    p, before = gw.open("bundled").program, gw.open("bundled").program
    text = (FOLDER.parent / "export.md").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "recipe.yaml"
        written.write_text(text.split('Path("recipe.yaml").write_text("""')[1].split('"""')[0], encoding="utf-8")
        gw.program.apply_recipe(written, p)
    return p.to_svg(diff=before, expanded={"layers"})


def ladder() -> str:
    """What `export_plan` says of six structures of the bundled model: levels, bytes, and the chosen level."""
    model = gw.open("bundled")
    p = model.program

    def edit(change: Callable[[Any], Any]) -> Callable[[], None]:
        def call() -> None:
            with p.edit("change") as e:
                change(e)

        return call

    def uniform(e: Any) -> None:
        e.cut_units(model.select("layers").layers[2])
        e.cut_units(model.select("layers.*.mlp").neurons[:32])

    edits: dict[str, Callable[[], Any]] = {
        "the values of a matrix changed": edit(lambda e: e.set_weight("layers.0.attn.q.weight", lambda w: w / 2)),
        "a layer and 32 neurons per layer removed": edit(uniform),
        "200 neurons of one layer removed": model.select("layers.1.mlp").neurons[:200].prune,
        "a matrix factored into two": lambda: sg.compress(p, "layers.1.mlp.up", "svd", sg.Ratio(0.3)),
        "a skip added around a block": edit(
            lambda e: e.link("layers.0.out", "layers.2.out", np.zeros((192, 192), np.float32))
        ),
    }
    rows: dict[str, Any] = {"as opened": (model.export_plan(), 1)}
    for name, make in edits.items():
        make()
        rows[name] = (model.export_plan(), model.export_plan(prefer="size").level)
        p.undo()
    return _ladder(rows)


def house() -> str:
    """The layers of the package from `tests/test_layers.py`, the highest at the top."""
    levels = run_path(str(Path(__file__).parents[1] / "tests" / "test_layers.py"))["LEVELS"]
    roles = {
        **{"cli": "commands", "testing": "proofs, planted bugs", "surgery": "diagnose, prune, factor"},
        **{"structure": "gates, search", "experts": "routers, mixtures", "lifecycle": "lives, own prefixes"},
        **{"attention": "sparse attention", "distributed": "ranks, data parallel"},
        **{"models": "open, generate, export", "evolve": "NEAT, layers"},
        **{
            "nn": "modules",
            "optim": "optimizers",
            "amp": "mixed precision",
            "data": "loaders",
            "metrics": "of batches",
            "distributions": "samples, KL",
        },
        **{"plan": "tables, executors", "program": "graph of ops and weights, edits, undo, axes, pictures"},
        **{"autograd": "tensors, tape, backward", "ops": "one class per op"},
        **{"array": "memory, ATen, VM, formulas", "graph": "handles, bulk edits, order"},
        **{"patterns": "block-sparse attention as editable graphs"},
        **{
            "safetensors": "checkpoint files",
            "files": "atomic writes, strict JSON",
            "arguments": "checked by annotations",
            "settings": "ranges",
            "timing": "compared times",
            "builds": "native code in the background",
            "workers": "pools of processes, Ray",
        },
        **dict.fromkeys(("errors", "plugins", "progress", "report", "native", "signatures"), ""),
    }
    rows = [sorted(names) for names in reversed(levels) if "__init__" not in names]
    wide, high = 880, 46
    parts = []
    for y, names in enumerate(rows):
        width = (wide - 8 * (len(names) - 1)) / len(names)
        for x, name in enumerate(names):
            left, top = x * (width + 8), y * high
            middle = left + width / 2
            parts.append(shape("rect", x=left, y=top, width=width, height=high - 8, rx=6, fill="#eaeef2"))
            parts.append(label(middle, top + 17, name, "middle", class_="n"))
            parts.append(label(middle, top + 31, roles[name], "middle"))
    paints = {"text": {"font_size": 11, "fill": "#1f2328"}, "n": {"font_weight": "bold", "font_size": 13}}
    return picture(wide, len(rows) * high, parts, paints)


def _ladder(rows: dict[str, Any]) -> str:
    left, wide, high = 310, 104, 40
    heads = ("unchanged", "resized config", "filled with zeros", "generated code")
    colours = {"taken": "#1a7f37", "exact": "#a7e3b4", "inexact": "#fff3b8", "not": "#eaeef2"}
    parts = []
    for i, head in enumerate(heads):
        parts.append(label(left + wide * i + 4, 20, f"level {1 + i + (i > 2)}", class_="n"))
        parts.append(label(left + wide * i + 4, 36, head))
    for k, (name, (plan, smaller)) in enumerate(rows.items()):
        y = 46 + high * k
        parts.append(label(6, y + 21, name))
        for column, r in enumerate(plan.levels):
            kind = "taken" if r.level == plan.level else "exact" if r.exact else "inexact" if r.possible else "not"
            why = r.reasons[0].reason if r.reasons else f"{r.bytes:,} bytes of weights"
            x, ink = left + wide * column, "#ffffff" if kind == "taken" else "#24292f"
            ring = {"stroke": "#0969da", "stroke_width": 3} if r.level == smaller != plan.level else {}
            cell = {"width": wide - 6, "height": high - 8, "rx": 4, "fill": colours[kind], **ring}
            size = f"{r.bytes / 2**20:.2f} MiB" if r.possible else ""
            text = label(x + wide / 2, y + 20, size, "middle", fill=ink)
            parts.append(shape("g", shape("rect", x=x + 3, y=y, **cell), text, title=why))
    y = 62 + high * len(rows)
    legend = (("taken", "chosen automatically", 6), ("exact", "also exact", 172),
              ("inexact", "approximate, on request", 270), ("not", "impossible", 456))  # fmt: skip
    for kind, text, x in legend:
        parts.append(shape("rect", x=x, y=y - 11, width=14, height=14, rx=3, fill=colours[kind]))
        parts.append(label(x + 20, y, text))
    parts.append(
        shape("rect", x=560, y=y - 11, width=13, height=13, rx=3, fill="none", stroke="#0969da", stroke_width=3)
    )
    parts.append(label(580, y, 'chosen with prefer="size"'))
    return picture(left + wide * 5 + 6, y + 14, parts, PAINTS)


def diff() -> str:
    """What `diff` finds between the bundled model and an edited one: each matrix of each layer."""
    model, before = gw.open("bundled"), gw.open("bundled").program
    p = model.program
    sg.orthogonalize(p, "layers.1.attn.{q,k}")
    model.select("layers.2.mlp").neurons[:200].prune()
    with p.edit("an MLP at half weight") as e:
        e.set_weight("layers.0.mlp.down.weight", lambda w: w / 2)
    sg.compress(p, "layers.3.mlp.up", "svd", sg.Ratio(0.3))
    return _diff(p.diff(before))


def _diff(found: Any) -> str:
    """Layers as columns, matrices as rows; a blank cell is a matrix of the same bytes."""
    matrices = {f"{at}.{name}": f"{block}.{name}_proj" for at, block, names in
                (("attn", "self_attn", "qkvo"), ("mlp", "mlp", ("gate", "up", "down"))) for name in names}  # fmt: skip
    changed = {w.key: w for w in found.weights}
    left, wide, high = 90, 150, 30
    parts = [label(left + wide * i + 4, 20, f"layer {i}", class_="n") for i in range(4)]
    for k, (name, key) in enumerate(matrices.items()):
        y = 30 + high * k
        parts.append(label(6, y + 18, name))
        for i in range(4):
            at, w = f"model.layers.{i}.{key}", changed.get(f"model.layers.{i}.{key}.weight")
            words, fill, ink = "", "#f6f8fa", "#24292f"
            if f"{at}.weight" in found.missing:
                words = f"in {sum(k.startswith(f'{at}.') for k in found.extra)} factors"
                fill, ink = "#8250df", "#ffffff"
            elif w is not None and w.relative is None:
                words, fill = f"{w.before.split('[')[1][:-1]} → {w.after.split('[')[1][:-1]}", "#f5c98b"
            elif w is not None:
                words, fill = f"moved by {w.relative:.2f} of its norm", "#cfe3ff"
            x = left + wide * i
            parts.append(shape("rect", x=x, y=y, width=wide - 4, height=high - 4, rx=4, fill=fill))
            parts.append(label(x + wide / 2 - 2, y + 17, words, "middle", fill=ink, font_size=10.5))
    y = 48 + high * len(matrices)
    parts.append(label(6, y, f"blank: the same bytes, {found.equal} weights in all with the norms"))
    return picture(left + wide * 4 + 6, y + 12, parts, PAINTS)


def evolved() -> str:
    """The champion of the run of docs/evolve.md."""
    run = ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(population=150), seed=7)
    return network(run.run(max_generations=300).best.genome, run.task.names)


def grid_task() -> str:
    """A task of the page on grid tasks, with a guess that has a wrong cell."""
    task = gw.data.grids("gravity", side=5, colours=6, pairs=2, seed=0)[3]
    guess = task.answer.copy()
    guess[0, 0] = 2
    return task.to_svg(guess)


def on_policy() -> str:
    """Mean exact match over steps of `benchmarks/on_policy.py`: dark with own prefixes, light teacher forcing."""
    path = next((FOLDER.parents[1] / "benchmarks" / "results").glob("*/on_policy.json"))
    figures = json.loads(path.read_text(encoding="utf-8"))["figures"]
    rows = next(f["rows"] for f in figures if f["part"] == "curves")
    colours = {"copy": ("#0969da", "#9ec5f5"), "flip": ("#1a7f37", "#9bd3a7"), "recolour": ("#bc4c00", "#f2b48a")}
    values: dict[str, tuple[list[float], str]] = {}
    for row in rows:
        kind, arm, _ = row["who"].split(", ")
        values.setdefault(f"{kind}, {arm}", ([], colours[kind][arm == "teacher forcing"]))[0].append(
            float(np.mean(row["seeds"]))
        )
    last = rows[-1]["who"].rpartition(" ")[2]
    shapes = [*lines(values, f"step {last}", (0.0, 1.0)), *legend({n: c for n, (_, c) in values.items()}, HEIGHT + 6)]
    return chart(shapes, HEIGHT + 36)


def life() -> str:
    """The life of `examples/life.py`, without the kill."""
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(StringIO()):
        found = example("life")["live"](Path(folder) / "life", 400, 200)
        found.close()
        return found.to_svg()


def _change(p: gw.Program, *opened: str) -> str:
    """Block 1 against what it was before the last edit, with some of its modules opened."""
    return p.to_svg(diff=p.at(-1), expanded={"layers", "layers.1", *opened})


PICTURES = {
    "house.svg": house,
    "edit.svg": edit,
    "gates.svg": gates,
    "findings.svg": findings,
    "attention.svg": attention,
    "orthogonal.svg": orthogonal,
    "skips.svg": skips,
    "prune.svg": prune,
    "orthogonalize.svg": orthogonalize,
    "compress.svg": compress,
    "recipe.svg": recipe,
    "ladder.svg": ladder,
    "diff.svg": diff,
    "evolved.svg": evolved,
    "grid_task.svg": grid_task,
    "on_policy.svg": on_policy,
    "life.svg": life,
}
TRAINED = {"gates.svg", "attention.svg", "orthogonal.svg", "skips.svg", "evolved.svg", "life.svg"}
"""Those that take seconds."""

if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or PICTURES:
        (FOLDER / name).write_text(PICTURES[name](), encoding="utf-8")
