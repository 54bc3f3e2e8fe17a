"""Lists, dicts and sequences of modules and parameters against torch's: contents, names and results of each method."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import IndexOutOfRange, UsageError
from graphwright.testing.oracle import assert_close


def parameter(nn: Any, value: float) -> Any:
    return nn.Parameter((torch.full if nn is torch.nn else gw.full)((2,), value))


def parts(nn: Any, kind: str) -> list[Any]:
    if kind.startswith("Parameter"):
        return [parameter(nn, v) for v in (1.0, 2.0, 3.0)]
    return [nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)]


def made(nn: Any, kind: str) -> Any:
    """Return a container of three parts."""
    given = parts(nn, kind)
    if kind.endswith("Dict"):
        return getattr(nn, kind)({"a": given[0], "b": given[1], "c": given[2]})
    return nn.Sequential(*given) if kind == "Sequential" else getattr(nn, kind)(given)


def described(value: Any) -> Any:
    """Return what a result contains, in the same form for both libraries."""
    if isinstance(value, gw.nn.Parameter | torch.nn.Parameter):
        return ("parameter", *value.tolist())
    if isinstance(value, gw.nn.Module | torch.nn.Module):
        names = [n for n, _ in value.named_modules()], [n for n, _ in value.named_parameters()]
        return type(value).__name__, names, list(value.state_dict())
    if isinstance(value, str | int | bool | None):
        return value
    return [described(v) for v in value]


LISTS: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "append": lambda nn, m, new: m.append(new[0]),
    "extend": lambda nn, m, new: m.extend(new),
    "get": lambda nn, m, new: [m[0], m[-1]],
    "slice": lambda nn, m, new: m[1:],
    "set": lambda nn, m, new: m.__setitem__(-1, new[1]),
    "length": lambda nn, m, new: len(m),
    "iterate": lambda nn, m, new: list(m),
    "contains": lambda nn, m, new: [any(p is part for p in m) for part in (m[0], new[0])],
    "add in place": lambda nn, m, new: m.__iadd__(type(m)(*new) if isinstance(m, nn.Sequential) else new),
}
SOME: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "insert": lambda nn, m, new: m.insert(1, new[0]),
    "delete": lambda nn, m, new: m.__delitem__(1),
    "delete a slice": lambda nn, m, new: m.__delitem__(slice(0, 2)),
    "pop": lambda nn, m, new: m.pop(0),
}
SEQUENTIAL: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "add": lambda nn, m, new: m + nn.Sequential(*new),
    "multiply": lambda nn, m, new: len(m * 2),
    "names": lambda nn, m, new: nn.Sequential(OrderedDict(first=new[0], second=new[1]))[1:],
    "attribute": lambda nn, m, new: nn.Sequential(OrderedDict(first=new[0], second=new[1])).second,
}
DICTS: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "get": lambda nn, m, new: m["b"],
    "set": lambda nn, m, new: m.__setitem__("d", new[0]),
    "replace": lambda nn, m, new: m.__setitem__("a", new[1]),
    "delete": lambda nn, m, new: m.__delitem__("b"),
    "pop": lambda nn, m, new: m.pop("a"),
    "keys": lambda nn, m, new: list(m.keys()),
    "values": lambda nn, m, new: list(m.values()),
    "items": lambda nn, m, new: list(m.items()),
    "iterate": lambda nn, m, new: list(m),
    "contains": lambda nn, m, new: ["a" in m, "z" in m],
    "update": lambda nn, m, new: m.update({"z": new[0], "a": new[1]}),
    "update with pairs": lambda nn, m, new: m.update([["z", new[0]], ["y", new[1]]]),
    "clear": lambda nn, m, new: m.clear(),
    "attribute": lambda nn, m, new: m.c,
}
PARAMETERS: dict[str, Callable[[Any, Any, list[Any]], Any]] = {
    "get or default": lambda nn, m, new: [m.get("b"), m.get("z"), m.get("z", 5)],
    "setdefault": lambda nn, m, new: [m.setdefault("b", new[0]), m.setdefault("z", new[0])],
    "popitem": lambda nn, m, new: m.popitem(),
    "copy": lambda nn, m, new: m.copy(),
    "join": lambda nn, m, new: list((m | type(m)({"z": new[0]})).keys()),
    "join in place": lambda nn, m, new: list(m.__ior__(type(m)({"z": new[0]})).keys()),
    "fromkeys": lambda nn, m, new: list(m.fromkeys(["q"], new[0]).items()),
}
CASES = [
    *(("ModuleList", name) for name in (*LISTS, *SOME)),
    *(("Sequential", name) for name in (*LISTS, *SOME, *SEQUENTIAL)),
    *(("ParameterList", name) for name in LISTS),
    *(("ModuleDict", name) for name in DICTS),
    *(("ParameterDict", name) for name in (*DICTS, *PARAMETERS)),
]


@pytest.mark.parametrize(("kind", "name"), CASES)
def test_methods_match_torch(kind: str, name: str) -> None:
    known = DICTS | PARAMETERS if kind.endswith("Dict") else LISTS | SOME | SEQUENTIAL
    found: list[Any] = []
    for nn in (gw.nn, torch.nn):
        container = made(nn, kind)
        result = known[name](nn, container, parts(nn, kind)[::2])
        found.append((described(result), described(container)))
    assert found[0] == found[1]


def test_changed_containers_run_again_in_a_compiled_step() -> None:
    x = gw.tensor(np.linspace(-1, 1, 6).reshape(3, 2).astype("f4"))
    net = gw.nn.Sequential(gw.nn.Linear(2, 2), gw.nn.Tanh())
    run = gw.compile(net)
    for change in (lambda: None, lambda: net.append(gw.nn.Linear(2, 2)), lambda: net.insert(1, gw.nn.ReLU()),
                   lambda: net.pop(0), lambda: net.__setitem__(0, gw.nn.Sigmoid())):  # fmt: skip
        change()
        assert_close(run(x), net(x), rtol=1e-4, atol=1e-6)
    assert len({id(p) for p in net.parameters()}) == 2
    program = gw.trace(gw.nn.Sequential(*net, gw.nn.Linear(2, 2)), x)
    assert len(set(program.params())) == 4


def test_a_sequence_is_repeated_in_place() -> None:
    net = made(gw.nn, "Sequential")
    net *= 3
    assert len(net) == 9
    assert net[0] is net[6]


def test_invalid_parts_names_and_indices_are_refused_and_change_nothing() -> None:
    net, named = made(gw.nn, "ModuleList"), made(gw.nn, "ModuleDict")
    before = [*net], [*named.items()]
    for wrong in (lambda: net.append(3), lambda: net.extend([gw.nn.Tanh(), None]), lambda: net.insert(0, "x"),
                  lambda: named.update({"z": gw.nn.Tanh(), "y": 2}), lambda: named.__setitem__("x.y", gw.nn.Tanh()),
                  lambda: named.__setitem__("", gw.nn.Tanh()), lambda: named.__setitem__("keys", gw.nn.Tanh()),
                  lambda: gw.nn.Sequential(OrderedDict(forward=gw.nn.Tanh()))):  # fmt: skip
        with pytest.raises(UsageError, match="part"):
            wrong()
    for missing in (lambda: net[3], lambda: net.pop(-4), lambda: net.__delitem__(3)):
        with pytest.raises(IndexOutOfRange, match="-3 to 2"):
            missing()
    with pytest.raises(KeyError):
        named["z"]
    with pytest.raises(KeyError):
        gw.nn.ModuleDict().popitem()
    with pytest.raises(AttributeError, match="'d'"):
        _ = named.d
    assert before[0] == [*net]
    assert before[1] == [*named.items()]
    assert named in {named}
    assert named != made(gw.nn, "ModuleDict")


def test_tensors_become_parameters() -> None:
    held = gw.nn.ParameterDict({"a": gw.ones(2), "b": np.zeros(3, "f4")})
    assert all(isinstance(p, gw.nn.Parameter) for p in held.values())
    assert [n for n, _ in gw.nn.ParameterList([gw.ones(2), gw.ones(1)]).named_parameters()] == ["0", "1"]
