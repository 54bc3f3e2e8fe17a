"""Layers: running statistics, dropout, tables, losses and initial values; values are in `test_torch_modules`."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import nn
from graphwright.array import from_numpy
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.nn import initial
from values import grad_of

rng = np.random.default_rng(0)
LINES, SHEETS = (rng.normal(size=s).astype(np.float32) for s in ((2, 4, 7), (2, 4, 6, 5)))
X = rng.normal(size=(2, 3, 5)).astype(np.float32)
T = torch.nn


def test_running_statistics_change_only_in_training():
    x = Tensor(from_numpy(SHEETS))
    plain, compiled = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
    run = gw.compile(compiled)
    for train in (True, True, False, True):
        for layer in (plain, compiled):
            layer.train(train)
        np.testing.assert_allclose(run(x).numpy(), plain(x).numpy(), rtol=1e-5, atol=1e-6)
        for a, b in zip(plain.state_dict().values(), compiled.state_dict().values(), strict=True):
            np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)
    assert plain.num_batches_tracked.item() == 3
    before = plain.running_mean.numpy().copy()
    y = plain(x)
    moved = plain.running_mean.numpy().copy()
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    np.testing.assert_array_equal(plain.running_mean.numpy(), moved)
    with gw.mode("eval_grad"):
        plain(x).sum().backward()
    np.testing.assert_array_equal(plain.running_mean.numpy(), moved)
    assert not np.array_equal(before, moved)


def test_dropout_acts_in_training_only():
    x = Tensor(from_numpy(np.ones((400, 300), np.float32)), requires_grad=True)
    layer = nn.Dropout(0.3)
    gw.manual_seed(1)
    y = layer(x)
    kept = y.numpy() != 0
    assert kept.mean() == pytest.approx(0.7, abs=0.005)
    np.testing.assert_allclose(y.numpy()[kept], 1 / 0.7, rtol=1e-6)
    y.sum().backward()
    np.testing.assert_array_equal(grad_of(x).numpy(), y.numpy())
    assert not np.array_equal(layer(x).numpy(), y.numpy())
    gw.manual_seed(1)
    np.testing.assert_array_equal(layer(x).numpy(), y.numpy())
    assert layer.eval()(x) is x
    with gw.mode("train"):
        assert layer(x) is not x
    assert nn.Dropout(0.0)(x) is x
    assert not nn.Dropout(1.0)(x).numpy().any()
    with pytest.raises(UsageError, match="probability"):
        nn.Dropout(1.5)


def test_compiled_dropout_samples_like_eager_steps():
    x = Tensor(from_numpy(np.ones((20, 30), np.float32)))
    net = nn.Sequential(nn.Dropout(0.5), nn.Dropout(0.2))
    run = gw.compile(net)
    gw.manual_seed(7)
    planned = [run(x).numpy() for _ in range(3)]
    gw.manual_seed(7)
    for other in planned:
        np.testing.assert_array_equal(net(x).numpy(), other)
        gw.autograd.rng.next_step()
    assert not np.array_equal(planned[0], planned[1])


def test_norms_refuse_inputs_of_another_rank():
    for layer, values in ((nn.BatchNorm2d(4), LINES), (nn.BatchNorm1d(4), SHEETS), (nn.InstanceNorm1d(4), SHEETS)):
        with pytest.raises(UsageError, match="rank"):
            layer(Tensor(from_numpy(values)))
    with pytest.raises(UsageError, match="more than one value"):
        nn.BatchNorm1d(5)(Tensor(from_numpy(X[:1, 0])))


def test_a_subclass_of_a_layer_checks_the_same_rank():
    class Sharpen(nn.Conv2d):
        """A user's convolution."""

    class Whiten(nn.BatchNorm2d):
        """A user's norm."""

    assert Sharpen(3, 4, 5).weight.shape == (4, 3, 5, 5)
    assert Whiten(3).ranks == (4,)


def test_embedding_equals_torch():
    mine, theirs = nn.Embedding(7, 4), torch.nn.Embedding(7, 4)
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(mine.weight.data.to_numpy().copy()))
    ids = np.array([[1, 1, 6], [0, 1, 3]])
    a, b = mine(Tensor(from_numpy(ids))), theirs(torch.from_numpy(ids))
    np.testing.assert_array_equal(a.numpy(), b.detach().numpy())
    (a * a).sum().backward()
    (b * b).sum().backward()
    np.testing.assert_allclose(grad_of(mine.weight).numpy(), grad_of(theirs.weight).numpy(), rtol=1e-6)


# -- loss --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignore", [-100, 2])
@pytest.mark.parametrize("shape", [(6, 4), (2, 3, 4)])
def test_cross_entropy_equals_torch(reduction, ignore, shape):
    rng = np.random.default_rng(1)
    scores = (rng.normal(size=shape) * 5).astype(np.float32)
    scores.reshape(-1)[:3] = [1000.0, -1000.0, 0.0]
    targets = rng.integers(0, 4, shape[:-1])
    targets.reshape(-1)[1:3] = ignore
    x, y = Tensor(from_numpy(scores.copy()), requires_grad=True), torch.from_numpy(scores.copy()).requires_grad_()
    a = nn.functional.cross_entropy(x, Tensor(from_numpy(targets)), ignore_index=ignore, reduction=reduction, dim=-1)
    flat = torch.nn.functional.cross_entropy(
        y.reshape(-1, 4), torch.from_numpy(targets).reshape(-1), ignore_index=ignore, reduction=reduction
    )
    b = flat.reshape(targets.shape) if reduction == "none" else flat
    np.testing.assert_allclose(a.numpy(), b.detach().numpy(), rtol=1e-5, atol=1e-6)
    (a * 7.0).sum().backward()
    (b * 7.0).sum().backward()
    np.testing.assert_allclose(grad_of(x).numpy(), grad_of(y).numpy(), rtol=1e-4, atol=1e-6)


def test_cross_entropy_of_an_empty_batch_is_nan():
    targets = Tensor(from_numpy(np.full(3, -100)))
    assert np.isnan(nn.functional.cross_entropy(Tensor(from_numpy(np.ones((3, 4), np.float32))), targets).item())


def test_the_padding_row_is_zero_and_gets_no_gradient():
    mine, theirs = nn.Embedding(7, 4, padding_idx=-2), torch.nn.Embedding(7, 4, padding_idx=-2)
    assert not mine.weight.numpy()[5].any()
    with torch.no_grad():
        theirs.weight.copy_(torch.from_numpy(mine.weight.data.to_numpy().copy()))
    ids = np.array([[1, 5, 6], [5, 1, 3]])
    a, b = mine(Tensor(from_numpy(ids))), theirs(torch.from_numpy(ids))
    np.testing.assert_array_equal(a.numpy(), b.detach().numpy())
    ((a + 1) * (a + 1)).sum().backward()
    ((b + 1) ** 2).sum().backward()
    np.testing.assert_allclose(grad_of(mine.weight).numpy(), grad_of(theirs.weight).numpy(), rtol=1e-6)


def test_unknown_reductions_are_refused():
    with pytest.raises(UsageError, match="mean, sum or none"):
        nn.functional.cross_entropy(Tensor(from_numpy(X[0])), Tensor(from_numpy(np.zeros(3, int))), reduction="max")


# -- first values ------------------------------------------------------------------------------------------------------
def test_initial_values_depend_on_names():
    linear = nn.Linear(400, 300, name="a.")
    bound = 1 / 20
    w = linear.weight.data.to_numpy()
    assert np.abs(w).max() <= bound
    assert w.std() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert nn.Embedding(400, 300).weight.data.to_numpy().std() == pytest.approx(1.0, rel=0.02)
    np.testing.assert_array_equal(w, nn.Linear(400, 300, name="a.").weight.data.to_numpy())
    assert not np.array_equal(w, nn.Linear(400, 300, name="b.").weight.data.to_numpy())
    assert not np.array_equal(w, nn.Linear(400, 300, name="a.", seed=1).weight.data.to_numpy())
    assert (nn.RMSNorm(3).weight.data.to_numpy() == 1).all()
    gw.manual_seed(3)
    first, second = nn.Linear(4, 4), nn.Linear(4, 4)
    assert not np.array_equal(first.weight.numpy(), second.weight.numpy())
    gw.manual_seed(3)
    np.testing.assert_array_equal(nn.Linear(4, 4).weight.numpy(), first.weight.numpy())
    gw.manual_seed(4)
    assert not np.array_equal(nn.Linear(4, 4).weight.numpy(), first.weight.numpy())


@pytest.mark.parametrize(
    ("mine", "theirs"),
    [
        (lambda: nn.Linear(40, 300), lambda: T.Linear(40, 300)),
        (lambda: nn.Conv2d(8, 300, 3, groups=2), lambda: T.Conv2d(8, 300, 3, groups=2)),
        (lambda: nn.ConvTranspose1d(30, 200, 5), lambda: T.ConvTranspose1d(30, 200, 5)),
        (lambda: nn.Embedding(50, 40), lambda: T.Embedding(50, 40)),
    ],
)
def test_initial_values_have_the_distribution_of_torch(mine, theirs):
    gw.manual_seed(0)
    torch.manual_seed(0)
    for p, q in zip(mine().parameters(), theirs().parameters(), strict=True):
        a, b = p.numpy(), q.detach().numpy()
        assert a.shape == b.shape
        assert a.std() == pytest.approx(b.std(), rel=0.15)
        if a.std() < 0.9:  # uniform: the same bound
            assert np.abs(a).max() == pytest.approx(np.abs(b).max(), rel=0.1)


def test_arrays_of_layers_have_their_documented_distributions():
    shape = (30, 20)
    assert np.abs(initial.xavier_uniform(shape).to_numpy()).max() == pytest.approx((6 / 50) ** 0.5, rel=0.02)
    assert initial.xavier_normal((300, 200), gain=2).to_numpy().std() == pytest.approx(2 * (2 / 500) ** 0.5, rel=0.02)
    assert initial.normal((300, 200)).to_numpy().std() == pytest.approx(0.02, rel=0.02)
    assert not initial.zeros(2, 3).to_numpy().any()
