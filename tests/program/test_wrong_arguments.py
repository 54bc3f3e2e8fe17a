"""Arguments of another type: each public method of programs, edits and models raises an error of this package."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.errors import GraphwrightError
from graphwright.program import Program, Transaction

WRONG = [None, [], [1], 1.5, -1, "", "no such thing", Path("nope"), b"x", np.int64(3), np.array(3), {}, {"a": 1}, "\0",
         object(), True, float("nan"), 10**30]  # fmt: skip
GIVEN = {"op": "tanh", "why": "w", "pattern": "**", "name": "new", "key": "layers.0.fc.weight", "text": "some text"}
"""Arguments of the other parameters that have no default; the rest get the path of a node."""


def network() -> Program:
    b = gw.Builder("network")
    x = b.input("x", (2, 4))
    for i in range(2):
        w = b.param(f"layers.{i}.fc.weight", np.eye(4, dtype=np.float32))
        x = b.junction(x, b.tanh(b.linear(x, w, name=f"layers.{i}.fc"), name=f"layers.{i}.act"), name=f"layers.{i}.out")
    b.output(x, "y")
    return b.build()


def calls(kind: type, name: str) -> list[tuple[list[Any], dict[str, Any]]]:
    """Arguments of a method: for each parameter each wrong value, the other ones valid or absent."""
    parameters = [p for p in [*inspect.signature(getattr(kind, name)).parameters.values()][1:]]
    usual = [p for p in parameters if p.kind is not p.VAR_KEYWORD]
    found = []
    for target in usual:
        for wrong in WRONG:
            args, named = list[Any](), dict[str, Any]()
            for p in usual:
                value = wrong if p is target else GIVEN.get(p.name, "layers.0.act")
                if p is not target and (p.default is not p.empty or p.kind is p.VAR_POSITIONAL):
                    continue
                if p.kind is p.KEYWORD_ONLY or (p is target and p.default is not p.empty):
                    named[p.name] = value
                else:
                    args.append(value)
            found.append((args, named))
    return found


def check(call: Callable[..., Any], args: list[Any], named: dict[str, Any]) -> None:
    try:
        call(*args, **named)
    except (GraphwrightError, TypeError):
        pass
    except Exception as error:  # a ValueError about an array where a number is expected is as clear as a TypeError
        if "truth value" not in str(error):
            pytest.fail(f"{call}, {args!r:.200}, {named!r:.200}: {type(error).__name__}: {error}")


def methods(kind: type, *without: str) -> list[str]:
    """Public methods with parameters."""
    named = [n for n in dir(kind) if n[0] != "_" and n not in without and inspect.isfunction(getattr(kind, n))]
    return [n for n in named if len(inspect.signature(getattr(kind, n)).parameters) > 1]


@pytest.mark.parametrize("name", methods(Program, "prune", "parameters"))
def test_methods_of_programs(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for args, named in calls(Program, name):
        check(getattr(network(), name), args, named)


@pytest.mark.parametrize("name", methods(Transaction))
def test_verbs_of_edits(name):
    for args, named in calls(Transaction, name):
        p = network()
        before = p.structure_hash()

        def edit(*args: Any, p: Program = p, **named: Any) -> None:
            with p.edit("with a wrong argument") as e:
                getattr(e, name)(*args, **named)
                raise GraphwrightError("undo it")

        check(edit, args, named)
        assert p.structure_hash() == before


@pytest.mark.parametrize("name", ["select", "logits", "run", "new_cache", "perplexity", "export_plan",
                                  "quantize", "resize_vocab", "orthogonalize", "compress", "validate"])  # fmt: skip
def test_methods_of_models(name):
    model = gw.open("bundled")
    first = [*inspect.signature(getattr(gw.Model, name)).parameters.values()][1:2]
    for args, named in calls(gw.Model, name):
        target = args[:1] if first and first[0].default is first[0].empty else [*named.values()]
        if target and isinstance(target[0], str) and target[0] not in ("", "\0", "no such thing"):
            continue  # the other arguments would run the model
        check(getattr(model, name), args, named)


def test_wrong_types_are_named():
    p, model = network(), gw.open("bundled")
    wrong: Any = []
    for call in (
        lambda: p.blame(wrong),
        lambda: p.of_kind(wrong),
        lambda: p.free_name(wrong),
        lambda: p.with_prefix(None),  # pyright: ignore[reportArgumentType]
        lambda: p.reachable(None),  # pyright: ignore[reportArgumentType]
        lambda: p.dependents(None),  # pyright: ignore[reportArgumentType]
        lambda: p.to_svg(diff=wrong),
        lambda: p.to_svg(overlay=wrong),
        lambda: p.compile(freeze=wrong),
        lambda: p.select(where=wrong),
        lambda: p.select(regex="("),
        lambda: p.expand(np.array(3)),
        lambda: p.formula(limit=wrong),
        lambda: p.save(""),
        lambda: model.compress(wrong),
        lambda: model.diagnose(text=wrong),
        lambda: model.diagnose(limits=wrong),
        lambda: model.perplexity("some text", window=wrong),
        lambda: gw.structure.learn(wrong, ("neurons",), 0.5, "text"),
    ):
        with pytest.raises(GraphwrightError) as caught:
            call()
        assert caught.value.got
        assert caught.value.expected or caught.value.where
