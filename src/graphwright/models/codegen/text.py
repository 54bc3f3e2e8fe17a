"""Parts of generated source: fixed text, unique names, attribute access, shape and constant tables, line breaking.

No text of a file or journal enters the source unchanged: names are reduced to ASCII identifiers, keys are checked, and
texts are quoted.
"""

from __future__ import annotations

import builtins
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby
from keyword import iskeyword, kwlist
from textwrap import wrap

import numpy as np

from graphwright.array import NDArray
from graphwright.models.errors import ExportLevelImpossible
from graphwright.ops.emit import literal

CONFIGURATION = '''"""Configuration of a model whose structure was edited with Graphwright."""

from transformers import PretrainedConfig


class EditedConfig(PretrainedConfig):
    """Fields of the edited class. The modeling file defines the structure and all sizes.

    `num_hidden_layers` counts attention nodes, because transformers sizes caches by it.
    """

    model_type = "graphwright-@id@"
'''

_HELPERS = (
    '''def rms_norm(x, weight, eps):
    """Scale to unit root mean square in float32, cast back, times the weight."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)''',
    '''def rope_table(positions, frequencies, scale):
    """cos and sin [B, T, d/2] of position times frequency."""
    angle = positions[..., None].to(torch.float32) * frequencies
    return angle.cos() * scale, angle.sin() * scale''',
    '''def rope_dynamic(positions, frequencies, theta, factor, original):
    """Frequencies for the longest position."""
    length, dim = int(positions.max()) + 1, 2 * len(frequencies)
    if length <= original:
        return frequencies
    scaled = theta * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / scaled ** (torch.arange(0, dim, 2, device=frequencies.device) / dim)''',
    '''def rope(x, cos, sin):
    """Rotate pairs half an axis apart; entries after the rotated part stay."""
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)''',
    '''def rope_pairs(x, cos, sin):
    """Rotate neighbouring pairs; entries after the rotated part stay."""
    width = 2 * cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b, rest = x[..., :width:2], x[..., 1:width:2], x[..., width:]
    return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), rest), -1)''',
    '''def attend(q, k, v, run, scale, window=None):
    """Causal attention with grouped heads; keys and values pass through the cache first."""
    k, v = run.cached(k, v)
    queries, keys = q.shape[2], k.shape[2]
    row = torch.arange(keys - queries, keys, device=q.device)[:, None]
    column = torch.arange(keys, device=q.device)
    visible = column <= row
    if window is not None:
        visible = visible & (column > row - window)
    if run.mask is not None:
        visible = visible & run.mask[:, None, None, -keys:].bool()
    groups = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(groups, 1).transpose(2, 3) * scale
    scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v.repeat_interleave(groups, 1)''',
)
HELPERS = {text[len("def ") : text.index("(")]: text for text in _HELPERS}
"""Functions that emitted texts call, by name; a file contains the ones it needs."""

MODELING = '''"""A language model whose structure was edited with Graphwright; this file defines its structure.

Edits:
@edits@
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_@id@ import EditedConfig

# weight -> shape; {} stands for the layer
SHAPES = {
@shapes@}

CONSTS = {
@consts@}


@helpers@


class Run:
    """One forward pass: its sizes, the padding mask, the cache, and how many attention nodes have used that."""

    def __init__(self, model, ids, mask, cache):
        self.B, self.T = ids.shape
        self.device, self.dtype = model.device, model.dtype
        self.mask, self.cache, self.count = mask, cache, 0

    def cached(self, k, v):
        """Keys and values of all positions so far."""
        if self.cache is None:
            return k, v
        self.count += 1
        return self.cache.update(k, v, self.count - 1)

    def const(self, name, dtype=None):
        """A constant as a tensor, in the dtype it was written with or in another."""
        values, written = CONSTS[name]
        return torch.tensor(values, dtype=dtype or written, device=self.device)

    def zeros(self, shape, dtype):
        """The sum of no terms."""
        return torch.zeros(shape, dtype=dtype, device=self.device)


@functions@


class EditedForCausalLM(PreTrainedModel, GenerationMixin):
    """Weights under their checkpoint keys, and the forward pass below."""

    config_class = EditedConfig

    def __init__(self, config):
        super().__init__(config)
        for key, shapes in SHAPES.items():
            for layer, shape in shapes.items() if isinstance(shapes, dict) else [(None, shapes)]:
                *path, name = key.format(layer).split(".")
                module = self
                for part in path:
                    if part not in module._modules:
                        module.add_module(part, nn.Module())
                    module = module._modules[part]
                module.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.post_init()

    def _init_weights(self, module):
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim > 1:
                nn.init.normal_(weight, std=getattr(self.config, "initializer_range", 0.02))
            else:
                nn.init.constant_(weight, 0.0 if name == "bias" else 1.0)

    def logits(self, ids, positions, run):
        """[B, T, V] of token ids and their positions."""
@forward@

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                labels=None, logits_to_keep=0, **kwargs):
        """As every causal language model of transformers; attention_mask marks left padding with 0."""
        if input_ids is None:
            raise ValueError("this model needs input_ids; inputs_embeds are not supported")
        if use_cache is None:
            use_cache = not self.training and labels is None
@cached@        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = past_key_values.get_seq_length() if use_cache else 0
        if position_ids is None:
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + input_ids.shape[1]]
            else:
                position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[None]
        position_ids = position_ids.expand(input_ids.shape)
        cache = past_key_values if use_cache else None
        logits = self.logits(input_ids, position_ids, Run(self, input_ids, attention_mask, cache))
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        if logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=cache)
'''

WIDTH = 120
MAX_CONST = 4096
"""Largest number of entries of a const in source; larger ones should be params."""

_RESERVED = frozenset(
    {*dir(builtins), *kwlist, *HELPERS}
    | {"torch", "F", "nn", "model", "self", "run", "i", "l", "O", "I", "SHAPES", "CONSTS", "Run"}
    | {"DynamicCache", "EditedConfig", "EditedForCausalLM"}
)
_KEY = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")
_NUMBER = re.compile(r"(?<=\.)(0|[1-9][0-9]{0,8})(?=\.)")


class Names:
    """Assigns unique identifiers within a scope, e.g. a function."""

    def __init__(self, taken: Iterable[str] = ()) -> None:
        self._taken = {*_RESERVED, *taken}

    def take(self, wanted: str) -> str:
        """Return `wanted` as an identifier, with a number appended if it is taken."""
        base = re.sub(r"[^A-Za-z0-9_]", "_", wanted)[:40].strip("_") or "value"
        base = f"n{base}" if base[0].isdigit() else base
        name, count = base, 1
        while name in self._taken:
            count += 1
            name = f"{base}_{count}"
        self._taken.add(name)
        return name


def check_keys(keys: Mapping[str, str]) -> None:
    """Check that torch modules can hold weights under these keys (key -> param path). Raises: ExportLevelImpossible."""
    for key, path in keys.items():
        parts, what = key.split("."), ""
        if not _KEY.fullmatch(key):
            what = "a torch module cannot hold a weight under this key"
        elif any(".".join(parts[:end]) in keys for end in range(1, len(parts))):
            what = "this key and a prefix of it both name weights"
        if what:
            fix = "e.rename(node, name, key='a.dotted.key') gives the weight a different key"
            raise ExportLevelImpossible(what, where=path, got=key, fix=fix)


def attributes(start: str, parts: Sequence[str]) -> str | None:
    """Return the attribute access `start.a.b`; None if a part is not an identifier."""
    return ".".join((start, *parts)) if all(p.isidentifier() and not iskeyword(p) for p in parts) else None


def shape_table(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Return the source of the table of weight shapes; keys that differ only in the layer number share an entry."""
    grouped: dict[str, dict[int, tuple[int, ...]]] = {}
    for key, shape in shapes.items():
        if found := _NUMBER.search(key):
            grouped.setdefault(_NUMBER.sub("{}", key, count=1), {})[int(found[0])] = shape
    rows: dict[str, str] = {}
    for key, shape in shapes.items():
        template = _NUMBER.sub("{}", key, count=1)
        several = len(grouped.get(template, ())) > 1
        rows[template if several else key] = _by_layer(grouped[template]) if several else repr(shape)
    return "".join(_entry(json.dumps(key), text) for key, text in rows.items())


def _by_layer(layers: Mapping[int, tuple[int, ...]]) -> str:
    numbers = sorted(layers)
    if len(set(layers.values())) == 1:
        return f"dict.fromkeys({sequence(numbers)}, {layers[numbers[0]]})"
    return "{" + ", ".join(f"{n}: {layers[n]}" for n in numbers) + "}"


def sequence(numbers: Sequence[int]) -> str:
    """Return a Python expression for increasing numbers: a `range` if there are no gaps, else a tuple."""
    if list(numbers) != list(range(numbers[0], numbers[-1] + 1)):
        return str(tuple(numbers))
    return f"range({f'{numbers[0]}, ' if numbers[0] else ''}{numbers[-1] + 1})"


def const_table(consts: Mapping[str, NDArray]) -> str:
    """Return the source of the table of constants. Raises: ExportLevelImpossible for one above 4096 entries."""
    rows = []
    for path, array in consts.items():
        if array.size > MAX_CONST:
            expected, fix = f"<= {MAX_CONST} entries", "make it a param with trainable=False"
            what = "a const is too large for source code"
            raise ExportLevelImpossible(what, where=path, got=f"{array.size} entries", expected=expected, fix=fix)
        host = array.to_numpy("float32" if array.dtype.name == "bfloat16" else None)
        rows.append(_entry(json.dumps(path), f"({_nested(host)}, torch.{array.dtype.name})"))
    return "".join(rows)


def _nested(host: np.ndarray) -> str:
    if host.ndim:
        return f"[{', '.join(_nested(row) for row in host)}]"
    value = host.item()
    if host.dtype.kind == "f" and np.isfinite(value):
        return str(host[()])  # the shortest text that reads back as this value
    return literal(value)


def _entry(key: str, text: str) -> str:
    line = f"    {key}: {text},"
    if len(line) <= WIDTH:
        return f"{line}\n"
    opening = re.split(r"(?<=[^a-z.])", text, maxsplit=1)[0]  # texts are brackets or calls
    inner = wrap(text[len(opening) : -1] + ("," if opening == "{" else ""), WIDTH - 8, break_long_words=False)
    return "\n".join([f"    {key}: {opening}", *(f"        {part}" for part in inner), f"    {text[-1]},\n"])


def line(indent: str, target: str, text: str) -> str:
    """Return the statement `target = text`; break a long line at plus signs, or else inside the outermost call."""
    whole = f"{indent}{target} = {text}"
    if len(whole) <= WIDTH:
        return whole
    first, *rest = _split(text, " + ")
    if rest:
        terms = [f"{indent}    {first}", *(f"{indent}    + {t}" for t in rest)]
        return "\n".join([f"{indent}{target} = (", *terms, f"{indent})"])
    start = text.find("(")
    if start < 0:
        return whole
    close = start + _depths(text[start:]).index(0)
    inner = f"{indent}    {text[start + 1 : close]}"
    lines = [inner] if len(inner) <= WIDTH else [f"{indent}    {a}," for a in _split(text[start + 1 : close], ", ")]
    return "\n".join([f"{indent}{target} = {text[: start + 1]}", *lines, f"{indent}{text[close:]}"])


def _depths(text: str) -> list[int]:
    """Return the number of open brackets after each character."""
    return list(accumulate((char in "([{") - (char in ")]}") for char in text))


def _split(text: str, sign: str) -> list[str]:
    """Split a text at each `sign` that is outside of brackets."""
    at = [i for i, depth in enumerate(_depths(text)) if depth == 0 and text.startswith(sign, i)]
    return [text[a:b] for a, b in zip([0, *(i + len(sign) for i in at)], [*at, len(text)], strict=True)]


def docstring_lines(texts: Iterable[str]) -> str:
    """Format texts as lines of a docstring; replace quotes and backslashes, so that no text can end it."""
    rows = []
    for text in texts:
        printable = "".join(c if c.isprintable() else " " for c in text)
        plain = " ".join(printable.split()).replace("\\", "/").replace('"', "'")
        rows += wrap(f"- {plain}", WIDTH, subsequent_indent="  ") or ["-"]
    return "\n".join(rows)


def ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers as text, e.g. `0 to 3, 5`."""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs)
