"""The axes table against the ops themselves: what a row states about indices holds for the values at them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright.array import from_numpy
from graphwright.ops import OPS, call
from graphwright.ops.axes import Atom, AxesUse, atoms, chain, known, product, resized, resolve, same, size, spread

ROWS = [name for name, op in OPS.items() if op.axes is not None]


def test_every_op_has_an_axis_rule_or_a_reason():
    for name, op in OPS.items():
        assert op.axes is not None or op.why.get("axes"), name


def used(name: str, seed: int) -> tuple[list[np.ndarray], dict[str, Any], AxesUse, list[tuple]]:
    """A sample of an op, and what its row says of it."""
    op = OPS[name]
    operands, attrs = op.sample(np.random.default_rng(seed))
    operands, attrs = [np.asarray(x) for x in operands], op.complete(attrs)
    ins = [tuple(Atom(n) for n in x.shape) for x in operands]
    specs = op.specs([from_numpy(x).spec for x in operands], attrs)
    kinds = [from_numpy(x).dtype for x in operands]
    use = AxesUse(ins, [s.shape for s in specs], attrs, [False] * len(ins), [None] * len(ins), dtypes=kinds)
    assert op.axes is not None
    outs = [tuple(map(resolve, dims)) for dims in op.axes(use)]
    use.ins = [tuple(map(resolve, dims)) for dims in ins]
    assert [tuple(map(size, dims)) for dims in outs] == [s.shape for s in specs]
    return operands, attrs, use, outs


def computed(name: str, operands: list[np.ndarray], attrs: dict[str, Any]) -> list[np.ndarray]:
    result = call(name, *(gw.tensor(x) for x in operands), **attrs)
    return [r.numpy() for r in (result if isinstance(result, tuple) else (result,))]


def taken(x: np.ndarray, dims: tuple, indices: dict[Atom, np.ndarray]) -> np.ndarray:
    for axis, term in enumerate(dims):
        if any(a in indices for a in atoms(term)):
            x = np.take(x, spread(term, indices), axis)
    return np.array(x, order="C")


def size_after(term: Any, indices: dict[Atom, np.ndarray]) -> Any:
    if isinstance(term, tuple):
        return tuple(size_after(t, indices) for t in term)
    return resized(resolve(term), indices)


@pytest.mark.parametrize("name", ROWS)
def test_selecting_indices_commutes_with_the_op(name):
    """Some indices of an axis, in any order: computing on them gives those indices of the result.

    Where a sum ends the axis, the others are zero in what it sums.
    """
    checked = 0
    for seed in range(12):
        operands, attrs, use, outs = used(name, seed)
        facts = [(n.fact, a) for n in use.notes for a in atoms(resolve(n.term))]
        bound = {id(a) for fact, a in facts if fact in ("frozen", "mixed")}
        rng = np.random.default_rng(seed)
        free = {a for dims in (*use.ins, *outs) for t in dims for a in atoms(t) if id(a) not in bound and known(a) > 1}
        for atom in sorted(free, key=known):
            if all(atom not in atoms(t) for dims in use.ins for t in dims) and name not in ("expand", "tile"):
                continue  # an axis that only the result has
            indices = {atom: rng.permutation(known(atom))[: max(1, known(atom) - 1)]}
            whole = [x.copy() for x in operands]
            for note in use.notes:
                if note.fact == "summed" and any(a is atom for a in atoms(resolve(note.term))):
                    for port, axis in note.ends:
                        gone = np.setdiff1d(np.arange(whole[port].shape[axis]), spread(use.ins[port][axis], indices))
                        whole[port][(slice(None),) * axis + (gone,)] = 0
            sizes = {name: size_after(term, indices) for name, term in use.sizes.items()}
            fewer = [taken(x, dims, indices) for x, dims in zip(operands, use.ins, strict=True)]
            got = computed(name, fewer, {**attrs, **sizes})
            for value, want, dims in zip(got, computed(name, whole, attrs), outs, strict=True):
                np.testing.assert_allclose(value, taken(want, dims, indices), rtol=1e-9, atol=1e-9)
                checked += 1
    assert bool(checked) != (name in ALL_BOUND)


ALL_BOUND = {
    *("reshape", "rope_dynamic", "bincount", "dispatch", "expert_probe"),
    *("uniform", "normal", "gumbel", "randint", "bernoulli", "dropout", "multinomial"),
}
"""Ops all of whose axes are bound, in samples at least; a reshape is tested below."""


# -- terms -------------------------------------------------------------------------------------------------------------
@given(st.lists(st.integers(2, 4), min_size=2, max_size=4), st.data())
def test_a_reshape_couples_common_factors(sizes, data):
    """Two ways to write one product agree at every index."""
    cut = data.draw(st.integers(1, len(sizes) - 1))
    factors = [Atom(n) for n in sizes]
    left = [product(*factors[:cut]), product(*factors[cut:])]
    right = [Atom(n) for n in (sizes[0], int(np.prod(sizes[1:])))]
    assert same(product(*left), product(*right))
    atom = data.draw(st.sampled_from([resolve(f) for f in factors]))
    assert isinstance(atom, Atom)
    indices = {atom: np.array(data.draw(st.permutations(range(known(atom)))))}
    np.testing.assert_array_equal(spread(resolve(product(*left)), indices), spread(resolve(product(*right)), indices))
    grid = np.arange(int(np.prod(sizes))).reshape(sizes)
    axis = [resolve(f) for f in factors].index(atom)
    np.testing.assert_array_equal(
        spread(resolve(product(*left)), indices), np.take(grid, indices[atom], axis).reshape(-1)
    )


@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.data())
def test_slices_of_a_concatenation_couple_with_its_parts(sizes, data):
    parts = [Atom(n) for n in sizes]
    whole = chain(*parts)
    start = data.draw(st.integers(0, sum(sizes) - 1))
    length = data.draw(st.integers(1, sum(sizes) - start))
    taken = Atom(length)
    assert same(whole, chain(Atom(start), taken, Atom(sum(sizes) - start - length)))
    assert sum(known(a) for a in atoms(resolve(taken))) == length
    assert sum(known(a) for p in parts for a in atoms(resolve(p))) == sum(sizes)


def test_halves_of_a_rotation_are_one_axis():
    d, first, second = Atom(8), Atom(4), Atom(4)
    assert same(d, chain(first, second))
    assert same(d, chain(second, first))
    half = resolve(first)
    assert half is resolve(second)
    assert isinstance(half, Atom)
    assert spread(resolve(d), {half: np.array([0, 2])}).tolist() == [0, 2, 4, 6]


def test_splits_without_a_common_factor_are_refused():
    assert not same(product(Atom(4), Atom(9)), product(Atom(6), Atom(6)))
    assert not same(Atom(3), Atom(4))


def test_an_empty_axis_does_not_contain_itself():
    empty = Atom(0)
    assert not same(empty, product(Atom(3), empty))
    assert resolve(empty) is empty
