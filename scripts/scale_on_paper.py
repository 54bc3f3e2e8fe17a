"""On paper: the time of a training step of a 7 B or 8 B Llama on 8 to 1024 GPUs, from the costs of the graph's ops.

    python scripts/scale_on_paper.py [--gpu docs/gpu.json] [--write docs/scale.md]

Nothing here was run on these machines. Every op of the step (forward and backward, as `program.grad` makes them) takes
the longer of its operations at the rate of products and its bytes at the bandwidth of memory; chains of elementwise ops
move their first operands and last results only, as their fused kernels do. Gradients and parameters travel as with
`data_parallel(step, shard_optimizer=True)`: reduce-scatter beside the backward, all-gather of new values after it.
Rates are those that `make gpu` measured, where its file has them, else the stated assumptions.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from graphwright.array import dtype
from graphwright.autograd import Parameter
from graphwright.models.architectures.registry import find
from graphwright.models.loading import assemble
from graphwright.models.open import config_from
from graphwright.ops import get
from graphwright.program import Program
from graphwright.program.kinds import KINDS
from graphwright.program.weights import abstract_array

_LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "hidden_act": "silu",
          "tie_word_embeddings": False, "num_hidden_layers": 32, "num_attention_heads": 32,
          "hidden_size": 4096}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "Llama 7 B": {**_LLAMA, "intermediate_size": 11008, "num_key_value_heads": 32, "vocab_size": 32000,
                  "max_position_embeddings": 4096, "rope_theta": 1e4},
    "Llama 3.1 8 B": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8, "vocab_size": 128256,
                      "max_position_embeddings": 8192, "rope_theta": 5e5},
}  # fmt: skip
"""Fields of their configs."""
PUBLISHED = {("Llama 3.1 8 B", 8): 6667, ("Llama 3.1 8 B", 128): 6514}
"""Tokens a second and GPU, see the note."""
_PUBLISHED_NOTE = """
torchtitan's figures are those of FSDP with torch.compile in bfloat16, 2 x 8192 tokens a GPU, on H100 of 500 W with
2.4 TB/s, 8 a host, 400 Gb/s a GPU between hosts (pytorch/torchtitan, benchmarks/llama3_h100_202412_torchtitan.md,
December 2024). FSDP divides the weights too, and that run recomputed selected activations; the step here does neither,
so it would not fit the memory of these GPUs at this batch: read the columns side by side as orders of magnitude only.
From 16 GPUs on the slowest link of the ring is the one between hosts, and each GPU sends 2 (n - 1) / n of the
gradients and parameters whatever n is, so the share of communication hardly changes.
"""


@dataclass(frozen=True)
class Machine:
    """Assumptions about a cluster; rates in units a second.

    Attributes:
        products: floating-point operations of large products in bfloat16.
        attention: those of attention.
        memory: bytes of memory read or written.
        inside, between: bytes that a GPU sends to others of its host, and of other hosts.
        latency: seconds of a collective besides its bytes, a GPU of the ring.
        launches: seconds of a captured region's launch.
        host: GPUs of a host.
        sources: where each number is from.
    """

    products: float = 600e12
    attention: float = 400e12
    memory: float = 2.1e12
    inside: float = 360e9
    between: float = 45e9
    latency: float = 4e-6
    launches: float = 1e-4
    host: int = 8
    sources: tuple[str, ...] = (
        "products: 600 TFLOP/s in bfloat16, 61 % of the 989 of an H100's data sheet (assumed)",
        "attention: 400 TFLOP/s, forward and backward together (assumed)",
        "memory: 2.1 TB/s, 88 % of 2.4 (assumed)",
        "inside a host: 360 GB/s a GPU, 80 % of NVLink's 450 in one direction (assumed)",
        "between hosts: 45 GB/s a GPU, 90 % of 400 Gb/s (assumed)",
        "a collective: 4 us a GPU of the ring; a launch of a captured region: 0.1 ms (assumed)",
    )


def measured(machine: Machine, path: Path) -> Machine:
    """Return the machine with the rates that `make gpu` measured."""
    if not path.is_file():
        return machine
    rows = {r["name"]: r for r in json.loads(path.read_text())["groups"].get("figures", ())}
    sources = list(machine.sources)
    for row, fact, field, unit in (("products", "bfloat16: TFLOP/s", "products", 1e12),
                                   ("copy bandwidth", "graphwright, GB/s", "memory", 1e9)):  # fmt: skip
        value = rows.get(row, {}).get("facts", {}).get(fact)
        if rows.get(row, {}).get("outcome") == "passed" and value:
            machine = replace(machine, **{field: value * unit})
            sources = [s for s in sources if not s.startswith(field)]
            sources.append(f"{field}: {value * unit:.3g} a second, measured by `make gpu`")
    return replace(machine, sources=tuple(sources))


def program_of(fields: Mapping[str, Any]) -> Program:
    """Return the program of a model in bfloat16, whose weights have no values."""
    config = config_from(dict(fields))
    family = find(config)
    dims, keys = family.read(config), dict[str, str]()
    values = {}
    for path, key, shape, _ in family.weights(dims):
        values[path], keys[path] = Parameter(abstract_array(shape, dtype("bfloat16")), True, key), key
    return assemble(family, dims, keys, values, "bfloat16", "on paper")


@dataclass(frozen=True)
class Work:
    """The work of one GPU in a step: seconds of products, of attention and of everything bound by memory."""

    products: float
    attention: float
    memory: float
    flops: float

    @property
    def seconds(self) -> float:
        """All of it, one after another."""
        return self.products + self.attention + self.memory


def work_of(p: Program, dims: Mapping[str, int], machine: Machine) -> Work:
    """Return the work of a program, by the costs of its ops."""
    times, flops = dict.fromkeys(("products", "attention", "memory"), 0.0), 0
    for node in p.order():
        op = p.op(node)
        if op in KINDS or get(op).view is not None:
            continue
        row, operands = get(op), p.operands(node)
        ins = [p.spec(v).bind(dims) for v in operands]
        outs = [spec.bind(dims) for spec in p.specs(node)]
        cost, traits = row.cost(ins, outs, p.attrs(node)), row.traits
        moved = cost.read + cost.write
        if _elementwise(op):  # values between two ops of a chain stay in registers
            moved -= sum(s.nbytes for v, s in zip(operands, ins, strict=True) if _elementwise(p.op(v.node)))
            readers = list(p.graph.successors(node))
            moved -= sum(o.nbytes for o in outs) if readers and all(_elementwise(p.op(m)) for m in readers) else 0
        attention = traits.attention or (traits.backward_of and get(traits.backward_of).traits.attention)
        rates = {"attention": machine.attention, "products": machine.products, "memory": float("inf")}
        kind = "attention" if attention else "products" if traits.contracts else "memory"
        computing, moving = cost.flops / rates[kind], max(moved, 0) / machine.memory
        times[kind if computing > moving else "memory"] += max(computing, moving)
        flops += 0 if kind == "memory" else cost.flops
    return Work(**times, flops=flops)


def _elementwise(op: str) -> bool:
    return op not in KINDS and (get(op).traits.elementwise or get(op).traits.nary)


@dataclass(frozen=True)
class Step:
    """A step on some number of GPUs, in seconds: computing, what of the communication is not hidden, both together."""

    gpus: int
    compute: float
    exposed: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute + self.exposed


def step_on(gpus: int, forward: Work, both: Work, parameters: int, m: Machine) -> Step:
    """Return the time of a data-parallel step with divided optimizer states (Rajbhandari et al. 2020, section 5.1)."""
    link = m.inside if gpus <= m.host else m.between  # a ring is as fast as its slowest link
    share = (gpus - 1) / gpus
    scatter = 4 * parameters * share / link + m.latency * gpus  # gradients in float32
    gather = 2 * parameters * share / link + m.latency * gpus  # new values in bfloat16
    update = 34 * parameters / gpus / m.memory  # gradient, two moments and the master weight in float32, the weight
    backward = both.seconds - forward.seconds
    compute = m.launches + both.seconds + update
    return Step(gpus, compute, max(0.0, scatter - backward) + gather)


GPUS = (8, 16, 32, 64, 128, 256, 512, 1024)
TOKENS = {"Llama 7 B": (4, 4096), "Llama 3.1 8 B": (2, 8192)}
"""Sequences of a GPU, and their length."""


def page(machine: Machine) -> str:
    """Return the page: assumptions, then a table for each model."""
    lines = ["# A step at scale, on paper", "", "Written by `python scripts/scale_on_paper.py --write docs/scale.md`.",
             "**No such cluster was used.** " + " ".join((__doc__ or "").split("\n\n")[2].split()), "",
             "Assumptions:", "", *(f"- {source}" for source in machine.sources), ""]  # fmt: skip
    for name, fields in MODELS.items():
        batch, tokens = TOKENS[name]
        p, sizes = program_of(fields), {"B": batch, "T": tokens}
        parameters = sum(p.spec(n).size for n in p.params())
        gradient = p.grad("logits", [p.path(n) for n in p.params()], sizes, seeded=True)
        forward, both = (work_of(q, sizes, machine) for q in (p, gradient))
        work = f"{both.flops / 1e12:.0f} TFLOP of products and attention"
        times = (
            f"{both.products:.3f} s in products, {both.attention:.3f} s in attention, {both.memory:.3f} s in the rest"
        )
        head = ("GPUs", "step, s", "communication not hidden", "tokens a second and GPU", "torchtitan, published")
        lines += [f"## {name}: {batch} x {tokens} tokens a GPU", "",
                  f"{parameters / 1e9:.2f} billion parameters; forward and backward {work}: {times}.", "",
                  f"| {' | '.join(head)} |", "| --- | --- | --- | --- | --- |"]  # fmt: skip
        for gpus in GPUS:
            step = step_on(gpus, forward, both, parameters, machine)
            known = PUBLISHED.get((name, gpus))
            lines.append(f"| {gpus} | {step.seconds:.3f} | {100 * step.exposed / step.seconds:.0f} % |"
                         f" {batch * tokens / step.seconds:,.0f} | {f'{known:,}' if known else ''} |")  # fmt: skip
        lines.append("")
    what = " ".join((_PUBLISHED_NOTE).split())
    return "\n".join([*lines, what, ""])


def main() -> None:
    """Print or write the page."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--gpu", type=Path, default=Path("docs/gpu.json"), help="what `make gpu` measured")
    arguments.add_argument("--write", type=Path, help="write the page to this file instead of printing it")
    given = arguments.parse_args()
    text = page(measured(Machine(), given.gpu))
    if given.write is None:
        print(text)
    else:
        given.write.write_text(text)


if __name__ == "__main__":
    main()
