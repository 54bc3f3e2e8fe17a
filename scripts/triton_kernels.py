"""Compile the Triton kernels for GPUs that need not be there; print the registers, memory and spills of each.

    python scripts/triton_kernels.py [--json] [--targets 80,90,100] [--first] [op ...]

Sizes are those of a Llama of 4096 channels. It needs Triton (see scripts/triton.sh); the exit code is 1 if a kernel
spills registers or contains atomic instructions.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Hashable, Iterator
from math import prod
from typing import Any

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch

from graphwright.array.cpu.kernel import TORCH_DTYPE
from graphwright.array.spec import Spec
from graphwright.array.triton.ahead import Compiled, compile_launch, form_key
from graphwright.array.triton.kernel import Launch, table
from graphwright.ops import OPS

DTYPES = {t: d for d, t in TORCH_DTYPE.items()}
BF16, F32, I64 = torch.bfloat16, torch.float32, torch.int64
TOKENS, WIDE, CLASSES = 4096, 4096, 32000

Operand = tuple[tuple[int, ...], torch.dtype]
Typical = tuple[str, list[Operand], dict[str, Any]]


def typical() -> Iterator[Typical]:
    """Yield operands and attributes of each op with a kernel, as models use it."""
    for kind in (BF16, F32):
        for width in (32, 128, 512, 2048, 8192, CLASSES):
            yield "softmax", [((TOKENS, width), kind)], {"axis": -1}
        yield "softmax", [((64, 1024, 64), kind)], {"axis": 1}
        yield "softmax", [((TOKENS, 2048), kind), ((TOKENS, 2048), torch.bool)], {"axis": -1}
        yield "log_softmax", [((TOKENS, CLASSES), kind)], {"axis": -1}
        for width in (128, 1024, WIDE, 16384):
            row = ((width,), kind)
            attrs = {"eps": 1e-5, "unit_offset": False, "cast_before_scale": True}
            yield "rms_norm", [((TOKENS, width), kind), row], attrs
            yield "layer_norm", [((TOKENS, width), kind), row, row], {"rank": 1, "eps": 1e-5}
        wide, over = ((TOKENS, WIDE), kind), {"axes": (-1,), "keepdims": False}
        for op in ("sum", "mean", "amax", "amin", "prod", "any", "all"):
            yield op, [wide], over
        for axes in ((0,), None):
            yield "sum", [wide], {**over, "axes": axes}
        yield "sum", [((32, 256, 32, 32), kind)], {**over, "axes": (0, 2, 3)}
        yield "argmax", [((64, CLASSES), kind)], {"axis": -1}
        yield "argmin", [wide], {"axis": 0}
        yield "cumsum", [wide], {"axis": -1, "reverse": False}
        for width in (64, 128, 256)[: 3 if kind == BF16 else 2]:
            q, k = ((2, 32, 2048, width), kind), ((2, 8, 2048, width), kind)
            for more in ({}, {"causal": False}, {"window": 512, "softcap": 30.0}):
                attrs = {"scale": 0.1, "causal": True, "window": None, "softcap": None, "optional": (), **more}
                yield "sdpa", [q, k, k], attrs
                if kind == BF16 or width < 128 or not attrs["softcap"]:
                    yield "sdpa_backward", [q, k, k, q, q], attrs
            yield "sdpa", [((2, 32, 1, width), kind), k, k], {**attrs, "softcap": None}
            more = [((2, 2048), torch.bool), ((), I64), ((2, 32, 2048, 2048), kind), ((32,), kind)]
            attrs = {**attrs, "optional": ("key_mask", "q_start", "bias", "sinks")}
            yield "sdpa", [q, k, k, *more], attrs
            if kind == BF16 or width < 128:
                yield "sdpa_backward", [q, k, k, *more, q, q], attrs
        tables = [((1, 2048, 64), kind)] * 2
        for style in ("half", "interleaved"):
            yield "rope", [((2, 32, 2048, 128), kind), *tables], {"style": style}
        scores, ids, rows = ((TOKENS, CLASSES), kind), ((TOKENS,), I64), ((TOKENS,), F32)
        for smoothing in (0.0, 0.1):
            attrs = {"ignore_index": -100, "smoothing": smoothing}
            yield "cross_entropy", [scores, ids], attrs
            yield "cross_entropy_backward", [scores, ids, rows, rows], attrs
        yield "embedding", [((CLASSES, WIDE), kind), ids], {}
        yield "embedding_backward", [((TOKENS, WIDE), kind), ids], {"rows": CLASSES}
        grads: list[Operand] = [((WIDE, n), kind) for n in (WIDE, 1024, 1)]
        yield "unscale_check", [((), F32), ((), F32), *grads], {}
        yield "zero_check", [((), F32), *grads], {}
        table, lengths = ((16, 128), torch.int32), ((16,), torch.int32)
        for width in (64, 128, 256)[: 3 if kind == BF16 else 2]:
            pool = ((2048, 8, 16, width), kind)
            for queries in (1, 64):
                q = ((16, 32, queries, width), kind)
                attrs = {"scale": 0.1, "window": None, "softcap": None}
                yield "sdpa_paged", [q, pool, pool, table, lengths], attrs
                attrs = {"scale": 0.1, "window": 512, "softcap": 30.0}
                yield "sdpa_paged", [q, pool, pool, table, lengths, ((32,), kind)], attrs
        entries = ((16, 8, 64, 128), kind)
        yield "kv_append_paged", [((2048, 8, 16, 128), kind), entries, table, lengths], {}
        yield "kv_append", [((16, 8, 2048, 128), kind), entries, ((), I64)], {}
        rows, ends = ((8192, 2048), kind), ((65,), I64)
        yield "grouped_matmul", [rows, ((64, 2048, 1024), kind), ends], {}
        yield "grouped_outer", [rows, ((8192, 1024), kind), ends], {}
        sample = {"shape": (TOKENS, WIDE), "stream": 1, "dtype": DTYPES[kind]}
        for op in ("uniform", "normal", "gumbel"):
            yield op, [((2,), I64)], sample
        yield "bernoulli", [wide, ((2,), I64)], {"stream": 1}
        yield "dropout", [wide, ((2,), I64)], {"stream": 1, "p": 0.1}
        yield "index", [wide, ids], {"axis": 0}
        yield "index_put", [wide, wide, ids], {"axis": 0}
        yield "index_add", [wide, wide, ids], {"axis": 0}
        yield "index_sum", [wide, ids], {"axis": 0, "shape": (TOKENS, WIDE)}
        line, chosen = ((TOKENS, 128), kind), ((TOKENS, 8), I64)
        pairs, runs = ((TOKENS, 8), F32), [((65,), I64), *[((TOKENS * 8,), I64)] * 2]
        for act, gates in (("gated", 2), ("oai", 2), ("mlp", 1)):
            matrices = [*[((1024, 2048), kind)] * gates, ((2048, 1024), kind)] * 64
            attrs = {"kind": act, "act": "silu" if act == "gated" else "gelu", "bias": False, "algorithm": "auto"}
            yield "expert_mlp", [((TOKENS, 2048), kind), *runs, pairs, *matrices], attrs
        for width in (32, 128, 2048, 8192):
            yield "topk", [((TOKENS, width), kind)], {"k": 8, "axis": -1, "largest": True}
        yield "gather", [line, chosen], {"axis": 1}
        yield "scatter", [line, chosen, ((TOKENS, 8), kind)], {"axis": 1}
        yield "scatter_add", [line, chosen, ((TOKENS, 8), kind)], {"axis": 1}
        yield "scatter_sum", [((TOKENS, 8), kind), chosen], {"axis": 1, "shape": (TOKENS, 128)}
        channels = ((256,), kind)
        image, statistics = ((32, 256, 32, 32), kind), [((256,), F32)] * 2
        yield "group_norm", [image, channels, channels], {"groups": 32, "eps": 1e-5}
        yield "batch_norm", [image, *statistics, channels, channels], {"eps": 1e-5}
        yield "batch_norm_train", [image, *statistics, channels, channels], {"eps": 1e-5, "momentum": 0.1}

    yield "dispatch", [((TOKENS, 8), I64)], {"experts": 64}
    yield "dispatch", [((TOKENS, 64), torch.bool)], {"experts": 64}
    yield "randint", [((2,), I64)], {"shape": (TOKENS,), "stream": 1, "low": 0, "high": CLASSES}
    yield "stochastic_round", [((TOKENS, WIDE), F32), ((2,), I64)], {"stream": 1}
    params: list[Operand] = [((WIDE, n), F32) for n in (WIDE, 1024, 1)]
    first, steps = [((), torch.float64), ((), F32)], [((), F32)] * 3
    adam = {"beta1": 0.9, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
    for amsgrad in (False, True):
        columns = params * (5 if amsgrad else 4)
        for op in ("adamw_step", "adam_step"):
            yield op, [*first, *columns, *steps], {**adam, "amsgrad": amsgrad}
    sgd = {"weight_decay": 0.1, "maximize": False, "dampening": 0.0}
    for momentum in (0.9, 0.0):
        columns = params * (3 if momentum else 2)
        yield "sgd_step", [*first, *columns, *steps], {**sgd, "momentum": momentum, "nesterov": momentum > 0}


def spec(operand: Operand) -> Spec:
    """Return the spec of an operand."""
    shape, kind = operand
    return Spec(shape, DTYPES[kind])


def empty(of: Spec) -> torch.Tensor:
    """Return a tensor without memory."""
    return torch.empty(of.sizes, dtype=TORCH_DTYPE[of.dtype], device="meta")


def launches(op: str, operands: list[Operand], attrs: dict[str, Any]) -> list[Launch]:
    """Return the launches of an op on tensors that have no memory."""
    ins = [spec(o) for o in operands]
    made = OPS[op].infer(*ins, **attrs)
    outs = list(made) if isinstance(made, tuple) else [made]
    row = table()[op]
    work = row.work(outs, ins, attrs) if row.work else []
    out_tensors, in_tensors = [empty(s) for s in outs], [empty(s) for s in ins]
    if reason := row.takes(out_tensors, in_tensors, attrs):
        raise SystemExit(f"{op} of {ins}: {reason}")
    calls = row.bind(out_tensors, in_tensors, attrs, [empty(w) for w in work])
    return [call for call in (calls if isinstance(calls, list) else [calls]) if isinstance(call, Launch)]


def facts(op: str, operands: list[Operand], launch: Launch, made: Compiled, capability: int) -> dict[str, Any]:
    """Return the row of a compiled launch."""
    shape, kind = max(operands, key=lambda o: prod(o[0]))
    return {
        "op": op, "kernel": made.name, "operand": list(shape), "dtype": str(kind).removeprefix("torch."),
        "target": f"sm_{capability}", "warps": launch.warps, "registers": made.registers, "spills": made.spills,
        "shared": made.shared, "atomics": list(made.atomics),
    }  # fmt: skip


def rows(capability: int, chosen: list[str], first: bool) -> Iterator[dict[str, Any]]:
    """Compile each kernel for a compute capability, or of each function only the first form; yield what it uses."""
    made: dict[Hashable, Compiled] = {}
    seen = set()
    for op, operands, attrs in typical():
        for launch in launches(op, operands, attrs) if not chosen or op in chosen else ():
            key = launch.function.__name__ if first else form_key(launch, capability)
            if key not in made:
                made[key] = compile_launch(launch, capability)
            if (op, key) not in seen:
                seen.add((op, key))
                yield facts(op, operands, launch, made[key], capability)


def main() -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("ops", nargs="*", help="ops (default: all)")
    parser.add_argument("--targets", default="90", help="compute capabilities, such as 80,90,100")
    parser.add_argument("--json", action="store_true", help="print a JSON document instead of a table")
    parser.add_argument("--first", action="store_true", help="compile one form of each function")
    given = parser.parse_args()
    found = [row for target in given.targets.split(",") for row in rows(int(target), given.ops, given.first)]
    if given.json:
        print(json.dumps({"schema": 1, "kernels": found}))
    else:
        print("| op | kernel | largest operand | dtype | target | warps | registers | shared, bytes | spills, bytes |")
        print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
        for row in found:
            shape = " x ".join(map(str, row["operand"]))
            print(f"| {row['op']} | {row['kernel']} | {shape} | {row['dtype']} | {row['target']} | {row['warps']} | "
                  f"{row['registers']} | {row['shared']} | {row['spills']} |")  # fmt: skip
    return int(any(row["spills"] or row["atomics"] for row in found))


if __name__ == "__main__":
    raise SystemExit(main())
