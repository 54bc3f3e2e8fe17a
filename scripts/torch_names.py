"""Write docs/torch.md, the table of torch's names: `python scripts/torch_names.py [--check]`.

With --check nothing is written; the exit status is 1 if the page differs from what would be written.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
from written import write_or_check

import graphwright as gw
from graphwright.autograd import names
from graphwright.autograd.tensor import Tensor

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "ops"))
from opinfo import COUNTS, KNOWN  # pyright: ignore[reportMissingImports]

PAGE = Path(__file__).parents[1] / "docs" / "torch.md"
HEAD = """# Torch's names

The functions on this page have torch's names, argument names, defaults and results, except for what differs; expressions in torch's
spelling are tested against torch ([`tests/autograd/test_torch_names.py`](../tests/autograd/test_torch_names.py)). `dim` and `keepdim` may also be written
`axis` and `keepdims`, as in numpy. This page is written by `scripts/torch_names.py` from the table in `autograd/names.py`.

## What differs

| here | torch | why |
| --- | --- | --- |
| `gw.trace(f, x)` records a program | `torch.trace` sums a diagonal | recording is this library's main verb; `x.trace()` sums the diagonal |
| `gw.mode` switches training and inference | `torch.mode` is the most frequent value | `x.mode()` is the most frequent value |
| `gw.compile` | another thing | it compiles programs |
| `gw.save` writes values to safetensors files; `gw.load` reads them, and programs from their directories | pickles | loading must not run code; suffixes of pickles (.pt) are refused |
| `F.cross_entropy(..., dim=1)` | no `dim` | `dim=-1` takes a language model's logits [B, T, K] |
| `distributions.Categorical(x)`, `Bernoulli(x)`: logits first | probabilities first | networks return logits; `probs=` names the others |
| samples of `Gamma`, `Chi2`, `Beta`, `Dirichlet`, `StudentT`, `Poisson`, `Binomial` are drawn on the host | on the device | outside traces only, without a gradient; `log_prob` has one |
| `kl_divergence` of two classes, `distributions.transforms` and `constraints` | they exist | missing |
| `gw.vmap` and `gw.func.vmap` run the function once per entry | one call on the batch | correct for every function |
| `nn.utils.parametrizations` names its parameters `weight_g`, `weight_v`, `weight_orig` | `parametrizations.weight.original0` | as `nn.utils.weight_norm` and `spectral_norm` do |
| `x.data` is an array of `graphwright.array` | a tensor | ops compute on it; it has the methods and operators of tensors, but `x.data.size` is a number, and `backward` sees writes to it |
| `x.type()` is `float32` | `torch.FloatTensor` | torch's name is that of a legacy class |
| `x.shape` is a tuple | a `torch.Size` | which is a tuple too |
| no complex, sparse, quantised or named tensors, no `as_strided` | they exist | the operations of networks need none of them |
| `F.interpolate(antialias=True)`, `F.fractional_max_pool2d`, `torch.fft`, `torch.special`, `linalg.eig`, `lu` and `ldl` | they exist | missing |
| `gw.pad(x, widths)` pads in axis order | `F.pad` counts from the last axis | `F.pad` is torch's |
| `gw.data` | `torch.utils.data` | the same loaders and datasets, without samplers |
| no `set_default_dtype`, `set_default_device`, `use_deterministic_algorithms` | they exist | `dtype=`, `device=` and `compile(deterministic=True)` say so where it matters |
| no `memory_format`, `layout`, `pin_memory` of tensors | they exist | arrays are strided, the plan chooses layouts |
| `nn.utils.functional_call` | `torch.func.functional_call` | modules are a layer above tensors |
| `ChainedScheduler` takes schedules that scale the base rate | all | a rate is a function of the step |
| lazy modules have no parameters before their first call | uninitialised ones | make the optimizer after it |
| `nn` modules have no arguments `device` and `dtype` | they exist | `.to` moves and converts a module |
| attention of a query that sees no key is 0 | NaN | padded batches train |
| `gw.linalg` runs in numpy on the host, outside traces (`inv` of one matrix apart) | on the device | factorisations are no ops |
| optimizers have no `foreach`, `fused`, `capturable`, `differentiable` | they choose an implementation | the plan chooses it |
| `nn.utils.clip_grad_norm_` without a gradient raises | returns 0 | `backward` was forgotten |
| errors are `GraphwrightError`s that are also `ValueError`, `TypeError` or `IndexError` | `RuntimeError` mostly | they say where, expected, got and a fix |
"""


def public(home: Any) -> set[str]:
    """The public functions of a module or class of torch, without in-place forms and what is deprecated or internal."""
    skip = {"nn", "optim", "jit"}
    found = {n for n in dir(home) if not n.startswith("_") and n not in skip}
    return {n for n in found if callable(getattr(home, n)) and not inspect.isclass(getattr(home, n))}


def classes_of(home: Any) -> set[str]:
    """The public classes that a module defines, or a file in its folder."""
    found = {n: v for n, v in vars(home).items() if not n.startswith("_") and inspect.isclass(v)}
    return {n for n, v in found.items() if v.__module__.startswith(home.__name__)}


def layers() -> set[str]:
    """The modules of torch that compute something."""
    found = {n for n in classes_of(torch.nn) if issubclass(getattr(torch.nn, n), torch.nn.Module)}
    return found - {"Module", "Container", "RNNBase", "RNNCellBase", "DataParallel"}


def section(title: str, ours: set[str], theirs: set[str], note: str = ":", kind: str = "function") -> str:
    """One home: how many of torch's names exist, and which."""
    have = sorted(n for n in ours & theirs if not n.endswith("_"))
    stored = sorted(n for n in ours & theirs if n.endswith("_"))
    total = f"{len(have)} {kind}{'' if len(have) == 1 else 'es' if kind.endswith('s') else 's'}"
    text = f"\n## {title}\n\n{total}{f' and {len(stored)} in-place forms' if stored else ''}{note}\n\n"
    wrapped = fill(" ".join(f"`{n}`" for n in have), 128, break_long_words=False, break_on_hyphens=False)
    text += wrapped + "\n"
    if stored:
        text += "\nIn place: " + fill(" ".join(f"`{n}`" for n in stored), 118, break_long_words=False) + "\n"
    return text


def database() -> str:
    """The section on torch's database of ops: outcomes, and known differences."""
    counts = dict(line.split(": ") for line in COUNTS.read_text("utf-8").splitlines())
    text = f"""
## Samples of torch's OpInfo

torch has a database of samples for its own tests. {counts.pop("entries with a counterpart")} of its {counts.pop("entries")} entries have a counterpart here
(the others: complex numbers, sparse layouts, `fft`, `special`, some factorisations, internal functions). All samples in float32,
float64, int64 and bool were run in both libraries, with gradients in float64, and all error inputs
([`tests/ops/test_opinfo.py`](../tests/ops/test_opinfo.py); `python scripts/opinfo_counts.py` counts). No value is wrong.

| outcome | samples |
| --- | --- |
"""
    text += "".join(f"| {name} | {number} |\n" for name, number in counts.items())
    text += """
`same` and `gradient same` are equal in dtype, shape and values; `refused` raises an error where torch computes; `error typed` is an
error input of torch that raises an error here too, `error accepted` one that is computed, `number accepted` one with a
Python number for a tensor; `outside` has dtypes, layouts, devices or arguments that do not exist here. The known differences:

| entry | outcome | reason |
| --- | --- | --- |
"""
    rows = [(name, outcome, reason) for (name, outcome), reason in sorted(KNOWN.items())]
    return text + "".join(f"| {name} | {outcome} | {reason} |\n" for name, outcome, reason in rows)


def page() -> str:
    """The text of the page."""
    text = HEAD
    rows = [(n, row.differs) for n, row in sorted(names.NAMES.items()) if row.differs]
    text += "".join(f"| `{n}` | the same name | {why} |\n" for n, why in rows)
    methods = {n for n in dir(Tensor) if not n.startswith("_") and callable(getattr(Tensor, n))}
    text += section("Methods of Tensor", methods, public(torch.Tensor))
    text += section("Functions of the package", set(names.functions()) | {n for n in dir(gw) if n in public(torch)},
                    public(torch), ", as `gw.exp(x)`:")  # fmt: skip
    linalg = set(gw.linalg.__all__)
    text += section("linalg", linalg, public(torch.linalg), ", as `gw.linalg.inv(x)`:")
    functional = {n for n in dir(gw.nn.functional) if not n.startswith("_")}
    text += section("func", set(gw.func.__all__), public(torch.func), ", as `gw.func.grad(f)(x)`:")
    derivatives = set(gw.autograd.functional.__all__)
    text += section("autograd.functional", derivatives, public(torch.autograd.functional))
    text += section("nn.functional", functional, public(torch.nn.functional))
    modules, own = layers(), set(gw.nn.__all__)
    text += section("nn", own, modules, kind="module")
    text += f"\nMissing: {', '.join(f'`{n}`' for n in sorted(modules - own))}.\n"
    text += section("nn.init", set(gw.nn.init.__all__), public(torch.nn.init))
    text += section("nn.utils", set(gw.nn.utils.__all__), public(torch.nn.utils))
    text += section("nn.utils.rnn", set(gw.nn.utils.rnn.__all__), public(torch.nn.utils.rnn))
    text += section("optim", set(gw.optim.__all__), classes_of(torch.optim), kind="class")
    kinds = {n for n in dir(torch.distributions) if inspect.isclass(getattr(torch.distributions, n))}
    text += section("distributions", set(gw.distributions.__all__), kinds, kind="class")
    schedules = classes_of(gw.optim.lr_scheduler)
    text += section("optim.lr_scheduler", schedules, classes_of(torch.optim.lr_scheduler), kind="class")
    return text + database()


if __name__ == "__main__":
    sys.exit(write_or_check({PAGE: page()}))
