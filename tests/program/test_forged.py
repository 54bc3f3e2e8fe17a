"""Saved programs and journals with a wrong value and valid checksums raise typed errors or run, never a raw error."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import Builder
from graphwright.errors import GraphwrightError
from graphwright.graph import chain
from graphwright.ops import OPS
from graphwright.program.errors import InvalidProgram
from graphwright.program.files.save import MIDDLE, PREFIX, SUFFIX
from graphwright.program.program import Program

COUNT = int(os.environ.get("FORGED", 3000 if os.environ.get("HYPOTHESIS_PROFILE") == "deep" else 150))
"""Mutants of each kind of file; `FORGED=5000` runs as many."""
PAYLOAD = "x').__class__#"
VALUES: list[Any] = [
    "x", PAYLOAD, 1.5, -1, 0, 1, 2**40, 2**63, 10**30, True, None, [], [0], ["x"], [0.5], [-9], [[0]], {}, {"x": 1},
    {"float": "nan"}, {"dtype": "float32"}, {"dtype": "x"}, {"spec": ["float32", [PAYLOAD]]}, "act", "0-3",
]  # fmt: skip
DELETE = object()


def windows() -> Program:
    """Convolution, norms, pooling, padding."""
    rng = np.random.default_rng(0)
    b = Builder("windows")
    h = b.conv(
        b.input("x", (2, 4, 6, 6)), b.param("w", rng.normal(size=(4, 2, 3, 3)).astype("f4")), padding=1, groups=2
    )
    h = b.group_norm(b.pad(h, widths=((1, 1), (0, 2)), mode="reflect"), groups=2)
    values, _ = b.max_pool(b.leaky_relu(h, slope=0.2), kernel=(2, 2), stride=None)
    b.output(b.interpolate(b.avg_pool(values, kernel=(2, 2)), sizes=(3, 3), mode="linear"), "y")
    return b.build()


def attention() -> Program:
    """Embedding, attention, reductions, indices, views, state, random numbers; edits and an undo."""
    rng = np.random.default_rng(1)
    b = Builder("attention")
    ids = b.input("ids", ("B", "T"), "int64")
    h = b.embedding(b.param("table", rng.normal(size=(11, 8)).astype("f4")), ids)
    q = b.permute(b.unflatten(b.rms_norm(h, b.param("g", np.ones(8, "f4"))), axis=2, sizes=(2, 4)), axes=(0, 2, 1, 3))
    a = b.sdpa(q, q, q, scale=0.5, window=2)
    a = b.flatten(b.permute(a, axes=(0, 2, 1, 3)), start=2, end=3)
    h = b.junction(h, b.linear(a, b.param("o.w", rng.normal(size=(8, 8)).astype("f4")), name="o"), name="sum")
    b.output(b.softmax(b.clamp(h, low=-3.0)), "soft")
    b.output(b.sum(b.expand(b.unsqueeze(h, axes=(0,)), shape=(3, "B", "T", 8)), axes=(0, 3)), "sums")
    values, order = b.topk(h, k=3, largest=False)
    b.output(
        b.gather(b.slice(h, axis=2, start=1, size=7), b.remainder(order, b.const("seven", np.int64(7))), axis=2), "g"
    )
    b.output(b.triu(b.cumsum(values, axis=1), diagonal=1), "t")
    state = b.state("count", np.zeros(2, "f4"))
    b.assign(state, b.dropout(b.add(state, state), b.const("key", np.array([1, 2])), p=0.5, stream=3)[0])
    p = b.build()
    with p.edit("scale") as e:
        e.set_weight("o.w", lambda w: 2 * w)
    with p.edit("insert") as e:
        e.insert("o -> sum", "tanh", name="act")
    with p.edit("rename") as e:
        e.rename("act", "act2")
    p.undo()
    return p


FEEDS: dict[str, dict[str, Any]] = {
    "windows": {"x": np.ones((2, 4, 6, 6), "f4")},
    "attention": {"ids": np.array([[1, 2, 3], [4, 5, 10]])},
}


def leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(leaf for key, one in inner for leaf in leaves(one, (*path, key)))]


def mutate(body: Any, path: tuple[Any, ...], value: Any) -> Any:
    made = at = copy.deepcopy(body)
    for key in path[:-1]:
        at = at[key]
    if value is DELETE:
        del at[path[-1]]
    else:
        at[path[-1]] = copy.deepcopy(value)
    return made


def sign(body: Any) -> bytes:
    text = json.dumps(body, separators=(",", ":")).encode()
    return PREFIX + sha256(text).hexdigest().encode() + MIDDLE + text + SUFFIX


def small(p: Program) -> bool:
    """Whether a run allocates little: a valid program may ask for a huge result."""
    return all(isinstance(d, str) or d < 1 << 12 for n in p.nodes() for s in p.specs(n) for d in s.shape)


def use(p: Program, feeds: dict[str, Any]) -> None:
    for node in p.nodes():
        row = OPS.get(p.op(node))
        if row is not None and row.emit is not None:
            text = row.emit([f"a{i}" for i in range(len(p.operands(node)))], p.attrs(node)) or ""
            assert PAYLOAD not in text.replace(repr(PAYLOAD), "")
    steps: list[Callable[[], object]] = [
        p.axes,
        p.hash,
        p.to_svg,
        lambda: p.undo(1),
        lambda: p.redo(1),
        p.journal.verify,
    ]
    for step in [lambda: p.run(feeds), *steps] if small(p) else steps:
        with contextlib.suppress(GraphwrightError):
            step()


def attack(make: Callable[[], Program], folder: Path, seed: int, attrs_only: bool) -> tuple[int, int]:
    """Load COUNT mutants; return how many were refused, and how many were used."""
    p, rng = make(), random.Random(seed)
    p.save(folder)
    body = json.loads((folder / "program.json").read_bytes())["program"]
    rows = ("graph", "nodes", "columns", "attrs", "rows")
    paths = [path for path in leaves(body) if (path[:5] == rows and len(path) > 6) or (path and not attrs_only)]
    refused = used = 0
    for _ in range(COUNT):
        path, value = rng.choice(paths), rng.choice([*VALUES, DELETE])
        (folder / "program.json").write_bytes(sign(mutate(body, path, value)))
        try:
            loaded = gw.load(folder)
        except GraphwrightError:
            refused += 1
            continue
        use(loaded, FEEDS[p.name])
        used += 1
    return refused, used


@pytest.mark.parametrize("make", [windows, attention])
def test_a_saved_program_with_a_wrong_attribute_is_refused_or_runs(make: Callable[[], Program], tmp_path: Path) -> None:
    refused, used = attack(make, tmp_path / "p", 0, attrs_only=True)
    assert refused > used > 0


def test_a_saved_program_with_any_wrong_value_is_refused_or_runs(tmp_path: Path) -> None:
    refused, used = attack(attention, tmp_path / "p", 1, attrs_only=False)
    assert refused > used > 0


@pytest.mark.parametrize("attr", ["descending", "axis"])
def test_text_of_a_saved_attribute_never_reaches_generated_source(attr: str, tmp_path: Path) -> None:
    b = Builder("sorted")
    b.output(b.sort(b.input("x", (3,)))[0], "y")
    p = b.build()
    p.save(tmp_path / "p")
    body = json.loads((tmp_path / "p" / "program.json").read_bytes())["program"]
    attrs = body["graph"]["nodes"]["columns"]["attrs"]["rows"]
    next(row for row in attrs if "descending" in row)[attr] = PAYLOAD
    (tmp_path / "p" / "program.json").write_bytes(sign(body))
    with pytest.raises(InvalidProgram, match=f"attribute '{attr}' of op 'sort' has an invalid value"):
        gw.load(tmp_path / "p")


def test_a_forged_journal_is_a_conflict_and_changes_nothing(tmp_path: Path) -> None:
    def base() -> Program:
        b = Builder("p")
        x = b.input("x", ("B", 4))
        up, down = b.param("up.w", np.ones((6, 4), "f4")), b.param("dn.w", np.ones((4, 6), "f4"))
        h = b.linear(b.tanh(b.linear(x, up, name="up"), name="act"), down, name="dn")
        b.output(b.junction(x, h, name="s"), "y")
        return b.build()

    p = base()
    with p.edit("connect") as e:
        e.connect("x", "s")
    with p.edit("cut units") as e:
        e.cut_units(p.axes()["up.neurons"].units([0, 2]))
    with p.edit("insert") as e:
        e.insert("up -> act", "silu", name="ins")
        e.rename("act", "act2")
        e.set_attr("up.w", trainable=False)
    with p.edit("add") as e:
        e.connect(e.add("softmax", "x", axis=-1, name="soft"), "s")
        e.set_outputs(y="s", z="soft")
    entries = [link.entry for link in p.journal.chain.links]
    paths = [path for path in leaves(entries) if len(path) > 1]
    rng, path, target = random.Random(2), tmp_path / "journal.jsonl", base()
    before, outcomes = target.hash(), {"replayed": 0, "refused": 0}
    for _ in range(COUNT):
        forged = chain.Chain()
        for entry in mutate(entries, rng.choice(paths), rng.choice([*VALUES, DELETE])):
            forged.append(entry)
        path.write_text("\n".join(forged.lines()) + "\n", "utf-8")
        try:
            gw.replay(path, target)
            outcomes["replayed"] += 1
            target.undo(len(target.history.undoable))
        except GraphwrightError:
            outcomes["refused"] += 1
        assert target.hash() == before
    assert min(outcomes.values()) > 0
