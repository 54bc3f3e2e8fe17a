"""Loss and activation modules against those of torch: values, gradients of inputs, saved names."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.autograd import tensor
from graphwright.testing.oracle import assert_close

R = np.random.default_rng(0)
X, Y, Z = (R.standard_normal((5, 4)) for _ in range(3))
P, Q = (1 / (1 + np.exp(-v)) for v in (X, Y))
IDS, SIGN, W = np.array([0, 3, 1, 2, 3]), np.array([1, -1, 1, 1, -1]), np.array([0.5, 1.0, 2.0, 1.5])
LOGP = X - np.log(np.exp(X).sum(1, keepdims=True))
BITS = (Y > 0).astype(np.float64)

CASES: list[tuple[str, dict[str, Any], tuple[np.ndarray, ...]]] = [
    ("L1Loss", {}, (X, Y)),
    ("MSELoss", {"reduction": "sum"}, (X, Y)),
    ("SmoothL1Loss", {"beta": 0.5}, (X, Y)),
    ("HuberLoss", {"delta": 0.7}, (X, Y)),
    ("CrossEntropyLoss", {"weight": W, "ignore_index": 1, "label_smoothing": 0.1}, (X, IDS)),
    ("NLLLoss", {"weight": W}, (LOGP, IDS)),
    ("BCELoss", {"weight": W}, (P, Q)),
    ("BCEWithLogitsLoss", {"pos_weight": W}, (X, BITS)),
    ("KLDivLoss", {"reduction": "batchmean"}, (LOGP, Q)),
    ("PoissonNLLLoss", {"full": True}, (X, 4 * Q)),
    ("GaussianNLLLoss", {"full": True}, (X, Y, P)),
    ("CosineEmbeddingLoss", {"margin": 0.1}, (X, Y, SIGN)),
    ("MarginRankingLoss", {"margin": 0.1}, (X[:, 0], Y[:, 0], SIGN)),
    ("HingeEmbeddingLoss", {"margin": 0.5}, (X, np.where(BITS > 0, 1, -1))),
    ("SoftMarginLoss", {}, (X, 2 * BITS - 1)),
    ("MultiMarginLoss", {"p": 2, "weight": W}, (X, IDS)),
    ("MultiLabelSoftMarginLoss", {}, (X, BITS)),
    ("TripletMarginLoss", {"swap": True}, (X, Y, Z)),
    ("CosineSimilarity", {"dim": 0}, (X, Y)),
    ("PairwiseDistance", {"p": 1.0}, (X, Y)),
    ("ReLU6", {}, (4 * X,)),
    ("Hardtanh", {"min_val": -0.5}, (X,)),
    ("Hardsigmoid", {}, (4 * X,)),
    ("Hardswish", {}, (4 * X,)),
    ("SELU", {}, (X,)),
    ("CELU", {"alpha": 0.7}, (X,)),
    ("Mish", {}, (X,)),
    ("Softsign", {}, (X,)),
    ("Tanhshrink", {}, (X,)),
    ("Softshrink", {"lambd": 0.3}, (X,)),
    ("Hardshrink", {"lambd": 0.3}, (X,)),
    ("Threshold", {"threshold": 0.1, "value": 2.0}, (X,)),
    ("GLU", {"dim": 1}, (X,)),
    ("Softmin", {"dim": 1}, (X,)),
    ("PReLU", {"num_parameters": 4}, (X,)),
]

FLOAT32_CONSTANTS = {"Hardsigmoid", "CELU"}
"""Modules in which torch rounds a constant to float32 for float64 operands."""


@pytest.mark.parametrize(("name", "options", "operands"), CASES, ids=[c[0] for c in CASES])
def test_module_matches_torch(name: str, options: dict[str, Any], operands: tuple[np.ndarray, ...]) -> None:
    given = {k: torch.from_numpy(v) if isinstance(v, np.ndarray) else v for k, v in options.items()}
    theirs = getattr(torch.nn, name)(**given).double()
    mine = getattr(gw.nn, name)(**options).to("float64")
    assert mine.state_dict().keys() == theirs.state_dict().keys()
    xs = [tensor(operands[0], requires_grad=True), *map(tensor, operands[1:])]
    ts = [torch.tensor(operands[0], requires_grad=True), *map(torch.from_numpy, operands[1:])]
    y, expected = mine(*xs), theirs(*ts)
    scale = 1e3 if name in FLOAT32_CONSTANTS else 1.0
    assert_close(y, expected.detach(), rtol=scale * 1e-10, atol=1e-12)
    (y * y).sum().backward()
    (expected * expected).sum().backward()
    assert_close(xs[0].grad, ts[0].grad, rtol=scale * 1e-9, atol=1e-11)


def test_arguments_are_attributes_and_unknown_ones_are_refused() -> None:
    loss = gw.nn.HuberLoss("sum", 2.0)
    assert (loss.reduction, loss.delta) == ("sum", 2.0)
    with pytest.raises(TypeError, match="gamma"):
        gw.nn.HuberLoss(gamma=1.0)


def test_rrelu_has_the_mean_slope_in_evaluation_and_random_slopes_in_training() -> None:
    layer, x = gw.nn.RReLU(0.1, 0.3), tensor(-np.ones(100))
    slopes = -layer(x).numpy()
    assert slopes.min() >= 0.1
    assert slopes.max() <= 0.3
    assert len(set(slopes)) > 50
    assert_close(layer.eval()(x), -0.2 * np.ones(100), rtol=1e-6)
