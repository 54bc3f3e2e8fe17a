"""What `diagnose` says of blocks that differ from their siblings: planted defects are found, sound models are not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from networks import SIZES, random_decoder

import graphwright as gw
from graphwright.models.bundled import pydoc_split
from graphwright.models.open import config_from, create
from graphwright.surgery import Ratio, diagnose
from graphwright.surgery.findings.siblings import flatness
from seeds import DEEP, deep

LAYERS = range(4)
Damage = Callable[[gw.Model, int, np.random.Generator], None]


def text() -> str:
    return pydoc_split()[1][:800]


def attribute(part: str, **attrs) -> Damage:
    def damage(model, layer, rng):
        with model.program.edit("damage") as e:
            e.set_attr(f"layers.{layer}.{part}", **attrs)

    return damage


def weight(part: str, change) -> Damage:
    def damage(model, layer, rng):
        with model.program.edit("damage") as e:
            e.set_weight(f"layers.{layer}.{part}.weight", lambda w: change(w, rng))

    return damage


def noise(w, rng):
    return (rng.normal(size=w.shape) * w.std()).astype("f4")


def dead_rows(w, rng):
    rows = rng.permutation(len(w))[: len(w) // 2]
    w[rows] = 0
    return w


def heads(width: int, dim: int):
    """Exchange the first half of the heads, each `width` wide along `dim`, and the second half."""

    def change(w, rng):
        blocks = np.split(w, w.shape[dim] // width, axis=dim)
        return np.concatenate(np.roll(np.array(blocks), len(blocks) // 2, axis=0), axis=dim)

    return change


STRUCTURE = {
    "no causal mask": attribute("attn.sdpa", causal=False),
    "another scale": attribute("attn.sdpa", scale=0.7),
    "a window": attribute("attn.sdpa", window=3),
    "a large eps": attribute("mlp.norm", eps=0.1),
    "noise in q": weight("attn.q", noise),
    "noise in o": weight("attn.o", noise),
    "noise in up": weight("mlp.up", noise),
    "noise in down": weight("mlp.down", noise),
    "dead neurons": weight("mlp.up", dead_rows),
    "a large norm": weight("mlp.norm", lambda w, _: 8 * w),
    "a small norm": weight("attn.norm", lambda w, _: w / 8),
    "a large matrix": weight("mlp.down", lambda w, _: 30 * w),
}
ORDER = {
    "heads of q": weight("attn.q", heads(32, 0)),
    "heads of k": weight("attn.k", heads(32, 0)),
    "heads of v": weight("attn.v", heads(32, 0)),
    "heads of o": weight("attn.o", heads(32, 1)),
}


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_block_unlike_its_siblings_is_found_without_a_text(name):
    for layer in LAYERS if DEEP else LAYERS[[*STRUCTURE].index(name) % 2 :: 2]:
        for seed in range(deep(5, 1)):
            model = gw.open("bundled")
            STRUCTURE[name](model, layer, np.random.default_rng(seed))
            found = model.diagnose()
            assert [f.kind for f in found] == ["unlike_siblings"], (layer, seed, str(found))
            assert f"layers.{layer}." in found[0].where
            if found[0].fixes:
                found.fix_all(only=None)
                assert not model.diagnose()


@pytest.mark.parametrize("name", ORDER)
def test_heads_in_another_order_than_their_partners_are_found_from_the_checkpoint(name):
    for layer in LAYERS:
        model = gw.open("bundled")
        sound = model.program.hash()
        ORDER[name](model, layer, np.random.default_rng(0))
        (found,) = findings = model.diagnose()
        assert (found.kind, found.where) == ("head_order", f"layers.{layer}.attn.{name[-1]}.weight")
        findings.fix_all(only=None)
        assert model.program.hash() == sound


def test_heads_that_are_reordered_together_are_no_finding():
    model = gw.open("bundled")
    for name in ORDER:
        ORDER[name](model, 1, np.random.default_rng(0))
    assert not model.diagnose()


@pytest.mark.deep
@pytest.mark.parametrize("name", ["heads of q", "heads of v"])
def test_a_text_shows_the_right_order_of_heads_without_a_checkpoint_to_compare(name, tmp_path):
    damaged = gw.open("bundled")
    ORDER[name](damaged, 1, np.random.default_rng(0))
    damaged.export(tmp_path / "damaged", check="none", timed=False)
    model = gw.open(tmp_path / "damaged")
    assert not model.diagnose()
    (found,) = findings = model.diagnose(text=text())
    assert (found.kind, found.where) == ("harmful_block", "layers.1.attn.o -> layers.1.mid")
    findings.fix(found)
    key = model.program.key(model.program.node(f"layers.1.attn.{name[-1]}.weight"))
    want = gw.open("bundled").program.weights.array(key).to_numpy("float32")
    assert np.array_equal(model.program.weights.array(key).to_numpy("float32"), want)


def test_a_block_that_raises_the_loss_is_found_with_a_text_only(tmp_path):
    model = gw.open("bundled")
    with model.program.edit("damage") as e:
        e.set_weight("layers.2.mlp.down.weight", lambda w: -w)
    assert not model.diagnose()
    (found,) = findings = model.diagnose(text=text())
    assert (found.kind, found.where) == ("harmful_block", "layers.2.mlp.down -> layers.2.out")
    assert found.witness["effect"] < -0.5
    findings.fix(found)  # from the checkpoint
    assert model.program.hash() == gw.open("bundled").program.hash()


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_random_models_have_no_unlike_siblings(family):
    for seed in range(deep(10, 2)):
        p = random_decoder(family, seed, num_hidden_layers=6, hidden_size=48)
        assert not diagnose(p), seed


def test_values_that_the_config_declares_are_intended(tmp_path):
    fields = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}
    facts = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "num_hidden_layers": 4}
    made = create(config_from({**SIZES, **facts, **fields}), seed=0)
    made.export(tmp_path / "windows", check="none", timed=False)
    model = gw.open(tmp_path / "windows")
    windows = [model.program.attrs(model.program.node(f"layers.{i}.attn.sdpa"))["window"] for i in LAYERS]
    assert sorted(map(str, set(windows))) == ["8", "None"]
    assert not model.diagnose()
    assert [f.kind for f in diagnose(made.program)] == ["unlike_siblings"]  # nothing declares it here


@pytest.mark.deep
def test_a_pruned_model_has_no_findings():
    model = gw.open("bundled")
    model.prune(Ratio(0.3), pydoc_split()[1][:3000])
    assert not model.diagnose(), str(model.diagnose())


@pytest.mark.parametrize("shape", [(192, 192), (64, 192), (512, 192), (16, 16)])
def test_the_spectrum_of_noise_has_flatness_one(shape):
    rng = np.random.default_rng(0)
    drawn = [flatness(rng.normal(size=shape) * 3) for _ in range(20)]
    assert np.mean(drawn) == pytest.approx(1, abs=0.02)
    assert flatness(np.outer(rng.normal(size=shape[0]), rng.normal(size=shape[1]))) < 0.2
