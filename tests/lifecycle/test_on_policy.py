"""On-policy steps beside loops over rows, teacher forcing and NumPy; and that no target is visible."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small import follows, transformer

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright.data import DataLoader, grids
from graphwright.errors import UsageError
from graphwright.metrics import nll
from graphwright.models import PromptError
from graphwright.nn import functional

PAIRS = [([1, 2, 12], [3, 10, 13]), ([4, 12], [5, 6, 10, 13]), ([2, 2, 2, 2, 12], [13]), ([7, 12], [8, 13])]


def policy(model: gw.Model, eta: Any = 0.5, lr: float = 3e-3, **options: Any) -> lf.OnPolicy:
    return lf.OnPolicy(model, gw.optim.AdamW(model, lr), eta, **options)


def slow_loss(model: gw.Model, eta: float) -> float:
    """L = (1 - η)·CE + η·CE', token by token, each from a run on exactly what precedes it."""
    total = 0.0
    for x, y in PAIRS:
        own = model.generate(x, len(y) + 2).ids
        for prefix, share in ((y, 1 - eta), (own, eta)):
            last = min(len(y), len(prefix) + 1)
            nats = [nll(model.logits([*x, *prefix[:t]])[-1:], np.array([y[t]]))[0] for t in range(last)]
            total += share * float(np.mean(nats)) / len(PAIRS)
    return total


@pytest.mark.parametrize("eta", [0.0, 0.3, 1.0])
def test_the_loss_is_that_of_a_loop_over_tokens(eta: float) -> None:
    model = transformer(seed=3)
    assert {len(model.generate(x, len(y) + 2).ids) - len(y) for x, y in PAIRS} & {1, 2}  # longer than the target
    expected = slow_loss(model, eta)
    assert policy(model, eta).step(PAIRS).item() == pytest.approx(expected, rel=1e-5)
    trained = policy(model, eta, lr=1e-2)
    losses = [trained.step(PAIRS).item() for _ in range(40)]
    assert trained.done == 40
    assert losses[-1] < 0.3 * losses[0]
    expected = slow_loss(model, eta)  # outputs of the trained weights
    assert trained.step(PAIRS).item() == pytest.approx(expected, rel=1e-4)


def test_outputs_shorter_than_their_targets_end_the_row() -> None:
    """After 12 this model says 13 at once, so one target follows each of x and x 13."""
    model = follows({12: 13, 13: 1})
    rows = policy(model, 1.0, round_to=1).rows([([4, 12], [5, 6, 10, 13]), ([12], [13])])
    assert rows.ids[2:].tolist() == [[4, 12, 13, 0, 0], [12, 0, 0, 0, 0]]
    assert rows.targets[2:].tolist() == [[0, 5, 6, 0, 0], [13, 0, 0, 0, 0]]
    np.testing.assert_array_equal(rows.weights[2:], np.array([[0, 0.25, 0.25, 0, 0], [0.5, 0, 0, 0, 0]], "f4"))
    assert not rows.weights[:2].any()


def test_without_own_prefixes_a_step_is_teacher_forcing_bit_for_bit() -> None:
    source = grids("flip", side=3, pairs=1, fixed=True)
    ours, plain = transformer(seed=1), transformer(seed=1)
    trained = policy(ours, 0.0, clip=1.0, round_to=1, deterministic=True)
    batches = [source.batch(np.arange(i, i + 4)) for i in range(0, 12, 4)]
    ids = np.concatenate([batches[0]["prompt"].numpy(), batches[0]["answer"].numpy()], axis=1)
    start, count = batches[0]["prompt"].shape[1] - 1, batches[0]["answer"].shape[1]

    def loss(logits: gw.Tensor, targets: gw.Tensor, weights: gw.Tensor) -> gw.Tensor:
        return (functional.cross_entropy(logits.float(), targets, dim=-1, reduction="none") * weights).sum()

    inputs = {"ids": ids[:, :-1], "positions": ids[:, :-1], "targets": ids[:, 1:]}
    weights = np.zeros(inputs["ids"].shape, np.float32)
    weights[:, start:] = 1 / 4 / count
    step = gw.compile_step(plain.program, loss, gw.optim.AdamW(plain, 3e-3), {**inputs, "weights": weights}, clip=1.0,
                           deterministic=True)  # fmt: skip
    for batch in batches:
        whole = np.concatenate([batch["prompt"].numpy(), batch["answer"].numpy()], axis=1)
        targets = whole[:, 1:].copy()
        targets[:, :start] = 0
        positions = np.tile(np.arange(whole.shape[1] - 1), (4, 1))
        expected = step(ids=whole[:, :-1].copy(), positions=positions, targets=targets, weights=weights).item()
        assert trained.step(batch).item() == expected
        assert trained.exact is None
    for (name, a), (_, b) in zip(ours.named_parameters(), plain.named_parameters(), strict=True):
        assert a.data.tobytes() == b.data.tobytes(), name


def test_both_rows_predict_the_target_and_prefixes_are_those_of_generate() -> None:
    model = transformer(seed=3)
    rows = policy(model, 0.25, round_to=4).rows(PAIRS)
    assert rows.ids.shape[0] == 2 * len(PAIRS)
    assert rows.ids.shape[1] % 4 == 0
    for i, (x, y) in enumerate(PAIRS):
        own, first = model.generate(x, len(y) + 2).ids, len(x) - 1
        for row, prefix, share in ((i, y, 0.75), (i + len(PAIRS), own, 0.25)):
            last = min(len(y), len(prefix) + 1)
            assert rows.ids[row, : first + last].tolist() == [*x, *prefix[: last - 1]]
            assert rows.targets[row, first : first + last].tolist() == y[:last]
            assert rows.weights[row].sum() == pytest.approx(share / len(PAIRS))


def test_eta_is_a_schedule_of_the_step() -> None:
    half = lf.ramp(0.1, 0.5, 4)
    assert [round(half(t), 3) for t in range(7)] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5]
    assert lf.ramp(0, 1, 0)(0) == 1
    model = transformer()
    trained = policy(model, lf.ramp(0, 0.5, 2))
    shapes, exact = [], []
    for _ in range(4):
        shapes.append(trained.rows(PAIRS).ids.shape[0])
        trained.step(PAIRS)
        exact.append(trained.exact)
    assert shapes == [4, 8, 8, 8]  # without own prefixes nothing is generated
    assert exact[0] is None
    assert trained.eta_at(trained.done) == 0.5
    trained.done = 1
    assert trained.eta_at(trained.done) == 0.25
    assert lf.EAVI is lf.OnPolicy


@pytest.mark.parametrize("eta", [-0.1, 1.1, float("nan"), lambda step: 2])
def test_a_share_out_of_range_is_refused(eta: Any) -> None:
    with pytest.raises(ValueError, match="eta"):
        policy(transformer(), eta)


def test_bad_arguments_and_batches_change_nothing() -> None:
    model = transformer()
    for arguments in ({"start": -1}, {"end": 2}, {"steps": -1}):
        with pytest.raises(UsageError):
            lf.ramp(**arguments)
    with pytest.raises(UsageError):
        policy(model, round_to=0)
    trained, before = policy(model), model.program.hash()
    for batch, error in (([], UsageError), ([([1], [15])], PromptError), ([([15], [1])], PromptError)):
        with pytest.raises(error):
            trained.step(batch)
    assert (trained.done, model.program.hash()) == (0, before)


def test_edits_between_steps_are_followed() -> None:
    model = transformer(seed=3)
    trained = policy(model, 0.5)
    trained.step(PAIRS)
    with model.edit("a branch less") as e:
        e.cut("layers.1.mlp.down -> layers.1.out")
    expected = slow_loss(model, 0.5)
    assert trained.step(PAIRS).item() == pytest.approx(expected, rel=1e-5)


def test_a_saved_training_resumes_bit_for_bit(tmp_path: Path) -> None:
    def begin() -> tuple[gw.Model, gw.optim.Optimizer, lf.OnPolicy]:
        model = transformer(seed=3)
        optimizer = gw.optim.AdamW(model, 3e-3)
        return model, optimizer, lf.OnPolicy(model, optimizer, lf.ramp(0, 0.5, 4), deterministic=True)

    model, optimizer, trained = begin()
    losses = [trained.step(PAIRS).item() for _ in range(6)]
    model, optimizer, trained = begin()
    for _ in range(3):
        trained.step(PAIRS)
    gw.save_state(tmp_path / "state", model, optimizer, step=trained.done)
    model, optimizer, again = begin()
    again.done = gw.load_state(tmp_path / "state", model, optimizer)
    assert [again.step(PAIRS).item() for _ in range(3)] == losses[3:]


# -- no label leak -----------------------------------------------------------------------------------------------------
def test_a_target_changes_no_prediction_of_itself_or_earlier_ones() -> None:
    model, rng = transformer(seed=2), np.random.default_rng(0)
    trained = policy(model, 0.0, round_to=1)
    for _ in range(5):
        x, y = rng.integers(0, 13, 5), rng.integers(0, 13, 6)
        rows = trained.rows([(x, y)])
        before = model.logits(rows.ids)[0]
        for t in range(6):
            other = y.copy()
            other[t] = (y[t] + 1 + rng.integers(0, 11)) % 13
            changed = trained.rows([(x, other)])
            after, at = model.logits(changed.ids)[0], len(x) - 1 + t
            assert changed.targets[0, at] == other[t]
            np.testing.assert_allclose(after[: at + 1], before[: at + 1], rtol=1e-4, atol=1e-5)


def trained_accuracy(shift: int, eta: float) -> float:
    """Share of right next tokens on fresh tasks whose answers are random; with `shift` 1 the labels are unshifted."""
    model = transformer(seed=0, num_hidden_layers=1)
    rng = np.random.default_rng(0)

    class Shifted(lf.OnPolicy):
        def rows(self, batch: Any) -> Any:
            found = super().rows(batch)
            ids = np.roll(found.ids, -shift, axis=1)  # the input at t becomes the one that the target at t is
            return type(found)(ids, found.targets, found.weights)

    trained = Shifted(model, gw.optim.AdamW(model, 1e-2), eta, round_to=1)

    def batch() -> list[tuple[np.ndarray, np.ndarray]]:
        return [(np.append(rng.integers(0, 4, 4), 12), rng.integers(0, 4, 8)) for _ in range(32)]

    for _ in range(120):
        trained.step(batch())
    trained.eta = 0.0
    rows = trained.rows(batch() + batch() + batch() + batch())
    at = np.nonzero(rows.weights)
    late = at[1] < at[1].max()  # the input of the last position is after the end of an unshifted row
    guesses = model.logits(rows.ids).argmax(-1)[at]
    return float((guesses == rows.targets[at])[late].mean())


@pytest.mark.parametrize("eta", [0.0, 0.5])
def test_random_answers_stay_at_chance(eta: float) -> None:
    assert trained_accuracy(0, eta) == pytest.approx(0.25, abs=0.06)


def test_unshifted_labels_are_copied() -> None:
    """The control above can fail: a model that sees its labels is always right."""
    assert trained_accuracy(1, 0.0) > 0.99


def test_a_loop_over_a_loader_learns_a_rule() -> None:
    source = grids("copy", side=2, colours=4, pairs=0, fixed=True, count=64 * 16)
    model = transformer(seed=1, num_hidden_layers=1)
    trained = policy(model, lf.ramp(0, 0.5, 30), lr=1e-2, clip=1.0)
    for batch in DataLoader(source, 16):
        trained.step(batch)
    found = lf.exposure_gap(model, grids("copy", side=2, colours=4, pairs=0, fixed=True, seed=9), count=32)
    assert found.exact > 0.9
    assert trained.exact is not None
    assert trained.exact > 0.8
