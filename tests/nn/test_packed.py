"""Packed sequences against torch: packing, padding, and recurrent layers on sequences of different lengths."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import rnn as theirs

import graphwright as gw
from graphwright.errors import ShapeError, UsageError
from graphwright.nn.utils import rnn as mine

X = np.random.default_rng(0).standard_normal((5, 4, 3)).astype("f4")
LENGTHS = [3, 5, 1, 3]


def same(a: Any, b: Any) -> bool:
    return (a is None and b is None) or np.allclose(np.asarray(a), b.detach().numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("lengths", [[5, 4, 4, 1], LENGTHS])
def test_packing_and_padding_match_torch(batch_first: bool, lengths: list[int]) -> None:
    x = X.swapaxes(0, 1) if batch_first else X
    sort = lengths != sorted(lengths, reverse=True)
    ours = mine.pack_padded_sequence(gw.tensor(x), gw.tensor(lengths), batch_first, enforce_sorted=not sort)
    truth = theirs.pack_padded_sequence(torch.tensor(x.copy()), torch.tensor(lengths), batch_first, not sort)
    assert all(map(same, ours, truth))
    cases: list[dict[str, Any]] = [{}, {"padding_value": -1.0}, {"total_length": 7}]
    for options in cases:
        found = mine.pad_packed_sequence(ours, batch_first, **options)
        assert all(map(same, found, theirs.pad_packed_sequence(truth, batch_first, **options)))
    parts = [gw.tensor(X[:n, i]) for i, n in enumerate(lengths)]
    packed = mine.pack_sequence(parts, enforce_sorted=not sort)
    assert all(map(same, packed, theirs.pack_sequence([torch.tensor(np.asarray(p)) for p in parts], not sort)))
    for a, b in zip(mine.unpack_sequence(packed), parts, strict=True):
        assert np.array_equal(np.asarray(a), np.asarray(b))


CASES: list[tuple[str, dict[str, Any]]] = [
    ("LSTM", {"num_layers": 2, "bidirectional": True}), ("GRU", {"batch_first": True, "bidirectional": True}),
    ("RNN", {"num_layers": 2}), ("LSTM", {"proj_size": 2}),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "options"), CASES)
@pytest.mark.parametrize("state", [False, True])
def test_recurrent_layers_match_torch(kind: str, options: dict[str, Any], state: bool) -> None:
    ours, truth = getattr(gw.nn, kind)(3, 4, **options), getattr(torch.nn, kind)(3, 4, **options)
    ours.load_state_dict({n: v.numpy() for n, v in truth.state_dict().items()})
    found = []
    for lib, rnn, net in ((gw, mine, ours), (torch, theirs, truth)):
        lib: Any
        x = lib.tensor(X, requires_grad=True)
        hx = None
        if state:
            rng = np.random.default_rng(1)
            rows = options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
            sizes = [options.get("proj_size", 4), 4][: 2 if kind == "LSTM" else 1]
            parts = [lib.tensor(rng.standard_normal((rows, 4, n)).astype("f4"), requires_grad=True) for n in sizes]
            hx = tuple(parts) if kind == "LSTM" else parts[0]
        packed = rnn.pack_padded_sequence(x, LENGTHS, enforce_sorted=False)
        out, last = net(packed, hx)
        padded, _ = rnn.pad_packed_sequence(out)
        states = last if isinstance(last, tuple) else (last,)
        total = (padded * padded).sum()
        for s in states:
            total = total + (s * s * s).sum()
        total.backward()
        leaves = [x, *net.parameters(), *([] if hx is None else hx if isinstance(hx, tuple) else [hx])]
        found.append([out.data, padded, *states, *(leaf.grad for leaf in leaves)])
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(np.asarray(a), b.detach().numpy(), rtol=2e-4, atol=2e-5)


def test_invalid_lengths_are_refused() -> None:
    for lengths in ([3, 5, 1, 3], [5, 4, 3], [6, 4, 3, 1], [5, 4, 3, 0]):
        with pytest.raises(UsageError if lengths == LENGTHS else ShapeError):
            mine.pack_padded_sequence(gw.tensor(X), lengths)
    packed = mine.pack_padded_sequence(gw.tensor(X), [5, 4, 3, 1])
    with pytest.raises(UsageError, match="total_length"):
        mine.pad_packed_sequence(packed, total_length=4)
