"""What runs between the products of a decoding step: the most that fusing it with them could gain."""

from __future__ import annotations

from collections import Counter
from time import perf_counter

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure
from graphwright.array.cpu import set_num_threads
from graphwright.models.open import config_from, create

SHAPES = {
    "2 layers as of a 1.1 B Llama, 2048 wide": (2048, 2, 32, 4, 5632, 32_000),
    "4 layers, 256 wide": (256, 4, 4, 4, 704, 512),
}


def model(width: int, layers: int, heads: int, kv_heads: int, inner: int, vocabulary: int) -> gw.Model:
    fields = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocabulary,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 64,
        "intermediate_size": inner,
        "tie_word_embeddings": False,
    }
    return create(config_from(fields))


def run() -> list[Figure]:
    figure = Figure(
        "Between the products of a step",
        "f32, one text after 32 cached tokens, 1 thread; each op by itself, in order, the best of 9 runs",
    )
    set_num_threads(1)
    for name, shape in SHAPES.items():
        cache = model(*shape).new_cache(256, 1, prefix_bytes=0)
        text, token = cache.sequence(), np.full((1, 1), 3)
        text.prefill(np.arange(1, 33)[None])
        cache.step([text], token)
        fed = cache.steps.spaces[True, 1, 1]
        space, instrs = fed.space, fed.space.plan.instrs
        calls, best = [space.kernels.calls_of(i) for i in range(len(instrs))], [float("inf")] * len(instrs)
        for _ in range(9):
            space.feed(dict(zip(space.plan.inputs, fed._arrays, strict=True)))
            for i, some in enumerate(calls):
                started = perf_counter()
                for call in some:
                    call()
                best[i] = min(best[i], perf_counter() - started)
        spent = Counter[str]()
        for instr, seconds in zip(instrs, best, strict=True):
            spent["products" if instr.op == "linear" else "between"] += seconds
        share = spent["between"] / spent.total()
        figure.add(f"{name}: products", 1e6 * spent["products"], "us")
        figure.add(f"{name}: all between them", 1e6 * spent["between"], "us", f"{100 * share:.1f} % of both")
    return [figure]
