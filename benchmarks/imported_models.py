"""Models opened from transformers beside torch: opening, inference and a training step, in float32.

Shapes are those of ResNet-18, ViT-tiny, BERT-small and GPT-2-small, with random weights. Inference is `model.outputs`
beside the class under `torch.inference_mode`; a training step is forward, backward and AdamW of the module as
`gw.from_torch` opens it, without dropout. Outputs and first losses are compared before anything is measured. The last
figure is a ResNet-18 less half of the channels of every layer, those of the smallest weights, beside Torch-Pruning.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import reduce
from operator import or_
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
import torch_pruning
import transformers as tf

import graphwright as gw
from benchmarks.harness import Figure, add_rounds, rounds
from graphwright import nn, optim
from graphwright import surgery as sg

PARTS = ("opening", "inference", "training", "pruned")
THREADS = torch.get_num_threads()
RESNET = tf.ResNetConfig(embedding_size=64, hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic",
                         num_labels=1000)  # fmt: skip
VIT = tf.ViTConfig(hidden_size=192, num_hidden_layers=12, num_attention_heads=3, intermediate_size=768, num_labels=1000,
                   hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
BERT = tf.BertConfig(hidden_size=512, num_hidden_layers=4, num_attention_heads=8, intermediate_size=2048,
                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)  # fmt: skip
GPT2 = tf.GPT2Config(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, use_cache=False)
MODELS: dict[str, tuple[type, Any, tuple[int, ...]]] = {
    "ResNet-18, 4 images of 224": (tf.ResNetForImageClassification, RESNET, (4, 3, 224, 224)),
    "ViT-tiny, 8 images of 224": (tf.ViTForImageClassification, VIT, (8, 3, 224, 224)),
    "BERT-small, 8 texts of 128": (tf.BertForMaskedLM, BERT, (8, 128)),
    "GPT-2-small, 2 texts of 128": (tf.GPT2LMHeadModel, GPT2, (2, 128)),
}


def _made(name: str) -> tuple[Any, dict[str, np.ndarray]]:
    """Return a class of transformers with random weights, and an example of its inputs."""
    made, config, shape = MODELS[name]
    torch.manual_seed(0)
    module, rng = made(config).eval(), np.random.default_rng(0)
    if len(shape) == 4:
        return module, {"pixel_values": rng.normal(size=shape).astype(np.float32)}
    return module, {"input_ids": rng.integers(0, config.vocab_size, shape)}


def opening() -> Figure:
    """Seconds to open a directory, first and second time, beside `from_pretrained`; torch's capture for comparison."""
    figure = Figure("Opening a directory of transformers", "random weights in float32; medians of 3, a new cache each")
    for name in MODELS:
        module, example = _made(name)
        taken: dict[str, list[float]] = {}
        for _ in range(3):
            with tempfile.TemporaryDirectory() as folder, _cache(folder):
                module.save_pretrained(folder)
                calls: dict[str, Callable[[], Any]] = {
                    "first": lambda folder=folder: gw.open(folder, tokenizer=False),
                    "second": lambda folder=folder: gw.open(folder, tokenizer=False),
                    "from_pretrained": lambda folder=folder: type(module).from_pretrained(folder),
                    "torch.export": lambda: _export(module, example),
                    "torch.export, sizes as symbols": lambda: _export(module, example, symbols=True),
                }
                for what, call in calls.items():
                    started = perf_counter()
                    call()
                    taken.setdefault(what, []).append(perf_counter() - started)
        for what, seconds in taken.items():
            figure.add(f"{name}: {what}", median(seconds), "s")
    return figure


def _export(module: Any, example: dict[str, np.ndarray], *, symbols: bool = False) -> Any:
    """Capture a module by torch: for the shapes of the example, or for any batch and any length, height or width."""
    free = {name: (0, 2, 3) if array.ndim == 4 else (0, 1) for name, array in example.items()}
    sizes = {name: dict.fromkeys(axes, torch.export.Dim.AUTO) for name, axes in free.items()}
    given = {name: torch.from_numpy(array) for name, array in example.items()}
    return torch.export.export(module, (), given, dynamic_shapes=sizes if symbols else None, strict=False)


class _cache:
    """Context manager: the user's cache is in a folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def __enter__(self) -> None:
        import os

        self.before, os.environ["XDG_CACHE_HOME"] = os.environ.get("XDG_CACHE_HOME"), str(Path(self.folder) / "cache")

    def __exit__(self, *_: object) -> None:
        import os

        if self.before is None:
            del os.environ["XDG_CACHE_HOME"]
        else:
            os.environ["XDG_CACHE_HOME"] = self.before


def inference() -> Figure:
    """Milliseconds of a forward pass, beside torch eager and torch.compile."""
    figure = Figure("Inference of opened models", f"float32, {THREADS} threads, 15 interleaved rounds")
    for name in MODELS:
        torch._dynamo.reset()
        module, example = _made(name)
        given = {n: torch.from_numpy(a) for n, a in example.items()}
        fast = torch.compile(module)
        with tempfile.TemporaryDirectory() as folder, _cache(folder):
            module.save_pretrained(folder)
            model = gw.open(folder, tokenizer=False)
            own = model.logits if model.task == "causal-lm" else lambda a, model=model: model.outputs(a)["logits"]
            array = next(iter(example.values()))
            with torch.inference_mode():
                wanted = module(**given).logits.numpy()
                assert np.abs(own(array) - wanted).max() <= 1e-4 * np.abs(wanted).max()
                calls = {
                    f"{name}: graphwright": lambda own=own, array=array: own(array),
                    f"{name}: torch eager": lambda module=module, given=given: module(**given),
                    f"{name}: torch.compile": lambda fast=fast, given=given: fast(**given),
                }
                add_rounds(figure, rounds(calls, n=15))
    return figure


def training() -> Figure:
    """Milliseconds of a step of AdamW, beside torch eager and torch.compile."""
    figure = Figure("Training steps of opened modules", f"float32, AdamW, {THREADS} threads, 9 interleaved rounds")
    for name in MODELS:
        torch._dynamo.reset()
        module, example = _made(name)
        rng, classes = np.random.default_rng(1), module.config.num_labels
        shape = next(iter(example.values())).shape[: 1 if "pixel_values" in example else 2]
        targets = rng.integers(0, classes if len(shape) == 1 else module.config.vocab_size, shape)
        own, steps = _own_step(module, example, targets), {}
        for kind in ("torch eager", "torch.compile"):
            twin = _made(name)[0]
            steps[kind] = _torch_step(twin, example, targets, kind == "torch.compile")
        first = {"graphwright": own(), **{kind: step() for kind, step in steps.items()}}
        assert max(first.values()) - min(first.values()) <= 1e-3, first
        calls = {f"{name}: graphwright": own, **{f"{name}: {kind}": step for kind, step in steps.items()}}
        add_rounds(figure, rounds(calls, n=9))
    return figure


def _own_step(module: Any, example: dict[str, np.ndarray], targets: np.ndarray) -> Callable[[], float]:
    given = {n: torch.from_numpy(a) for n, a in example.items()}
    p = gw.from_torch(module, (), given, train=True, share=False)
    step = optim.compile_step(
        p, lambda logits, targets: nn.functional.cross_entropy(logits, targets, dim=-1),
        optim.AdamW([p.weights[p.key(n)] for n in p.params()], 1e-4), {**example, "targets": targets},
    )  # fmt: skip
    return lambda: step(**example, targets=targets).item()


def _torch_step(module: Any, example: dict[str, np.ndarray], targets: np.ndarray, fast: bool) -> Callable[[], float]:
    module.train()
    call = torch.compile(module) if fast else module
    given, wanted = {n: torch.from_numpy(a) for n, a in example.items()}, torch.from_numpy(targets)
    optimizer = torch.optim.AdamW(module.parameters(), 1e-4, fused=True)

    def step() -> float:
        optimizer.zero_grad()
        logits = call(**given).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, -2), wanted.flatten())
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def pruned() -> Figure:
    """Seconds to remove half of a ResNet's channels up to the first result, and milliseconds of a forward pass then."""
    name = next(iter(MODELS))
    module, example = _made(name)
    given, twin = {n: torch.from_numpy(a) for n, a in example.items()}, _made(name)[0]
    p = gw.from_torch(module, (), given, share=False)
    fast = gw.compile(p)
    fast(**example)
    started = perf_counter()
    _halve(p)
    fast(**example)
    ours, started = perf_counter() - started, perf_counter()
    torch_pruning.pruner.MagnitudePruner(
        twin, given, importance=torch_pruning.importance.GroupMagnitudeImportance(), pruning_ratio=0.5,
        ignored_layers=[twin.classifier], output_transform=lambda out: out.logits.sum(),
    ).step()  # fmt: skip
    with torch.inference_mode():
        twin(**given)
        theirs = perf_counter() - started
        before, *sizes = (sum(w.numel() for w in m.parameters()) for m in (module, p.as_module(), twin))
        assert sizes[0] == sizes[1] < before / 3, (before, sizes)
        figure = Figure(
            f"{name}, less half of the channels of every layer by magnitude",
            f"{before} parameters become {sizes[0]} in both; float32, {THREADS} threads, 15 interleaved rounds",
        )
        figure.add("graphwright: scores, edit, plan, first run", ours, "s")
        figure.add("Torch-Pruning: trace, prune, first run", theirs, "s")
        calls = {"graphwright": lambda: fast(**example), "Torch-Pruning": lambda: twin(**given)}
        add_rounds(figure, rounds(calls, n=15))
    return figure


def _halve(p: gw.Program) -> None:
    """Remove half of the units of every axis of channels that is not frozen, in one edit."""
    axes = [axis for axis in p.axes().values() if axis.kind == "channels" and not axis.frozen]
    chosen = [axis.units(np.argsort(sg.scores(axis, method="magnitude"))[: axis.size // 2]) for axis in axes]
    with p.edit("half of the channels") as e:
        e.cut_units(reduce(or_, chosen))
