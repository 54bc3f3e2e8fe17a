"""Generators: order of streams outside traces, in plans and in gradients; their state; their quality."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

import graphwright as gw
from graphwright.array import from_numpy, random
from graphwright.autograd import Parameter, Tensor, grad, tensor
from graphwright.autograd.random import (
    Generator,
    bernoulli,
    dropout,
    fork_rng,
    gumbel,
    manual_seed,
    multinomial,
    rand,
    rand_like,
    randint,
    randn,
    randn_like,
    rng,
)
from graphwright.errors import ShapeError, UsageError


@pytest.fixture(autouse=True)
def seeded():
    with fork_rng(3):
        yield


def noisy(x: Tensor) -> Tensor:
    return dropout(x, 0.3) * 2 + dropout(x, 0.5) + randn(*x.shape, dtype=x.dtype)


ONES = np.ones((3, 40))


def test_streams_are_numbered_in_the_order_of_the_calls() -> None:
    first, second = rand(5), rand(5)
    assert np.array_equal(first.numpy(), random.uniform(5, seed=3, stream=0, step=0))
    assert np.array_equal(second.numpy(), random.uniform(5, seed=3, stream=1, step=0))
    rng.next_step()
    assert np.array_equal(rand(5).numpy(), random.uniform(5, seed=3, stream=0, step=1))
    manual_seed(3)
    assert np.array_equal(rand(5).numpy(), first.numpy())


def test_a_plan_samples_the_same_numbers_as_eager_steps() -> None:
    x = tensor(ONES)
    outside = []
    for _ in range(3):
        outside.append(noisy(x).numpy())
        rng.next_step()
    assert not np.array_equal(outside[0], outside[1])
    manual_seed(3)
    run = gw.compile(noisy)
    assert [np.array_equal(run(x).numpy(), y) for y in outside] == [True] * 3
    assert rng.state_dict() == {"seed": 3, "step": 3, "stream": 0}
    manual_seed(3)
    program = gw.trace(noisy, x)
    assert [np.array_equal(program.run({"x": x})["out"].to_numpy(), y) for y in outside] == [True] * 3


def test_next_step_can_be_traced() -> None:
    def two(x: Tensor) -> Tensor:
        a = noisy(x)
        rng.next_step()
        return a - noisy(x)

    x = tensor(ONES)
    y = two(x).numpy()
    manual_seed(3)
    run = gw.compile(two)
    assert np.array_equal(run(x).numpy(), y)
    assert rng.step == 2
    ends = gw.compile(lambda x: (noisy(x), rng.next_step())[0])
    manual_seed(3)
    ends(x)
    assert rng.step == 1


def test_dropout_gradient_uses_the_forward_mask() -> None:
    w = Parameter(from_numpy(ONES.copy()))

    def step() -> tuple[Tensor, Tensor]:
        y = dropout(w, 0.3)
        return y, grad((y * y).sum(), w)[0]

    outside = [t.numpy() for t in step()]
    assert np.allclose(outside[1], 2 * outside[0] / 0.7)
    manual_seed(3)
    planned = gw.compile(step)
    assert [np.array_equal(t.numpy(), o) for t, o in zip(planned(), outside, strict=True)] == [True, True]
    assert not np.array_equal(planned()[1].numpy(), outside[1])


def test_two_backwards_share_one_mask_and_do_not_advance_the_generator() -> None:
    x = tensor(ONES, requires_grad=True)
    y = dropout(x, 0.5)
    state = rng.state_dict()
    first, second = grad(y.sum(), x, retain_graph=True)[0], grad((3 * y).sum(), x)[0]
    rng.next_step()
    assert np.array_equal(3 * first.numpy(), second.numpy())
    assert np.array_equal(first.numpy(), y.numpy())
    assert state == {**rng.state_dict(), "step": 0, "stream": 1}


def test_program_grad_and_tape_use_the_mask_of_the_run() -> None:
    x = tensor(ONES)
    program = gw.trace(lambda x: dropout(x, 0.4), x)
    backward = program.grad("out", ["x"])
    found = backward.run({"x": x})["grad.x"].to_numpy()
    x.requires_grad = True
    taped = program(x=x)["out"]
    assert np.array_equal(grad(taped.sum(), x)[0].numpy(), found)
    assert np.array_equal(taped.detach().numpy(), found)


def test_a_saved_program_resumes_its_generator(tmp_path) -> None:
    x = tensor(ONES)
    program = gw.trace(noisy, x)
    program.run({"x": x})
    program.save(tmp_path / "p")
    loaded = gw.load(tmp_path / "p")
    assert np.array_equal(loaded.run({"x": x})["out"].to_numpy(), program.run({"x": x})["out"].to_numpy())


def test_streams_stay_with_their_nodes_when_others_are_removed() -> None:
    x = tensor(ONES)
    program = gw.trace(lambda x: (dropout(x, 0.5), dropout(x, 0.5)), x)
    second = program.run({"x": x})["out_1"].to_numpy()
    manual_seed(3)
    with program.edit("keep the second") as e:
        e.set_outputs(out="dropout_2")
    assert np.array_equal(program.run({"x": x})["out"].to_numpy(), second)


def test_state_round_trips_and_fork_rng_restores() -> None:
    rand(2)
    state = rng.state_dict()
    with fork_rng(9) as forked:
        assert forked.seed == 9
        other = rand(4)
    again = rand(4).numpy()
    assert not np.array_equal(other.numpy(), again)
    rng.load_state_dict(state)
    assert np.array_equal(rand(4).numpy(), again)
    with pytest.raises(RuntimeError), fork_rng(1):
        raise RuntimeError
    assert rng.seed == 3
    own = Generator(2**64 - 1)
    assert np.array_equal(rand(3, generator=own).numpy(), random.uniform(3, seed=2**64 - 1))


@pytest.mark.parametrize(
    "state", [{}, {"seed": -1, "step": 0, "stream": 0}, {"seed": 0, "step": 2**32, "stream": 0}, 3]
)
def test_an_invalid_generator_state_is_refused(state) -> None:
    before = rng.state_dict()
    with pytest.raises(UsageError):
        rng.load_state_dict(state)
    assert rng.state_dict() == before


def test_dropout_keeps_entries_whose_number_equals_p() -> None:
    drawn = random.uniform(50, seed=3)
    for index in (7, 31):
        rng.manual_seed(3)
        kept = dropout(tensor(np.ones(50)), float(drawn[index])).numpy() > 0
        assert np.array_equal(kept, drawn >= drawn[index])


def test_dropout_with_p_0_and_1_keeps_and_drops_everything() -> None:
    x = tensor([np.inf, -2.0], requires_grad=True)
    assert dropout(x, 0.0).tolist() == [np.inf, -2.0]
    y = dropout(x, 1.0)
    assert y.tolist() == [0.0, 0.0]
    assert grad(y.sum(), x)[0].tolist() == [0.0, 0.0]
    with pytest.raises(UsageError):
        dropout(x, -0.1)


@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16"])
def test_uniform_stays_below_one_in_every_dtype(kind: str) -> None:
    u = rand(100_000, dtype=kind).numpy("float64")
    assert u.min() >= 0
    assert u.max() < 1
    assert abs(u.mean() - 0.5) < 0.005


def test_random_tensors_have_the_requested_shape_dtype_and_are_leaves() -> None:
    x = rand(2, 3, dtype="float64", requires_grad=True)
    assert (x.shape, x.dtype, x.is_leaf) == ((2, 3), gw.float64, True)
    assert randn_like(x).spec == rand_like(x).spec == x.spec
    assert randint(-2, 5, (4, 2)).shape == (4, 2)
    assert gumbel(3).dtype is gw.float32


N = 100_000


def test_distributions_have_the_right_moments() -> None:
    assert stats.kstest(randn(N).numpy(), "norm").pvalue > 1e-3
    assert stats.kstest(gumbel(N).numpy(), "gumbel_r").pvalue > 1e-3
    kept = dropout(tensor(np.ones(N)), 0.3).numpy() > 0
    assert abs(kept.mean() - 0.7) < 0.005
    assert all(abs(np.corrcoef(kept[:-lag], kept[lag:])[0, 1]) < 0.01 for lag in (1, 2, 4, 1024, 8192))
    assert abs(bernoulli(tensor(np.full(N, 0.2))).numpy().mean() - 0.2) < 0.005
    weights = tensor([0.0, 1.0, 3.0, 6.0])
    counts = np.bincount(multinomial(weights, N, replacement=True).numpy(), minlength=4)
    assert counts[0] == 0
    assert stats.chisquare(counts[1:], N * np.array([0.1, 0.3, 0.6])).pvalue > 1e-3
    rows = multinomial(tensor(np.tile([[1.0, 2.0, 3.0]], (N // 10, 1))), 2).numpy()
    assert (rows[:, 0] != rows[:, 1]).all()
    assert stats.chisquare(np.bincount(rows[:, 0]), len(rows) * np.array([1, 2, 3]) / 6).pvalue > 1e-3
    with pytest.raises(ShapeError):
        multinomial(weights, 5)


@pytest.mark.parametrize(
    "call",
    [
        lambda: gw.bernoulli(gw.tensor([0.5, 1.5])),
        lambda: gw.bernoulli(gw.tensor([float("nan")])),
        lambda: gw.bernoulli(gw.zeros(2), p=2.0),
        lambda: gw.zeros(2).bernoulli_(-0.5),
        lambda: gw.normal(gw.zeros(2), gw.tensor([1.0, -1.0])),
        lambda: gw.normal(0.0, -1.0, (2,)),
        lambda: gw.zeros(2).random_(0),
    ],
)
def test_parameters_that_no_distribution_has_are_refused(call) -> None:
    with pytest.raises(UsageError):
        call()


def test_means_and_deviations_that_do_not_broadcast_are_refused() -> None:
    with pytest.raises(ShapeError):
        gw.normal(gw.zeros(3), gw.ones(2))


def test_random_integers_fill_the_range_of_the_dtype() -> None:
    whole = gw.zeros(4000, dtype="int8").random_()
    assert (whole.min().item(), whole.max().item()) == (0, 127)
    bits = gw.zeros(100, dtype="bool").random_()
    assert 20 < bits.sum().item() < 80


def test_the_state_of_the_default_generator_is_a_tensor() -> None:
    gw.manual_seed(2**64 - 3)
    gw.rand(2)
    state = gw.get_rng_state()
    first = gw.rand(3).numpy()
    gw.set_rng_state(state)
    assert np.array_equal(first, gw.rand(3).numpy())
    assert gw.initial_seed() == 2**64 - 3
    assert gw.seed() == gw.initial_seed() != 2**64 - 3
    with pytest.raises(UsageError, match="state"):
        gw.set_rng_state(gw.zeros(3))
    gw.manual_seed(0)


def test_two_generators_of_one_key_advance_together() -> None:
    first, second = Generator(5), Generator(6)
    second.key = first.key
    first.next_step()
    assert (second.seed, second.step) == (5, 1)
    with pytest.raises(UsageError, match="not the key"):
        second.key = Parameter(np.zeros(3, np.float32))
