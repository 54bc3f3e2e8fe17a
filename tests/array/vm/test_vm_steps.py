"""Optimizer steps of the VM against ATen: in place or not, and skipped if the flag is set."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vm_forms import encode, view, vm

from graphwright.array import NDArray, from_numpy
from graphwright.ops import OPS, compute

SHAPES = [(5, 7), (3,), (), (40,)]
MATRICES = [(5, 7), (9, 4), (1, 3), (16, 16)]
FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "adamw": ("adamw_step", {"weight_decay": 0.1}),
    "adamw amsgrad": ("adamw_step", {"amsgrad": True, "maximize": True}),
    "adam": ("adam_step", {"weight_decay": 0.1}),
    "adam amsgrad": ("adam_step", {"amsgrad": True, "eps": 1e-3}),
    "sgd": ("sgd_step", {"weight_decay": 0.1}),
    "sgd momentum": ("sgd_step", {"momentum": 0.9, "dampening": 0.3, "maximize": True}),
    "sgd nesterov": ("sgd_step", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "rmsprop": ("rmsprop_step", {"weight_decay": 0.1}),
    "rmsprop momentum": ("rmsprop_step", {"momentum": 0.9, "centered": True, "eps": 1e-2}),
    "lion": ("lion_step", {"weight_decay": 0.1}),
    "lion late": ("lion_step", {"beta1": 0.3, "beta2": 0.4, "maximize": True}),
    "muon": ("muon_step", {}),
    "muon plain": ("muon_step", {"nesterov": False, "adjust": "match_rms_adamw", "maximize": True}),
}
ROUNDED = {"muon": 2e-5, "muon plain": 2e-5}
"""Absolute error after all steps; else that of a rounding per step."""


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_twenty_steps_match_aten(form: str, in_place: bool) -> None:
    """A step that found an infinity changes nothing, counts neither."""
    name, given = FORMS[form]
    attrs, rng = OPS[name].complete(given), np.random.default_rng(0)
    shapes = MATRICES if name == "muon_step" else SHAPES
    columns = _moments(name, attrs)
    state = [*(rng.normal(size=s) for s in shapes), *(np.zeros(s) for s in (*shapes * columns, *[()] * len(shapes)))]
    ours = [from_numpy(np.asarray(a, "f4")) for a in state]
    theirs = [a.copy() for a in ours]
    for step in range(1, 21):
        grads = [from_numpy(np.asarray(rng.normal(size=s), "f4")) for s in shapes]
        scalars = [from_numpy(np.asarray(0.01)), from_numpy(np.asarray(step % 10 == 0, np.float32))]
        given_outs = ours if in_place else [a.copy() for a in ours]
        outs = vm(name, [*scalars, *grads, *ours], attrs, given_outs)
        assert outs is not None
        ours = outs
        theirs = list(compute(OPS[name], [*scalars, *grads, *theirs], attrs))
    assert [steps.item() for steps in ours[-len(shapes) :]] == [18] * len(shapes)
    for mine, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(mine.to_numpy(), other.to_numpy(), rtol=5e-6, atol=ROUNDED.get(form, 1e-6))


@pytest.mark.parametrize("form", FORMS)
def test_a_flag_for_each_parameter_skips_that_one_alone(form: str) -> None:
    name, given = FORMS[form]
    attrs, rng = OPS[name].complete(given), np.random.default_rng(0)
    shapes = MATRICES if name == "muon_step" else SHAPES
    n, flags = len(shapes), from_numpy(np.asarray([0, 1, 0, 1], "f4"))
    moments = _moments(name, attrs)
    state = [*(rng.uniform(0.1, 1, size=s) for s in shapes * (1 + moments)), *[2.0] * n]
    state = [from_numpy(np.asarray(a, "f4")) for a in state]
    operands = [from_numpy(np.asarray(0.01)), flags, *(a.copy() for a in state[:n]), *state]
    ours, theirs = vm(name, operands, attrs), compute(OPS[name], operands, attrs)
    assert ours is not None
    for k, (old, mine, other) in enumerate(zip(state, ours, theirs, strict=True)):
        np.testing.assert_allclose(mine.to_numpy(), other.to_numpy(), rtol=5e-6, atol=ROUNDED.get(form, 1e-6))
        if k % n in (1, 3):
            assert mine.tobytes() == old.tobytes() == other.tobytes()
        elif k < n:
            assert mine.tobytes() != old.tobytes() != other.tobytes()


@pytest.mark.parametrize("at", [None, 0, 15, 16, 39])
@pytest.mark.parametrize("value", [1e-45, np.nan, -np.inf])
def test_one_entry_that_is_not_zero_is_found(at: int | None, value: float) -> None:
    grads = [np.zeros(n, "f4") for n in (40, 3, 0)]
    grads[1][:] = -0.0
    if at is not None:
        grads[0][at] = value
    for found in (0.0, 1.0):
        ins = [from_numpy(np.asarray(a, "f4")) for a in (found, *grads)]
        wanted = [max(found, float(at is None)), 1.0, 1.0]
        for flags in (vm("zero_check", ins, {}), compute(OPS["zero_check"], ins, {})):
            assert flags is not None
            assert flags[0].to_numpy().tolist() == wanted


def _moments(name: str, attrs: dict[str, Any]) -> int:
    """How many columns of moments a step has, by the shapes it takes."""
    return {"adam_step": 2, "adamw_step": 2, "rmsprop_step": 1, "sgd_step": 0}.get(name, 1) + sum(
        bool(attrs.get(flag)) for flag in ("amsgrad", "centered") + (("momentum",) if name != "muon_step" else ())
    )


@pytest.mark.parametrize("form", [form for form in FORMS if FORMS[form][0] != "muon_step"])
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_nan_gradients_behave_as_on_aten(form: str) -> None:
    name, given = FORMS[form]
    attrs, grad = OPS[name].complete(given), np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1e-45, 3e38, -3e38], "f4")
    state = [np.ones(8, "f4"), *[np.zeros(8, "f4")] * _moments(name, attrs), np.float32(0)]
    ins = [from_numpy(np.asarray(x)) for x in (0.01, np.float32(0), grad, *state)]
    for mine, other in zip(vm(name, ins, attrs) or (), compute(OPS[name], ins, attrs), strict=True):
        np.testing.assert_allclose(mine.to_numpy(), other.to_numpy(), rtol=5e-6, atol=1e-6)


def test_matrices_larger_than_the_scratch_have_no_vm_form() -> None:
    attrs = OPS["muon_step"].complete({})

    def step(rows: int, columns: int) -> bool:
        matrix, scalar = np.zeros((rows, columns), np.float32), np.zeros((), np.float32)
        columns_of = [from_numpy(a) for a in (matrix, matrix, matrix, scalar)]
        operands: list[NDArray] = [from_numpy(np.asarray(0.1)), from_numpy(scalar), *columns_of]
        return encode("muon_step", [view(a) for a in columns_of[1:]], [view(a) for a in operands], attrs) is not None

    assert step(64, 64)
    assert step(8, 1000)
    assert not step(65, 64)
    assert not step(1, 0)


def test_averages_move_towards_their_sources() -> None:
    rng = np.random.default_rng(0)
    for tau in (0.1, 0.75, 1.0):
        pairs = [from_numpy(rng.normal(size=n).astype("f4")) for n in (1, 16, 33, 1, 16, 33)]
        arrays = [from_numpy(np.asarray(tau)), *pairs]
        found, truth = vm("ema_step", arrays, {}), compute(OPS["ema_step"], arrays, {})
        assert found is not None
        for mine, other in zip(found, truth, strict=True):
            np.testing.assert_allclose(mine.to_numpy(), other.to_numpy(), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("form", ["adamw", "adam amsgrad", "sgd momentum", "rmsprop momentum", "lion"])
@pytest.mark.parametrize("n", [1, 40])
def test_subnormal_moments_are_flushed_to_zero(form: str, n: int) -> None:
    """Moments decay without a gradient: they end as 0 and never stay below the normal numbers."""
    name, given = FORMS[form]
    attrs = OPS[name].complete(given | {"weight_decay": 0.0})
    columns = _moments(name, attrs)
    zeros = [np.zeros(n), np.zeros(n), *([np.full(n, 3e-38)] * columns), np.zeros(())]
    members = [from_numpy(a.astype("f4")) for a in zeros]
    scalars = [from_numpy(np.asarray(0.01)), from_numpy(np.zeros((), np.float32))]
    for _ in range(40):
        assert vm(name, [*scalars, *members], attrs, members[1:]) is not None
        for moment in members[2:-1]:
            size = np.abs(moment.to_numpy())
            assert ((size == 0) | (size >= np.finfo("f4").tiny)).all()


def test_nan_moments_stay_nan() -> None:
    for n in (1, 40):
        nan, zero, count = (from_numpy(np.full(s, v, np.float32)) for s, v in ((n, np.nan), (n, 0.0), ((), 0.0)))
        members = [nan, zero.copy(), zero.copy(), zero.copy(), count]
        scalars = [from_numpy(np.asarray(0.01)), from_numpy(np.zeros((), np.float32))]
        vm("adamw_step", [*scalars, *members], OPS["adamw_step"].complete({}), members[1:])
        assert all(np.isnan(m.to_numpy()).all() for m in members[1:4])
