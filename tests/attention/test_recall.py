"""Native sparse attention learns associative recall with a share of the blocks, where a window alone is at chance."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.nn import functional
from graphwright.optim import Adam
from seeds import DEEP

EXAMPLE = Path(__file__).parents[2] / "examples" / "associative_recall.py"


def task(**sizes: int) -> SimpleNamespace:
    """The example, with other sizes."""
    found = runpy.run_path(str(EXAMPLE))
    found["batch"].__globals__.update(sizes)
    return SimpleNamespace(**found)


SMALL = {"TOKENS": 64, "KEYS": 24, "BATCH": 16}


@pytest.mark.parametrize("seed", [0, 1, 2] if DEEP else [1])
def test_a_short_task_is_learned_by_the_threshold_alone(seed: int) -> None:
    recall = task(**SMALL)
    accuracy, share = recall.trained("tau", 200, seed)
    assert accuracy > 0.8
    assert share < 0.7
    assert recall.trained("window", 60, seed)[0] < 0.15


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(5))
def test_associative_recall(seed: int) -> None:
    recall = task()
    rows = {mode: recall.trained(mode, 1500, seed) for mode in ("window", "tau", "topn", "dense")}
    print(seed, {mode: f"{accuracy:.3f}, {share:.0%}" for mode, (accuracy, share) in rows.items()})
    assert rows["window"][0] <= 0.15
    assert rows["tau"][0] >= 0.90
    assert rows["tau"][1] < 0.70


def trained(recall: SimpleNamespace, steps: int, mod: Any = None) -> tuple[Any, float]:
    """Train with a threshold whose multiplier is `mod(first loss, loss)`; return the model and the last accuracy."""

    class Driven(recall.Recall):
        def forward(self, tokens: gw.Tensor, mod: gw.Tensor) -> dict[str, gw.Tensor]:
            x = self.key(tokens[:, :, 0]) + self.value(tokens[:, :, 1])
            made = self.attn.attend(self.norm(x), mod)
            return {"logits": self.head(self.last((x + made.out)[:, -recall.ASKED :])), "aux": made.aux}

    rng, model = np.random.default_rng(0), Driven("tau", 0)
    tokens, answers = recall.batch(rng)
    ones, factor, first = np.ones(tokens.shape[:2], np.float32), 1.0, None
    program, opt = gw.trace(model, gw.tensor(tokens), gw.tensor(ones)), Adam(model.parameters(), lr=3e-3)
    inputs = {"tokens": tokens, "mod": ones, "answers": answers}
    step, right = gw.compile_step(program, recall.loss, opt, inputs), 0.0
    for _ in range(steps):
        tokens, answers = recall.batch(rng)
        loss = float(step(tokens=tokens, mod=ones * np.float32(factor), answers=answers).numpy())
        first = loss if first is None else first
        factor = 1.0 if mod is None else mod(first, loss)
    tokens, answers = recall.batch(rng)
    out = program.run({"tokens": tokens, "mod": ones * np.float32(factor)}, keep="outputs")
    right = float((out["logits"].to_numpy().argmax(2) == answers).mean())
    return model, right


@pytest.mark.deep
@pytest.mark.timeout(900)
def test_the_number_of_blocks_follows_the_entropy_of_the_scores() -> None:
    recall = task()
    model, right = trained(recall, 1500)
    assert right > 0.85
    tokens, _ = recall.batch(np.random.default_rng(99))
    x = model.key(gw.tensor(tokens[:, :, 0])) + model.value(gw.tensor(tokens[:, :, 1]))
    choice = model.eval().attn.attend(model.norm(x)).choice
    n = choice.candidates.numpy()
    rows = n >= 4
    taken, entropy = (choice.taken.numpy() / np.maximum(n, 1))[:, :, rows], choice.entropy.numpy()[:, :, rows]
    by_head = [np.corrcoef(taken[:, g].ravel(), entropy[:, g].ravel())[0, 1] for g in range(taken.shape[1])]
    print("correlation of the share of candidates taken with the entropy, by head:", np.round(by_head, 3))
    assert np.corrcoef(taken.ravel(), entropy.ravel())[0, 1] > 0.5


@pytest.mark.deep
@pytest.mark.timeout(900)
@pytest.mark.parametrize("direction", ["falls", "rises"])
def test_a_multiplier_driven_by_the_loss_closes_nothing(direction: str) -> None:
    """τ is multiplied by the loss relative to the first one, or by its inverse, clipped to ½ .. 2."""
    recall = task(**SMALL)
    falls = direction == "falls"
    model, right = trained(recall, 2000, lambda first, loss: loss / first if falls else first / max(loss, 1e-9))
    assert right > 0.8
    tokens, _ = recall.batch(np.random.default_rng(99))
    x = model.key(gw.tensor(tokens[:, :, 0])) + model.value(gw.tensor(tokens[:, :, 1]))
    extreme = gw.tensor(np.full(tokens.shape[:2], 0.0 if falls else 1e9, np.float32))
    choice = model.eval().attn.attend(model.norm(x), extreme).choice
    assert choice.taken.numpy()[:, :, -recall.ASKED :].mean() > 0.2
    assert functional.softplus(model.attn.psi).numpy().max() < 2.0
