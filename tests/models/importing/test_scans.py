"""Loops over time in classes of transformers: functions without the loop, their capture, gradients, units, files."""

from __future__ import annotations

from contextlib import suppress
from importlib import import_module
from inspect import unwrap
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hub_models import MODELS, saved

import graphwright as gw
from axis_samples import agree
from graphwright.models.importing import scans
from graphwright.models.onnx import run_onnx, save_onnx
from graphwright.program.errors import RaggedUnit

HOMES = {
    "mamba_selective_scan": "mamba falcon_mamba jamba zamba",
    "mamba2_chunk_scan": "mamba2 bamba falcon_h1 zamba2 nemotron_h granitemoehybrid",
    "RecurrentGemmaRglru._rnn_scan": "recurrent_gemma",
    "rwkv_linear_attention": "rwkv",
}
FOUND = [(path, name) for path, names in HOMES.items() for name in names.split()]
CLASSES = [pytest.param(name, marks=() if name == "mamba" else pytest.mark.deep)
           for name in ("mamba", "mamba2", "recurrent_gemma", "rwkv")]  # fmt: skip


def home(name: str) -> Any:
    return import_module(f"transformers.models.{name}.modeling_{name}")


def made(name: str) -> torch.nn.Module:
    config, kind, fields = MODELS[name]
    fields = fields | {"rescale_every": 0} if name == "rwkv" else fields  # it divides weights without a gradient
    torch.manual_seed(5)
    module = getattr(tf, kind)(getattr(tf, config)(**fields)).eval()
    for parameter in module.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return module


def captured(module: torch.nn.Module) -> gw.Program:
    ids = torch.arange(14).reshape(2, 7)
    return gw.from_torch(module, (), {"input_ids": ids}, sizes={"input_ids": ("B", "T")})


def fixed(p: gw.Program) -> Any:
    """The sizes that the import fixed, or limited."""
    imported: Any = p.imported
    return imported.fixed


def cut(args: tuple[Any, ...], options: dict[str, Any], steps: int) -> tuple[Any, Any]:
    """The arguments of a call, with fewer steps: those of their axes that have 7 entries."""

    def shorter(value: Any) -> Any:
        axes = [a for a, n in enumerate(value.shape) if n == 7] if isinstance(value, torch.Tensor) else []
        return value.narrow(axes[0], 0, steps) if axes else value

    return tuple(map(shorter, args)), {name: shorter(value) for name, value in options.items()}


def loop_of(path: str, name: str) -> tuple[Any, str, Any, scans.Loop]:
    """Owner, name and function of an entry in a module, and the entry."""
    (found,) = (f for f in scans._found(home(name)) if f[3] is scans.LOOPS[path])
    return found


@pytest.mark.parametrize(("path", "name"), FOUND)
def test_functions_without_the_loop_equal_those_of_transformers(path, name):
    _, _, function, loop = loop_of(path, name)
    assert scans._is_equal(unwrap(function), loop)
    for seed, steps in ((1, 7), (2, 6), (3, 2), (4, 1)):
        args, options = cut(*loop.example(torch.Generator().manual_seed(seed)), steps)
        results = unwrap(function)(*args, **options), loop.equal(*args, **options)
        expected, found = (r[0] if isinstance(r, tuple) else r for r in results)
        torch.testing.assert_close(found, expected, rtol=2e-5, atol=2e-6)


def test_function_of_another_meaning_is_not_replaced(monkeypatch):
    loop = scans.LOOPS["mamba_selective_scan"]
    module, mamba = made("mamba"), home("mamba")
    before = mamba.mamba_selective_scan
    with scans.without_loops(module):
        assert mamba.mamba_selective_scan is not before
    assert mamba.mamba_selective_scan is before
    for equal in (lambda *a, **k: 2 * loop.equal(*a, **k), lambda x: x, lambda *a, **k: loop.equal(*a, **k)[..., :1]):
        monkeypatch.setitem(scans.LOOPS, "mamba_selective_scan", scans.Loop(equal, loop.example, loop.states))
        with scans.without_loops(module):
            assert mamba.mamba_selective_scan is before


def test_calls_with_states_run_the_function_itself():
    args, options = scans.LOOPS["mamba_selective_scan"].example(torch.Generator().manual_seed(0))
    mamba = home("mamba")
    _, expected = mamba.mamba_selective_scan(*args, **options, return_last_state=True)
    with scans.without_loops(made("mamba")):
        _, found = mamba.mamba_selective_scan(*args, **options, return_last_state=True)
    assert torch.equal(found, expected)


def test_failed_capture_restores_the_functions():
    mamba = home("mamba")
    before = mamba.mamba_selective_scan
    with pytest.raises(gw.GraphwrightError):
        gw.from_torch(made("mamba"), (), {"input_ids": torch.zeros(2, 3, 4, 5, dtype=torch.int64)})
    assert mamba.mamba_selective_scan is before


class Chunks(torch.nn.Module):
    """The chunked scan alone, in chunks of 4."""

    def forward(self, x, decay, b, c):
        return scans.operators.chunk_scan(x, decay, b, c, 4)


def test_chunks_of_any_number_of_steps_give_the_recurrence():
    def operands(batch, steps):
        shapes = ((batch, steps, 2, 3), (batch, steps, 2), (batch, steps, 2, 5), (batch, steps, 2, 5))
        x, decay, b, c = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        return x, -decay.exp(), b, c

    torch.manual_seed(0)
    names = ("x", "decay", "b", "c")
    sizes = {n: ("B", "T", *t.shape[2:]) for n, t in zip(names, operands(1, 1), strict=True)}
    p = gw.from_torch(Chunks(), operands(3, 7), sizes=sizes)
    assert not fixed(p)
    for batch, steps in ((1, 1), (2, 3), (1, 4), (2, 5), (1, 8), (3, 9)):
        given = operands(batch, steps)
        found = p.run({n: t.numpy() for n, t in zip(names, given, strict=True)})["out"].numpy()
        np.testing.assert_allclose(found, Chunks()(*given), atol=1e-12)


@pytest.mark.parametrize("name", CLASSES)
def test_gradients_of_every_parameter_equal_those_of_torch(name):
    module = made(name).train(False)
    p = captured(module)
    assert not fixed(p)
    ids = np.random.default_rng(0).integers(3, 90, (3, 11))
    weights = np.random.default_rng(1).normal(size=(3, 11, 99)).astype("f4")
    logits = p(input_ids=ids)["logits"]
    (logits * gw.tensor(weights)).sum().backward()
    (module(torch.from_numpy(ids)).logits * torch.from_numpy(weights)).sum().backward()
    for key, parameter in module.named_parameters():
        found = p.weights[key].grad
        assert found is not None, key
        assert parameter.grad is not None, key
        expected = parameter.grad.numpy()
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-5 * np.abs(expected).max(), err_msg=key)


@pytest.mark.parametrize("name", CLASSES)
def test_masked_and_cut_units_give_equal_results(name):
    p = captured(made(name))
    ids = np.random.default_rng(0).integers(3, 90, (1, 5))
    logits, done = np.abs(p.run({"input_ids": ids})["logits"].numpy()).max(), 0
    for group in list(p.axes().values()):
        if not group.frozen and not group.mixed and group.size > 2:
            with suppress(RaggedUnit):
                agree(p, group.units([1]), {"input_ids": ids}, 1e-6 * logits)
                done += 1
    assert done


@pytest.mark.deep
@pytest.mark.parametrize("name", ["mamba", "mamba2", "recurrent_gemma"])
def test_files_with_fewer_neurons_are_loaded_by_transformers(name, tmp_path, monkeypatch):
    """In the class, which stores zeros for the neuron, and as code; exports check texts and greedy tokens of both."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    saved(name, tmp_path / "saved")
    model = gw.open(tmp_path / "saved", tokenizer=False)
    groups = model.program.axes().values()
    group = next(g for g in groups if "neurons" in g.kinds and not g.frozen and not g.mixed and g.size > 2)
    group.units([1]).prune(why="one less")
    for level in (3, 5):
        receipt = model.export(tmp_path / str(level), level=level, timed=False)
        assert (receipt.level, receipt.confirmed) == (level, True)


def test_scans_are_scans_of_onnx(tmp_path):
    def both(a, b):
        forward, backward = (gw.ops.call("linear_scan", a, b, axis=1, reverse=r) for r in (False, True))
        return forward - 2 * backward

    p = gw.trace(both, gw.rand(2, 5, 3), gw.rand(2, 5, 3), sizes=dict.fromkeys("ab", ("B", "T", 3)))
    save_onnx(p, tmp_path / "scan.onnx")
    names, rng = p.input_names(), np.random.default_rng(0)
    feeds = [{n: rng.normal(size=(batch, steps, 3)).astype("f4") for n in names} for batch, steps in ((2, 5), (1, 9))]
    for feed, found in zip(feeds, run_onnx(tmp_path / "scan.onnx", feeds), strict=True):
        (name,) = p.output_names()
        np.testing.assert_allclose(found[name], p.run(feed)[name].numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_long_scan_is_rounded_once(dtype):
    rng = np.random.default_rng(0)
    a, b = (gw.tensor(rng.uniform(low, 1, (2, 3000, 3)).astype("f4")).to(dtype) for low in (0.9, -1))
    h, expected = np.zeros((2, 3)), []
    for t in range(3000):
        h = a.to("float64").numpy()[:, t] * h + b.to("float64").numpy()[:, t]
        expected.append(h)
    found = gw.ops.call("linear_scan", a, b, axis=1).to("float64").numpy()
    exact = np.stack(expected, 1)
    rounding = np.abs(exact) * 2.0**-8 if dtype == "bfloat16" else 0.0
    np.testing.assert_array_less(np.abs(found - exact), rounding + 1e-5)
