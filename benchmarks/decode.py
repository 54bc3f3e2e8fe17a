"""Tokens per second of one sequence, beside transformers, and the share of the measured memory bandwidth it is.

The large shape is TinyLlama's with random bfloat16 weights, written to a temporary file of 2.2 GB that is deleted. The
machine may be busy: rounds are short and interleaved, and the best round stands beside the median. llama.cpp stands
beside ours where `scripts/llama_cpp.sh` built it.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import numpy as np
import torch
import transformers

import graphwright as gw
from benchmarks import llama_cpp
from benchmarks.harness import Figure, interval
from graphwright.array.cpu import set_num_threads

LAYERS, HIDDEN, FFN, VOCAB, HEADS, GROUPS, DIM = 22, 2048, 5632, 32000, 32, 4, 64
PROMPT, CHECKED, TOKENS, ROUNDS = 32, 12, 6, 9
BESIDE = [
    ("graphwright, bf16 weights", "transformers eager, bf16"),
    ("graphwright, bf16 weights", "transformers eager, f32"),
    ("graphwright, bf16 weights", "llama.cpp, bf16"),
    ("graphwright, int8 weights", "llama.cpp, q8_0"),
]
"""Whose ratio is said."""


def run() -> list[Figure]:
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint(directory := Path(folder))
        with llama_cpp.peer(directory) as peer:
            figures = large(directory, peer)
    return [*figures, small(), choices(), forks(), prefixes(), host(), blocks()]


# -- the large shape ---------------------------------------------------------------------------------------------------
def checkpoint(directory: Path) -> None:
    """Config and random weights N(0, 0.02²) in bfloat16; norms 1."""
    fields = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN},
        **{"num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS},
        **{"intermediate_size": FFN, "vocab_size": VOCAB, "rms_norm_eps": 1e-5, "rope_theta": 10000.0},
        **{"hidden_act": "silu", "max_position_embeddings": 2048, "tie_word_embeddings": False},
        **{"torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2},
    }
    (directory / "config.json").write_text(json.dumps(fields))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        at = f"model.layers.{i}"
        shapes |= {f"{at}.{n}.weight": (HIDDEN,) for n in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (HEADS * DIM, HIDDEN) for n in "qo"}
        shapes |= {f"{at}.self_attn.{n}_proj.weight": (GROUPS * DIM, HIDDEN) for n in "kv"}
        shapes |= {f"{at}.mlp.{n}_proj.weight": (FFN, HIDDEN) for n in ("gate", "up")}
        shapes[f"{at}.mlp.down_proj.weight"] = (HIDDEN, FFN)
    shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    header, at = {}, 0
    for key, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[key] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-(len(text) + 8) % 64)
    rng = np.random.default_rng(0)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            w = rng.standard_normal(shape, np.float32) * np.float32(0.02) if len(shape) > 1 else np.ones(shape, "f4")
            file.write(((w.view("u4") + 0x8000) >> 16).astype("u2").tobytes())


def bandwidth(threads: int) -> float:
    """Bytes per second: the larger of a sum over 1 GiB and a triad a = b + s·c (24 bytes per element), best of 7."""
    set_num_threads(threads)
    x = torch.ones(1 << 28)
    n = 1 << 26
    a, b, c = torch.zeros(n), torch.ones(n), torch.ones(n)

    def seconds(call: Callable[[], Any]) -> float:
        times = []
        for _ in range(7):
            started = perf_counter()
            call()
            times.append(perf_counter() - started)
        return min(times)

    return max(x.nbytes / seconds(x.sum), 12 * n / seconds(lambda: torch.add(b, c, alpha=3.0, out=a)))


class Ours:
    """One sequence, its cache at the end of the prompt."""

    cpu = staticmethod(process_time)

    def __init__(self, model: gw.Model, ids: np.ndarray) -> None:
        started = perf_counter()
        self.cache = model.new_cache(128, kind="static")
        self.first = int(model.prefill(self.cache, ids).argmax())
        self.directory, self.cold = self.cache.length, perf_counter() - started

    def tokens(self, count: int) -> list[int]:
        made = [self.first]
        while len(made) < count:
            made.append(int(self.cache.step(np.array([[made[-1]]])).to_numpy()[0, -1].argmax()))
        self.cache.truncate(self.directory)
        return made


class Theirs:
    """The same in transformers, eager."""

    cpu = staticmethod(process_time)

    def __init__(self, directory: Path, kind: torch.dtype, ids: np.ndarray) -> None:
        started = perf_counter()
        self.model: Any = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=kind).eval()
        self.cache = transformers.DynamicCache()
        with torch.no_grad():
            out = self.model(torch.tensor(ids)[None], past_key_values=self.cache)
        self.first = int(out.logits[0, -1].argmax())
        self.cold = perf_counter() - started

    @torch.no_grad()
    def tokens(self, count: int) -> list[int]:
        made = [self.first]
        while len(made) < count:
            out = self.model(torch.tensor([[made[-1]]]), past_key_values=self.cache)
            made.append(int(out.logits[0, -1].argmax()))
        self.cache.crop(1 - count)
        return made


def large(directory: Path, peer: llama_cpp.Peer | None) -> list[Figure]:
    ids = np.random.default_rng(1).integers(3, VOCAB, PROMPT)
    plain, whole = gw.open(directory), gw.open(directory)
    started, used = perf_counter(), process_time()
    whole.quantize("int8")
    quantised = f"quantising took {perf_counter() - started:.1f} s ({process_time() - used:.1f} s of CPU)"
    touched = {"bf16 weights": weight_bytes(plain), "int8 weights": weight_bytes(whole)}
    runs: dict[str, Any] = {
        "graphwright, bf16 weights": Ours(plain, ids),
        "graphwright, int8 weights": Ours(whole, ids),
        "transformers eager, bf16": Theirs(directory, torch.bfloat16, ids),
        "transformers eager, f32": Theirs(directory, torch.float32, ids),
    }
    if peer is not None:
        for kind in llama_cpp.KINDS:
            runs[f"llama.cpp, {kind}"] = llama_cpp.Theirs(peer, kind, ids, torch.get_num_threads)
    cold = Figure(
        "Decode, TinyLlama shape: from opened files to the first token", f"prompt of {PROMPT}, f32 activations"
    )
    for who, one in runs.items():
        cold.add(who, one.cold, "s")
    figures = [cold]
    reference = runs["transformers eager, f32"].tokens(CHECKED)
    same = {who: agreeing(one.tokens(CHECKED), reference) for who, one in runs.items()}
    for threads in (1, 2):
        reached = bandwidth(threads)
        figure = Figure(
            f"Decode, TinyLlama shape, {threads} thread{'s' * (threads > 1)}: tokens per second",
            f"prompt {PROMPT}, {TOKENS - 1} steps a round, {ROUNDS} interleaved rounds; median, and the best round",
        )
        set_num_threads(threads)
        timed: dict[str, list[float]] = {who: [] for who in runs}
        spent: dict[str, list[float]] = {who: [] for who in runs}
        for r in range(ROUNDS + 1):
            for who, one in runs.items() if r % 2 else reversed(runs.items()):
                sleep(0.02)  # the threads of the one before have stopped spinning
                started, used = perf_counter(), one.cpu()
                one.tokens(TOKENS)
                if r:
                    timed[who].append((perf_counter() - started) / (TOKENS - 1))
                    spent[who].append((one.cpu() - used) / (TOKENS - 1))
        for who, times in timed.items():
            low, high = interval(times)
            rate, best = 1 / float(np.median(times)), 1 / min(times)
            share = ""
            if who.startswith("graphwright"):
                bound = reached / touched[who.removeprefix("graphwright, ")]
                share = f", {100 * best / bound:.0f} % of the bandwidth's {bound:.1f}"
            note = f"best {best:.2f}{share}; {1e3 * np.median(spent[who]):.0f} ms of CPU a token"
            if same[who] < CHECKED:
                note += f"; {same[who]} of {CHECKED} tokens as in f32"
            figure.add(who, rate, "tok/s", note, 1 / high, 1 / low)
        for who, other in BESIDE:
            if other in timed:
                middle = np.median(timed[other]) / np.median(timed[who])
                best = min(timed[other]) / min(timed[who])
                figure.notes.append(f"{who}: {middle:.2f} times {other}, {best:.2f} by the best rounds")
        busy = f"load average {os.getloadavg()[0]:.1f}: above {threads} others ran, and the ratios are no lead"
        figure.notes.append(f"{busy}; measured bandwidth {reached / 1e9:.1f} GB/s; {quantised}")
        figure.notes.append(llama_cpp.ABSENT if peer is None else peer.about)
        figures.append(figure)
    return figures


def agreeing(made: list[int], reference: list[int]) -> int:
    """How many tokens are the same from the first on; with random weights the two largest logits are close together."""
    return next((i for i, (a, b) in enumerate(zip(made, reference, strict=True)) if a != b), len(made))


def weight_bytes(m: gw.Model) -> int:
    return m.generate([5], 1).bytes_per_token


# -- small models ------------------------------------------------------------------------------------------------------
def small() -> Figure:
    figure = Figure("Decode of small models", "f32 weights, 1 thread, prompt 32; median of interleaved rounds")
    set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory:
        for width, layers in ((64, 2), (128, 4), (256, 4)):
            config = transformers.LlamaConfig(
                hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=3 * width, vocab_size=512,
            )  # fmt: skip
            at = Path(directory) / f"{width}"
            transformers.LlamaForCausalLM(config).save_pretrained(at)
            ids = np.arange(32) + 7
            ours, theirs = Ours(gw.open(at), ids), Theirs(at, torch.float32, ids)
            assert ours.tokens(CHECKED) == theirs.tokens(CHECKED)
            times: dict[str, list[float]] = {"graphwright": [], "transformers eager": []}
            for _ in range(15):
                for who, one in zip(times, (ours, theirs), strict=True):
                    started = perf_counter()
                    one.tokens(24)
                    times[who].append((perf_counter() - started) / 23)
            for who, taken in times.items():
                low, high = interval(taken)
                figure.add(
                    f"width {width}, {layers} layers: {who}",
                    1e6 * float(np.median(taken)),
                    "us",
                    "",
                    1e6 * low,
                    1e6 * high,
                )
            ratio = np.median(times["transformers eager"]) / np.median(times["graphwright"])
            figure.notes.append(f"width {width}: {ratio:.1f} times eager")
    return figure


# -- choosing ----------------------------------------------------------------------------------------------------------
def choices() -> Figure:
    """The op that a step ends with, beside the processors and the draw of transformers on the same logits."""
    from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    from graphwright.array import CPU, backend, empty, from_numpy
    from graphwright.models import Sampling

    figure = Figure(f"The next id among {VOCAB}", "logits N(0, 3²), 1 thread; rounds interleaved")
    set_num_threads(1)
    torch.set_num_threads(1)
    z = (3 * np.random.default_rng(0).normal(size=(1, VOCAB))).astype(np.float32)
    cases: list[tuple[str, dict[str, Any], list[Any]]] = [
        ("the largest", {}, []),
        ("temperature 0.8", {"temperature": 0.8}, [TemperatureLogitsWarper(0.8)]),
        ("top_k 40", {"temperature": 0.8, "top_k": 40}, [TemperatureLogitsWarper(0.8), TopKLogitsWarper(40)]),
        ("top_p 0.95", {"temperature": 0.8, "top_p": 0.95}, [TemperatureLogitsWarper(0.8), TopPLogitsWarper(0.95)]),
        (
            "top_k 40, top_p 0.9, min_p 0.05",
            {"temperature": 0.8, "top_k": 40, "top_p": 0.9, "min_p": 0.05},
            [TemperatureLogitsWarper(0.8), TopKLogitsWarper(40), TopPLogitsWarper(0.9), MinPLogitsWarper(0.05)],
        ),
    ]
    for name, fields, processors in cases:
        rule = Sampling(**fields)
        operands = z, np.array([rule.numbers()], "f4"), np.array([rule.keys(0, 9)]), np.full((1, 1, 2), -1, "i4")
        outs = [from_numpy(np.zeros(1, np.int64)), from_numpy(np.zeros_like(z))]
        work = [empty(s.sizes, s.dtype) for s in backend(CPU).workspace("sample_token", (), (), {})]
        (ours,) = backend(CPU).bind("sample_token", outs, [from_numpy(x) for x in operands], {}, work)

        def theirs(processors: list[Any] = processors) -> Any:
            ids, scores = torch.zeros(1, 1, dtype=torch.long), torch.from_numpy(z)
            for processor in processors:
                scores = processor(ids, scores)
            return scores.softmax(-1).multinomial(1) if processors else scores.argmax(-1)

        taken: dict[str, list[float]] = {"graphwright": [], "transformers": []}
        for _ in range(ROUNDS):
            taken["graphwright"].append(seconds(ours))
            taken["transformers"].append(seconds(theirs))
        for who, times in taken.items():
            low, high = interval(times)
            figure.add(f"{name}: {who}", 1e6 * float(np.median(times)), "us", "", 1e6 * low, 1e6 * high)
    return figure


# -- forks and blocks --------------------------------------------------------------------------------------------------
def wide(width: int = 256, layers: int = 4) -> gw.Model:
    """A model with the attention of the large one and little else."""
    from graphwright.models.open import config_from, create

    fields = {
        **{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": width, "head_dim": DIM},
        **{"num_hidden_layers": layers, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS},
        **{"intermediate_size": width, "vocab_size": 512, "max_position_embeddings": 8192},
    }
    return create(config_from(fields))


def seconds(call: Callable[[], Any], n: int = 15) -> float:
    times = []
    for _ in range(n):
        started = perf_counter()
        call()
        times.append(perf_counter() - started)
    return float(np.median(times))


def forks() -> Figure:
    figure = Figure("A fork of 1024 rows", "4 layers, 4 key heads of 64, f32; blocks of 16")
    m = wide()
    cache = m.new_cache(4096, kind="paged", block=16, prefix_bytes=0)
    s = cache.sequence()
    s.prefill(np.random.default_rng(0).integers(0, 512, (1, 1020)))
    figure.add("graphwright: fork", 1e6 * seconds(lambda: s.fork().release()), "us")
    held = transformers.DynamicCache()
    for layer in range(4):
        held.update(torch.zeros(1, GROUPS, 1020, DIM), torch.zeros(1, GROUPS, 1020, DIM), layer)
    figure.add("transformers: deepcopy of a cache", 1e6 * seconds(lambda: copy.deepcopy(held)), "us")
    before = cache.pool.used
    tails = [s.fork() for _ in range(16)]
    for i, t in enumerate(tails):
        t.step(np.array([[i]]))
    extra = (cache.pool.used - before) * cache.pool.block_bytes
    figure.add("graphwright: bytes of 16 continuations beyond the first", extra, "B", f"{before} blocks are shared")
    figure.add("transformers: bytes of 16 copies", 16 * 4 * 2 * GROUPS * 1020 * DIM * 4, "B")
    return figure


def prefixes() -> Figure:
    figure = Figure("Time to the first token after a cached prefix", "1024 + 32 tokens, 4 layers, 1 thread")
    set_num_threads(1)
    m, rng = wide(), np.random.default_rng(0)
    whole = rng.integers(0, 512, (1, 1056))
    alone, shared = m.new_cache(2200, prefix_bytes=0), m.new_cache(2200)

    def first(cache: Any, ids: np.ndarray) -> None:
        with cache.sequence() as s:
            s.prefill(ids)

    first(shared, whole[:, :1025])
    tail = m.new_cache(64, prefix_bytes=0)
    figure.add("graphwright: 1056 tokens, cold", 1e3 * seconds(lambda: first(alone, whole), 7), "ms")
    figure.add("graphwright: 1024 of them found", 1e3 * seconds(lambda: first(shared, whole), 7), "ms")
    figure.add("graphwright: 32 tokens alone", 1e3 * seconds(lambda: first(tail, whole[:, :32]), 7), "ms")
    return figure


def host() -> Figure:
    """What a step takes beside its kernels: checks, tables, copying ids in and logits out."""
    figure = Figure("Host's share of a step", "4 layers, f32, after 128 cached tokens, 1 thread; median of 60 steps")
    set_num_threads(1)
    m, rng = wide(), np.random.default_rng(0)
    for count in (1, 8):
        cache = m.new_cache(400 * count, count, prefix_bytes=0)
        batch = [cache.sequence() for _ in range(count)]
        for s in batch:
            s.prefill(rng.integers(0, 512, (1, 128)))
        token = np.full((count, 1), 3)
        cache.step(batch, token)
        space = cache.steps.spaces[True, count, 1].space
        inside = [0.0]

        def timed(call: Callable[[], Any], inside: list[float] = inside) -> Callable[[], Any]:
            def run() -> Any:
                started = perf_counter()
                result = call()
                inside[0] += perf_counter() - started
                return result

            return run

        if space.kernels.fed is not None:  # one native call, which also takes the inputs
            space.kernels.fed.run = timed(space.kernels.fed.run)
        space.kernels.calls[:] = [timed(call) for call in space.kernels.calls]
        beside, whole = [], []
        for _ in range(60):
            inside[0], started = 0.0, perf_counter()
            cache.step(batch, token)
            whole.append(perf_counter() - started)
            beside.append(whole[-1] - inside[0])
        step, rest = (1e6 * float(np.median(taken)) for taken in (whole, beside))
        figure.add(f"{count} sequences: a step", step, "us")
        figure.add(f"{count} sequences: beside its kernels", rest, "us", f"{100 * rest / step:.0f} %")
    return figure


def blocks() -> Figure:
    figure = Figure("Paged beside contiguous rows: one step", "4 layers, 32 query and 4 key heads of 64, f32, 1 thread")
    set_num_threads(1)
    m, rng = wide(), np.random.default_rng(0)
    for length in (128, 1024, 4096):
        ids, token = rng.integers(0, 512, (1, length)), np.array([[3]])
        rows: dict[str, Any] = {"contiguous": m.new_cache(length + 64, kind="static")}
        rows |= {
            f"blocks of {b}": m.new_cache(length + 64, kind="paged", block=b).sequence() for b in (16, 32, 64, 128)
        }
        times: dict[str, list[float]] = {who: [] for who in rows}
        for one in rows.values():
            one.prefill(ids)
        for r in range(25):
            for who, one in rows.items():
                started = perf_counter()
                one.step(token)
                if r > 3:
                    times[who].append(perf_counter() - started)
        for who, taken in times.items():
            low, high = interval(taken)
            figure.add(f"{length} rows, {who}", 1e6 * float(np.median(taken)), "us", "", 1e6 * low, 1e6 * high)
    return figure
