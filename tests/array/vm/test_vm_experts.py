"""The VM's loops for mixtures of experts: values and gradients of ATen's kernels, bits, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from vm_forms import view

from graphwright.array import NDArray, from_numpy
from graphwright.array.cpu import experts as kernels
from graphwright.array.cpu.by_vm import by_vm
from graphwright.array.cpu.kernel import KERNELS
from graphwright.array.vm.encode.experts import EXPERTS
from graphwright.array.vm.machine import part
from graphwright.ops import OPS, compute
from graphwright.ops.experts import ACTIVATIONS


@contextmanager
def on_aten() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "by_vm", lambda *args: None)
        yield


@pytest.fixture(autouse=True)
def _called(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test runs code of the VM."""
    part.require()
    found: list[object] = []

    def counted(*args: Any) -> Any:
        call = by_vm(*args)
        found.append(call)
        return call

    monkeypatch.setattr(kernels, "by_vm", counted)
    yield
    assert any(call is not None for call in found)


def run(name: str, arrays: Sequence[NDArray], **attrs: Any) -> list[np.ndarray]:
    op = OPS[name]
    return [out.to_numpy() for out in compute(op, list(arrays), op.complete(attrs))]


def dispatched(choice: np.ndarray, experts: int) -> list[np.ndarray]:
    return run("dispatch", [from_numpy(choice)], experts=experts)


def operands(
    rng: np.random.Generator, ids: np.ndarray, c: int, widths: Sequence[int], kind: str = "gated", bias: bool = False
) -> list[NDArray]:
    """Operands of `expert_mlp`; every other matrix is column-major, as after a transposition."""
    runs = dispatched(ids, len(widths))
    found: list[np.ndarray] = [rng.normal(size=(len(ids), c)), *runs, rng.normal(size=ids.shape)]
    for inner in widths:
        for shape in [(inner, c)] * (1 if kind == "mlp" else 2) + [(c, inner)]:
            matrix = rng.normal(size=shape) * (3 if kind == "oai" else 1) / np.sqrt(shape[1])
            found.append(np.asfortranarray(matrix) if len(found) % 2 else matrix)
            found += [rng.normal(size=shape[0])] if bias else []
    return [from_numpy(a.astype("f4", order="K") if a.dtype.kind == "f" else a) for a in found]


def results(ins: list[NDArray], g: NDArray, attrs: dict[str, Any]) -> list[np.ndarray]:
    """The values, all gradients, and what `expert_probe` measures."""
    wanted = tuple(i for i, x in enumerate(ins) if x.dtype.is_float)
    probe = run("expert_probe", [ins[0], g, *ins[1:4], *ins[5:]], **attrs)
    return run("expert_mlp", ins, **attrs) + run("expert_mlp_backward", [g, *ins], **attrs, wanted=wanted) + probe


def chosen(rng: np.random.Generator, tokens: int, experts: int, k: int) -> np.ndarray:
    return np.argsort(rng.random((tokens, experts)), axis=1)[:, :k].copy()


CASES = {
    "ragged": (chosen, 17, 9, (5, 6, 0, 8)),
    "wide": (chosen, 70, 40, (33, 20, 47)),
    "tiles": (chosen, 1100, 20, (33, 16)),
    "one expert": (lambda rng, n, e, k: np.zeros((n, 1), np.int64), 6, 5, (7,)),
    "one takes all": (lambda rng, n, e, k: np.full((n, 1), 2), 9, 5, (4, 4, 4, 4)),
    "none chosen": (lambda rng, n, e, k: np.full((n, 2), -1), 9, 5, (4, 4)),
    "no tokens": (lambda rng, n, e, k: np.zeros((0, 2), np.int64), 0, 5, (4, 4)),
    "many empty": (chosen, 3, 5, (4,) * 64),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", ["gated", "mlp", "oai"])
def test_values_and_gradients_of_aten(kind: str, case: str, bias: bool) -> None:
    draw, tokens, c, widths = CASES[case]
    rng = np.random.default_rng(len(case))
    ids = draw(rng, tokens, len(widths), min(2, len(widths)))
    for act in ACTIVATIONS if kind != "oai" else ("silu",):
        ins = operands(rng, ids, c, widths, kind, bias)
        g = from_numpy(rng.normal(size=(tokens, c)).astype("f4"))
        attrs = {"kind": kind, "act": act, "bias": bias}
        found = results(ins, g, attrs)
        with on_aten():
            expected = results(ins, g, attrs)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * (1 + np.abs(b).max(initial=0)))


def test_dispatch_of_ids_and_masks_has_the_order_of_aten() -> None:
    rng = np.random.default_rng(0)
    ids = chosen(rng, 40, 7, 3)
    ids[rng.random(ids.shape) < 0.3] = -1
    for choice in (ids, rng.random((40, 7)) < 0.4, ids[:0], np.zeros((5, 7), bool)):
        found = dispatched(choice, 7)
        with on_aten():
            expected = dispatched(choice, 7)
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b)


def test_bits_depend_on_neither_the_run_nor_the_number_of_threads() -> None:
    rng = np.random.default_rng(1)
    ids = chosen(rng, 700, 9, 2)
    ids[:400] = (0, 3)  # experts with many chunks
    ins = operands(rng, ids, 48, (64,) * 9)
    g = from_numpy(rng.normal(size=(700, 48)).astype("f4"))
    attrs, threads, seen = {"kind": "gated", "act": "silu", "bias": False}, torch.get_num_threads(), set()
    work = EXPERTS.workspace([view(ins[0])], [view(a) for a in ins], OPS["expert_mlp"].complete(attrs))
    assert threads < 2 or work[0].shape[0] > 1, "long enough for several workers"
    try:
        for i in range(20):
            torch.set_num_threads(1 + i % 3)
            seen.add(b"".join(a.tobytes() for a in results(ins, g, attrs)))
    finally:
        torch.set_num_threads(threads)
    assert len(seen) == 1


def test_scratch_does_not_grow_with_the_number_of_experts() -> None:
    rng = np.random.default_rng(2)
    attrs = OPS["expert_mlp"].complete({})

    def scratch(experts: int) -> int:
        ins = [a.spec for a in operands(rng, chosen(rng, 64, experts, 2), 16, (8,) * experts)]
        work = KERNELS["expert_mlp"].work
        assert work is not None
        return sum(spec.nbytes for spec in work([ins[0]], ins, attrs))

    assert scratch(128) - scratch(8) == 8 * 120, "a counter each"


@pytest.mark.parametrize(("slot", "values", "words"), [
    (1, [0, 3, 2], "offsets"), (1, [1, 2, 3], "offsets"), (1, [0, 2, 99], "offsets"),
    (2, [0, 1, 9, 0], "row"), (3, [0, 1, -1, 0], "pair"),
])  # fmt: skip
def test_invalid_runs_are_refused(slot: int, values: list[int], words: str) -> None:
    rng = np.random.default_rng(3)
    ins = operands(rng, np.array([[0], [1], [0], [1]]), 5, (4, 4))
    ins[slot] = from_numpy(np.array(values))
    for call in (run, partial(run, wanted=(0,))):
        name, given = ("expert_mlp", ins) if call is run else ("expert_mlp_backward", [ins[0], *ins])
        with pytest.raises(IndexError, match=words):
            call(name, given)


def test_an_id_beyond_the_experts_is_refused() -> None:
    with pytest.raises(IndexError, match="expected -1 to 2, got 5"):
        dispatched(np.array([[0, 5], [1, 3]]), 3)
