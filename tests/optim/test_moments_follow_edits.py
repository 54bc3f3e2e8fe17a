"""Optimizer moments after edits: cut, grown and permuted axes, undo, added and removed parameters."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from optim_parameters import low, values

import graphwright as gw
from graphwright.array import from_numpy
from graphwright.autograd import Parameter, Tensor
from graphwright.optim import ASGD, SGD, Adagrad, AdamW, NAdam, Optimizer, Rprop

pytestmark = pytest.mark.usefixtures("young_heap")


def program() -> gw.Program:
    b = gw.Builder()
    x = b.input("x", ("B", 3))
    b.output(b.junction(b.linear(x, b.param("w", values(0)[0][:3] * 1.0)), name="sum"), "y")
    return b.build()


def test_parameters_added_by_an_edit_are_trained():
    p = program()
    opt = AdamW(p, 0.1, weight_decay=0.0)
    x = np.ones((2, 3), np.float32)

    def step():
        opt.zero_grad()
        y = p(x=x)["y"]
        (y * y).sum().backward()
        opt.step()

    for _ in range(40):
        step()
    assert len(opt.state) == 1
    with p.edit("add") as e:
        e.link("x", "sum", np.full((3, 3), 0.5, np.float32), name="new")
    added = next(q for q in p.parameters() if q.name == "new.weight")
    step()
    moved = added.data.to_numpy() - 0.5
    np.testing.assert_allclose(np.abs(moved), 0.1, rtol=1e-3)  # a first step of Adam is lr, whatever came before
    assert opt.state_of(added).steps.item() == 1
    p.undo()
    step()
    assert [q.name for q in opt.parameters()] == ["w"]


def test_a_weight_set_to_another_shape_resets_its_moments():
    p = program()
    opt = AdamW(p, 0.1)
    x = np.ones((2, 3), np.float32)

    def step():
        opt.zero_grad()
        p(x=x)["y"].sum().backward()
        opt.step()

    step()
    with p.edit("narrow") as e:
        e.set_weight("w", lambda w: w[:2])
    step()
    (q,) = p.parameters()
    assert opt.state_of(q).moments["m"].shape == (2, 3)
    assert opt.state_of(q).steps.item() == 1


def test_parameters_with_the_same_name_have_separate_states():
    params = [Parameter(from_numpy(v), name="same") for v in values(0)]
    opt = AdamW(params)
    assert len(opt.variables()) == 1 + 3 * 3


def perceptron() -> gw.Program:
    """x [B, 3] -> tanh(first [5, 3]) -> second [2, 5]."""
    rng, b = np.random.default_rng(7), gw.Builder()
    first = b.linear(
        b.input("x", ("B", 3)), b.param("first.weight", rng.normal(size=(5, 3)).astype("f4")), name="first"
    )
    b.output(b.linear(b.tanh(first), b.param("second.weight", rng.normal(size=(2, 5)).astype("f4"))), "y")
    return b.build()


def run_of(p: gw.Program, opt: Optimizer, compiled: bool) -> Callable[[], Any]:
    """A training step of a program, eager or compiled."""
    x = np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32)

    def step(x: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        y = p(x=x)["y"]
        loss = (y * y).sum()
        loss.backward()
        opt.step()
        return loss

    call = gw.compile(step) if compiled else step
    return lambda: call(gw.tensor(x))


MAKERS = {
    "adamw": (lambda params: AdamW(params, 0.05), lambda params: torch.optim.AdamW(params, 0.05), ("m", "v")),
    "sgd": (
        lambda params: SGD(params, 0.02, momentum=0.9),
        lambda params: torch.optim.SGD(params, 0.02, momentum=0.9),
        ("momentum_buffer",),
    ),
}
TORCH_NAMES = {"m": "exp_avg", "v": "exp_avg_sq"}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", MAKERS)
def test_moments_follow_cut_grown_and_permuted_axes(name, compiled):
    """Surviving moments keep their bits, new ones are 0, and the next steps are those of a manually sliced run."""
    ours_made, torch_made, _ = MAKERS[name]
    p = perceptron()
    opt = ours_made(p)
    step = run_of(p, opt, compiled)
    for _ in range(4):
        step()
    first, second = (q for q in p.parameters())
    held = {w: {n: v.numpy().copy() for n, v in opt.state_of(w).moments.items()} for w in (first, second)}
    with p.edit("cut") as e:
        e.cut_units(p.axes()["first.neurons"].units([1, 3]))
    with p.edit("turn") as e:
        e.permute("first.neurons", [2, 0, 1])
    with p.edit("grow") as e:
        e.grow("first.neurons", 1)
    indices = [4, 0, 2]
    for n, before in held[first].items():
        state = opt.state_of(first).moments[n].numpy()
        assert state[:3].tobytes() == before[indices].tobytes()
        assert not state[3].any()
        assert opt.state_of(second).moments[n].numpy()[:, :3].tobytes() == before_columns(held[second][n], indices)
    assert opt.state_of(first).steps.item() == 4
    hand = [torch.tensor(w.numpy().copy(), requires_grad=True) for w in (first, second)]
    other = torch_made(hand)
    for tensor, weight in zip(hand, (first, second), strict=True):
        moments = opt.state_of(weight).moments
        named = {TORCH_NAMES.get(n, n): torch.tensor(v.numpy().copy()) for n, v in moments.items()}
        other.state[tensor] = {"step": torch.tensor(4.0), **named} if name == "adamw" else {
            "momentum_buffer": next(iter(named.values()))}  # fmt: skip
    x = torch.tensor(np.random.default_rng(3).normal(size=(4, 3)).astype(np.float32))
    for _ in range(3):
        step()
        other.zero_grad()
        ((torch.tanh(x @ hand[0].T) @ hand[1].T) ** 2).sum().backward()
        other.step()
    for weight, tensor in zip((first, second), hand, strict=True):
        np.testing.assert_allclose(weight.numpy(), tensor.detach().numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("make", [NAdam, ASGD, Rprop, Adagrad])
def test_numbers_stay_and_new_units_start_like_those_of_the_first_step(make, compiled):
    """Of every optimizer whose state does not begin with zeros: the edited run equals that of the final shape."""
    options: dict[str, Any] = {Adagrad: {"initial_accumulator_value": 0.5}}.get(make, {})
    p = perceptron()
    opt = make(p, 0.05, **options)
    step = run_of(p, opt, compiled)
    for _ in range(4):
        step()
    numbers = {n: opt.state_of(w).moments[n].item() for w in p.parameters() for n in make.numbers}
    assert all(numbers.values())
    with p.edit("grow") as e:
        e.grow("first.neurons", 1)
    first, second = p.parameters()
    assert numbers == {n: opt.state_of(second).moments[n].item() for n in make.numbers}
    before = first.numpy()[5].copy(), second.numpy()[:, 5].copy()
    step()
    moved = [np.abs(a - b) for a, b in zip((first.numpy()[5], second.numpy()[:, 5]), before, strict=True)]
    if make is Rprop:
        np.testing.assert_allclose(moved[1], 0.05, rtol=1e-5)
    if make is Adagrad:
        gradient = np.sqrt(opt.state_of(second).moments["square_sum"].numpy()[:, 5])
        np.testing.assert_allclose(moved[1], 0.05 * gradient / np.sqrt(0.5 + gradient**2), rtol=1e-4)


def before_columns(moment: np.ndarray, indices: list[int]) -> bytes:
    return np.ascontiguousarray(moment[:, indices]).tobytes()


def test_undo_restores_moments_of_surviving_entries():
    p = perceptron()
    opt = AdamW(p, 0.05)
    step = run_of(p, opt, compiled=False)
    for _ in range(3):
        step()
    first = next(p.parameters())
    held = opt.state_of(first).moments["m"].numpy().copy()
    with p.edit("cut") as e:
        e.cut_units(p.axes()["first.neurons"].units([0]))
    p.undo()
    assert opt.state_of(first).moments["m"].numpy().tobytes() == held.tobytes()
    p.redo()
    stayed = opt.state_of(first).moments["m"].numpy().copy()
    assert stayed.tobytes() == held[1:].tobytes()
    p.undo()
    back = opt.state_of(first).moments["m"].numpy()
    assert back[1:].tobytes() == held[1:].tobytes()
    assert not back[0].any()
    p.redo()
    assert opt.state_of(first).moments["m"].numpy().tobytes() == stayed.tobytes()


def test_a_restored_parameter_has_its_moments():
    p = program()
    opt = AdamW(p, 0.1)
    with p.edit("add") as e:
        e.link("x", "sum", np.full((3, 3), 0.5, np.float32), name="new")
    p(x=np.ones((2, 3), np.float32))["y"].sum().backward()
    opt.step()
    added = next(q for q in p.parameters() if q.name == "new.weight")
    held = opt.state_of(added).moments["m"].numpy().copy()
    p.undo()
    p.redo()
    (again,) = [q for q in p.parameters() if q.name == "new.weight"]
    assert opt.state_of(again).moments["m"].numpy().tobytes() == held.tobytes()


def test_a_shape_set_between_two_edits_resets_moments():
    p = perceptron()
    opt = AdamW(p, 0.05)
    run_of(p, opt, compiled=False)()
    with p.edit("cut") as e:
        e.cut_units(p.axes()["first.neurons"].units([0]))
    with p.edit("set") as e:
        e.set_weight("first.weight", lambda w: np.concatenate([w, w[:2]]))
        e.set_weight("second.weight", lambda w: np.concatenate([w, w[:, :2]], axis=1))
    with p.edit("cut") as e:
        e.cut_units(p.axes()["first.neurons"].units([0]))
    assert p.weights["first.weight"].shape == (5, 3)
    assert opt.state_of(next(p.parameters())).steps.item() == 0


def test_masters_follow_edits_and_take_new_rows_from_the_parameter():
    p = low(np.arange(6, dtype=np.float32).reshape(3, 2))
    opt = SGD([p], 0.001, momentum=0.9)
    p.grad = Tensor(from_numpy(np.ones((3, 2), np.float32)))
    opt.step()
    master = opt.state_of(p).master
    assert master is not None
    kept = master.numpy()[[1]].copy()
    after = low(np.concatenate([p.data.to_numpy("float32")[[1]], np.full((1, 2), 7.0, "f4")])).data
    p.reshape_to(after, {0: np.array([1, -1])})
    assert p.grad is None
    p.grad = Tensor(from_numpy(np.zeros((2, 2), np.float32)))
    opt.step()
    master = opt.state_of(p).master
    assert master is not None
    np.testing.assert_allclose(master.numpy(), np.concatenate([kept - 0.0009, [[7.0, 7.0]]]), rtol=1e-6)


# -- parameters that are replaced --------------------------------------------------------------------------------------
def replace_weight(p: gw.Program, *, keep_undo: bool = True) -> ref[Any]:
    """Put a new parameter under the name and key of the old one; return the new one, weakly."""
    with p.edit("another", keep_undo=keep_undo) as e:
        old, value = p.node("w"), values(len(p.journal))[0][:3] * 1.0
        (edge,) = p.out_edges(old)
        between = e.const("between", value)
        e.rewire(edge, between)
        e.remove(old)
        e.rewire(edge, e.param("w", value))
        e.remove(between)
    return ref(p.weights[p.key(p.node("w"))])


@pytest.mark.parametrize("compiled", [False, True])
def test_the_state_of_a_parameter_goes_with_the_parameter(compiled: bool) -> None:
    """A thousand replacements hold as much memory as one, unless an undo can bring them back."""
    p = program()
    opt, x = AdamW(p, 0.1), np.ones((2, 3), np.float32)
    step = gw.compile_step(p, lambda y: (y * y).sum(), opt, {"x": (2, 3)}) if compiled else None

    def run() -> None:
        if step is not None:
            step(x=x)
            return
        opt.zero_grad()
        (p(x=x)["y"] ** 2.0).sum().backward()
        opt.step()

    held, moments = [], []
    for _ in range(20):
        run()
        held.append(replace_weight(p, keep_undo=False))
        moments.append(ref(opt.state_of(next(p.parameters())).moments["m"]))
    run()
    gc.collect()
    assert [sum(r() is not None for r in refs) for refs in (held, moments)] == [1, 1]
    assert len(opt.state) == 1

    (last,) = (r() for r in held if r() is not None)
    then = opt.state_of(last).moments["m"].numpy().tobytes()
    replace_weight(p)
    run()
    gc.collect()
    assert len(opt.state) == 2  # undo can bring it back
    p.undo()
    assert next(p.parameters()) is last
    assert opt.state_of(last).moments["m"].numpy().tobytes() == then


def test_names_of_a_saved_training_depend_on_the_present_parameters_only(tmp_path: Path) -> None:
    p = program()
    opt, x = AdamW(p, 0.1), np.ones((2, 3), np.float32)
    step = gw.compile_step(p, lambda y: (y * y).sum(), opt, {"x": (2, 3)})
    step(x=x)
    with p.edit("away") as e:
        kept = p.weights["w"]
        e.set_weight("w", values(3)[0][:3] * 2.0)
    other = Parameter(from_numpy(np.ones(3, "f4")), name=kept.name)
    opt.add_param_group({"params": [other]})  # another of that name, then gone
    assert len(opt.variables()) == 2 + 6
    del opt.param_groups[1]
    gw.save_state(tmp_path / "state", p, opt)
    assert gw.load_state(tmp_path / "state", p, AdamW(p, 0.1)) == 0

    replace_weight(p)
    step(x=x)
    gw.save_state(tmp_path / "state", p, opt)
    p.save(tmp_path / "program")
    again = gw.load(tmp_path / "program")
    fresh = AdamW(again, 0.1)
    gw.load_state(tmp_path / "state", again, fresh)
    (mine,), (its,) = p.parameters(), again.parameters()
    assert fresh.state_of(its).moments["m"].numpy().tobytes() == opt.state_of(mine).moments["m"].numpy().tobytes()
    assert fresh.state_of(its).steps.item() == 1
