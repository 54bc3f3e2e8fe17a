"""Parameters as one vector, and sequences as one tensor, against torch; values and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import nn
from graphwright.errors import ShapeError, UsageError
from values import grad_of

rng = np.random.default_rng(0)
NET: Any = lambda home: home.Sequential(home.Linear(3, 4), home.BatchNorm1d(4), home.Linear(4, 2))  # noqa: E731
LENGTHS = [(5, 2, 7), (1,), (3, 0, 3)]


def test_a_vector_of_parameters_matches_torch() -> None:
    mine, theirs = NET(nn), NET(torch.nn)
    mine.load_state_dict({k: v.numpy() for k, v in theirs.state_dict().items()})
    vector, other = (
        home.utils.parameters_to_vector(net.parameters()) for home, net in ((nn, mine), (torch.nn, theirs))
    )
    np.testing.assert_array_equal(vector.detach().numpy(), other.detach().numpy())
    for v in (vector, other):
        (v * v).sum().backward()
    for p, q in zip(mine.parameters(), theirs.parameters(), strict=True):
        np.testing.assert_allclose(grad_of(p).numpy(), grad_of(q).numpy(), rtol=1e-6)
    held, new = list(mine.parameters()), rng.normal(size=vector.shape).astype("f4")
    nn.utils.vector_to_parameters(gw.tensor(new), mine.parameters())
    torch.nn.utils.vector_to_parameters(torch.from_numpy(new), theirs.parameters())
    for p, q, old in zip(mine.parameters(), theirs.parameters(), held, strict=True):
        assert p is old
        np.testing.assert_array_equal(p.numpy(), q.detach().numpy())


@pytest.mark.parametrize("shape", [(33,), (35,), (34, 1)], ids=str)
def test_a_vector_of_another_size_changes_nothing(shape: tuple[int, ...]) -> None:
    net = NET(nn)
    before = nn.utils.parameters_to_vector(net.parameters()).numpy()
    assert before.shape == (34,)
    with pytest.raises(ShapeError):
        nn.utils.vector_to_parameters(gw.zeros(*shape), net.parameters())
    np.testing.assert_array_equal(nn.utils.parameters_to_vector(net.parameters()).numpy(), before)


@pytest.mark.parametrize("rest", [(), (2,), (2, 3)], ids=str)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("side", ["right", "left"])
def test_padded_sequences_match_torch(side: str, batch_first: bool, lengths: Any, rest: tuple[int, ...]) -> None:
    rows = [rng.normal(size=(n, *rest)) for n in lengths]
    mine = [gw.tensor(r, requires_grad=True) for r in rows]
    theirs = [torch.tensor(r, requires_grad=True) for r in rows]
    made = nn.utils.rnn.pad_sequence(mine, batch_first, -1.5, side)
    other: Any = torch.nn.utils.rnn.pad_sequence(theirs, batch_first, -1.5, side)
    np.testing.assert_array_equal(made.detach().numpy(), other.detach().numpy())
    (made * made * made).sum().backward()
    (other * other * other).sum().backward()
    for a, b in zip(mine, theirs, strict=True):
        np.testing.assert_allclose(grad_of(a).numpy(), grad_of(b).numpy(), rtol=1e-12)
    if side == "right":
        sizes = gw.tensor(np.array(lengths)) if batch_first else list(lengths)
        for a, b in zip(nn.utils.rnn.unpad_sequence(made, sizes, batch_first), rows, strict=True):
            np.testing.assert_array_equal(a.detach().numpy(), b)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda u: u.pad_sequence([]), UsageError),
        (lambda u: u.pad_sequence([gw.zeros(2)], padding_side="both"), UsageError),
        (lambda u: u.pad_sequence([gw.zeros(2, 3), gw.zeros(2, 4)]), ShapeError),
        (lambda u: u.pad_sequence([gw.tensor(1.0)]), ShapeError),
        (lambda u: u.unpad_sequence(gw.zeros(4, 2), [4]), ShapeError),
        (lambda u: u.unpad_sequence(gw.zeros(4, 2), [4, 5]), ShapeError),
        (lambda u: u.unpad_sequence(gw.zeros(4, 2), [4, -1]), ShapeError),
    ],
)
def test_sequences_that_do_not_fit_are_refused(call: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        call(nn.utils.rnn)


def test_functional_call_uses_other_parameters_as_in_torch() -> None:
    x, results = np.random.default_rng(0).standard_normal((3, 2)).astype("f4"), []
    weights: dict[str, np.ndarray] = {}
    for lib, call in ((torch, torch.func.functional_call), (gw, gw.nn.utils.functional_call)):
        lib: Any
        net = lib.nn.Sequential(lib.nn.Linear(2, 4), lib.nn.BatchNorm1d(4), lib.nn.Linear(4, 1)).eval()
        if not weights:
            weights = {n: p.detach().numpy() + 1 for n, p in net.named_parameters()}
        params = {n: lib.tensor(w) for n, w in weights.items()}
        own = {n: p.detach().numpy().copy() for n, p in net.named_parameters()}
        loss = lambda p, net=net, call=call, lib=lib: (call(net, p, (lib.tensor(x),)) ** 2).sum()  # noqa: E731
        grads = lib.func.grad(loss)(params)
        results.append([loss(params).item(), *(grads[n].numpy() for n in sorted(grads))])
        assert all(np.array_equal(p.detach().numpy(), own[n]) for n, p in net.named_parameters())
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4)
    with pytest.raises(UsageError, match="names"):
        gw.nn.utils.functional_call(gw.nn.Linear(1, 1), {"w": gw.zeros(1)}, gw.zeros(1, 1))
    with pytest.raises(ShapeError):
        gw.nn.utils.functional_call(gw.nn.Linear(1, 1), {"weight": gw.zeros(1)}, gw.zeros(1, 1))
