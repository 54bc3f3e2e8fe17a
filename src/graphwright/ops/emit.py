"""The emit table: an op as torch source text, for exported modeling code. One row per op, or the reason why there is none.

A row takes the operands' source texts and the attributes and gives one expression; ops with several results give a tuple.
`attend` and `rope_frequencies` are functions that the generated file defines.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

Emit = Callable[[Sequence[str], Mapping[str, Any]], str]


def _call(name: str) -> Emit:
    return lambda i, a: f"{name}({', '.join(i)})"


def _infix(sign: str) -> Emit:
    return lambda i, a: f"({i[0]} {sign} {i[1]})"


def _reduce(name: str) -> Emit:
    return lambda i, a: f"{i[0]}.{name}({tuple(a['axes'])}, keepdim={a['keepdims']})"


def _shape(sizes: Sequence[Any]) -> str:
    return ", ".join(map(str, sizes))


def _slice(i: Sequence[str], a: Mapping[str, Any]) -> str:
    stop = a["start"] + a["size"] * a["step"]
    return f"{i[0]}[{':, ' * a['axis']}{a['start']}:{stop}:{a['step']}]"


EMIT: dict[str, Emit] = {
    "neg": lambda i, a: f"-{i[0]}",
    "abs": _call("torch.abs"),
    "sign": _call("torch.sign"),
    "exp": _call("torch.exp"),
    "log": _call("torch.log"),
    "sqrt": _call("torch.sqrt"),
    "rsqrt": _call("torch.rsqrt"),
    "sin": _call("torch.sin"),
    "cos": _call("torch.cos"),
    "tanh": _call("torch.tanh"),
    "erf": _call("torch.erf"),
    "sigmoid": _call("torch.sigmoid"),
    "silu": _call("F.silu"),
    "relu": _call("F.relu"),
    "gelu": lambda i, a: f'F.gelu({i[0]}, approximate={a["approximate"]!r})',
    "add": _infix("+"),
    "sub": _infix("-"),
    "mul": _infix("*"),
    "div": _infix("/"),
    "minimum": _call("torch.minimum"),
    "maximum": _call("torch.maximum"),
    "eq": _infix("=="),
    "lt": _infix("<"),
    "le": _infix("<="),
    "where": _call("torch.where"),
    "cast": lambda i, a: f"{i[0]}.to(torch.{a['dtype'].name})",
    "copy": lambda i, a: f"{i[0]}.clone()",
    "full_like": lambda i, a: f"torch.full_like({i[0]}, {a['value']!r})",
    "junction": lambda i, a: " + ".join(i),
    "sum": _reduce("sum"),
    "mean": _reduce("mean"),
    "amax": _reduce("amax"),
    "argmax": lambda i, a: f"{i[0]}.argmax({a['axis']})",
    "reshape": lambda i, a: f"{i[0]}.reshape({_shape(a['shape'])})",
    "unflatten": lambda i, a: f"{i[0]}.unflatten({a['axis']}, ({_shape(a['sizes'])}))",
    "flatten": lambda i, a: f"{i[0]}.flatten({a['start']}, {a['end']})",
    "permute": lambda i, a: f"{i[0]}.permute({_shape(a['axes'])})",
    "expand": lambda i, a: f"{i[0]}.expand({_shape(a['shape'])})",
    "slice": _slice,
    "last": lambda i, a: f"{i[0]}.narrow({a['axis']}, -1, 1)",
    "concat": lambda i, a: f"torch.cat(({', '.join(i)},), {a['axis']})",
    "matmul": _infix("@"),
    "linear": _call("F.linear"),
    "embedding": lambda i, a: f"F.embedding({i[1]}, {i[0]})",
    "rms_norm": lambda i, a: f"rms_norm({i[0]}, {i[1]}, {a['eps']!r})",
    "softmax": lambda i, a: f"{i[0]}.softmax(-1)",
    "rope_table": lambda i, a: f"rope_table({i[0]}, {i[1]}, {a['scale']!r})",
    "rope_dynamic": lambda i, a: f"rope_dynamic({i[0]}, {i[1]}, {a['theta']!r}, {a['factor']!r}, {a['original']!r})",
    "rope_longer": lambda i, a: f"({i[2]} if int({i[0]}.max()) + 1 > {a['original']!r} else {i[1]})",
    "rope": lambda i, a: f"rope({', '.join(i)})",
    "sdpa": lambda i, a: f"attend({', '.join(i[:3])}, {a['scale']!r}, {a['window']!r}, run)",
}

NO_EMIT: dict[str, str] = {
    "size": "a size is a number of the run",
    "pad_slice": "backward ops are not part of an exported model",
    "embedding_backward": "backward ops are not part of an exported model",
    "sdpa_backward": "backward ops are not part of an exported model",
    "cross_entropy": "losses are not part of an exported model",
    "cross_entropy_backward": "backward ops are not part of an exported model",
    "kv_append": "transformers brings its own cache",
    "adamw": "updates are not part of an exported model",
}
