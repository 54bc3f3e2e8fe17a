"""Models on a device, from opening to training: on the simulated one, and with the kernels of a GPU on its memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright.array import CPU, Device, DeviceUnavailable
from graphwright.attention import sparsify
from graphwright.models.model import Model
from graphwright.models.train import Trainer, TrainOptions

pytestmark = pytest.mark.usefixtures("sim", "gpu")

DEVICES = ["sim", "sim:1"]
TEXT = "The following table lists the operators of the language."
SAMPLED: dict[str, Any] = {
    "temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.2, "seed": 5,
}  # fmt: skip


def close(found: Any, wanted: Any, rtol: float = 1e-5) -> None:
    scale = np.abs(np.asarray(wanted)).max()
    np.testing.assert_allclose(found, wanted, rtol=rtol, atol=rtol * scale)


@pytest.fixture(scope="module")
def plain() -> Model:
    return gw.open("bundled")


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_opened_on_a_device_gives_logits_and_texts_of_the_cpu(device: str, plain: Model) -> None:
    model = gw.open("bundled", device=device)
    assert model.device == Device(device)
    assert all(v.data.device == CPU for v in model.variables().values())  # mapped: nothing was read
    close(model.logits(TEXT), plain.logits(TEXT))
    assert model.new_cache(64).device == Device(device)
    for options in ({}, SAMPLED):
        ours, theirs = (m.generate(TEXT, 12, **options) for m in (model, plain))
        assert ours.ids == theirs.ids
    samples = [[r.ids for r in m.generate_many(TEXT, 2, 6, **SAMPLED)] for m in (model, plain)]
    assert samples[0] == samples[1]
    assert str(model.perplexity(TEXT)) == str(plain.perplexity(TEXT))
    assert all(v.data.storage.kind == "mapped" for v in model.variables().values())


@pytest.mark.parametrize("device", DEVICES)
def test_a_model_moves_and_an_edit_reaches_the_device(device: str, plain: Model) -> None:
    model = gw.open("bundled").to(device)
    before = model.logits(TEXT)
    with model.program.edit("halve") as e:
        e.set_weight("model.layers.1.mlp.up_proj.weight", lambda w: 0.5 * w)
    after = model.logits(TEXT)
    assert not np.allclose(before, after)
    close(after, model.to("cpu").logits(TEXT))
    model.undo()
    assert model.to(device).logits(TEXT).tobytes() == before.tobytes()


@pytest.mark.parametrize("device", DEVICES)
def test_training_reaches_the_loss_of_the_cpu(device: str) -> None:
    found = []
    for there in ("cpu", device):
        model = gw.open("bundled", device=there)
        trainer = Trainer(model, TEXT * 20, TrainOptions(steps=4, batch=2, window=32, warmup=1))
        found.append((trainer.run().losses, model.logits(TEXT)))
    close(found[1][0], found[0][0], 1e-4)
    close(found[1][1], found[0][1], 1e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_experts_run_on_a_device(device: str) -> None:
    model = gw.open("bundled")
    ex.upcycle(model, 3, 2)
    truth = model.logits(TEXT)
    close(model.to(device).logits(TEXT), truth)


@pytest.mark.parametrize("device", DEVICES)
def test_attention_over_a_pattern_runs_on_a_device(device: str) -> None:
    model = gw.open("bundled")
    text = TEXT * 3
    sparsify(model, "layers.*", gw.attention.sliding_window(tokens=128, window=32, block=16))
    truth = model.logits(text)
    close(model.to(device).logits(text), truth)


@pytest.mark.parametrize("device", DEVICES)
def test_modules_move_with_all_that_they_hold(device: str) -> None:
    module = gw.nn.Sequential(gw.nn.Linear(4, 6), gw.nn.BatchNorm1d(6), gw.nn.GELU(), gw.nn.Linear(6, 2))
    x = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32)
    truth = module(gw.tensor(x)).numpy()
    made = gw.nn.Sequential(gw.nn.Linear(4, 6), gw.nn.BatchNorm1d(6), gw.nn.GELU(), gw.nn.Linear(6, 2))
    made.load_state_dict(module.state_dict())
    made.to(device)
    assert {p.device for p in made.parameters()} == {Device(device)}
    found = made(gw.tensor(x, device=device))
    assert found.device == Device(device)
    close(found.numpy(), truth)


def test_a_device_that_is_absent_is_refused_before_a_file_is_read() -> None:
    with pytest.raises(DeviceUnavailable, match="cuda:3") as caught:
        gw.open("nowhere", device="cuda:3")
    assert 'device="cpu"' in str(caught.value.fix)
    model = gw.open("bundled")
    with pytest.raises(DeviceUnavailable):
        model.to("cuda:9")
    assert model.device == CPU
