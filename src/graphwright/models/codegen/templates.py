"""Fixed text of generated files, and the parts of it that depend on windows and embeddings.

`@name@` is replaced by the part of this name.
"""

from __future__ import annotations

import re
from collections.abc import Set

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
    '''def rope_table(positions, frequencies, scale, run):
    """cos and sin [B, T, d/2] of position times frequency."""
    angle = positions[..., None].to(frequencies.dtype) * frequencies
    return (angle.cos() * scale).to(run.dtype), (angle.sin() * scale).to(run.dtype)''',
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
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)''',
    '''def rope_pairs(x, cos, sin):
    """Rotate neighbouring pairs; entries after the rotated part stay."""
    width = 2 * cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :width:2], x[..., 1:width:2], x[..., width:]
    return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), rest), -1)''',
    '''def sdpa(
    q, k, v, scale, causal=False, window=None, softcap=None, key_mask=None, q_start=None, bias=None, sinks=None
):
    """Attention with grouped heads over the keys that a query sees; a query that sees none gives 0."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.transpose(2, 3) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    hidden = torch.zeros((), dtype=torch.bool, device=q.device)
    if causal:
        start = k.shape[2] - q.shape[2] if q_start is None else q_start
        i = torch.arange(q.shape[2], device=q.device)[:, None] + start
        j = torch.arange(k.shape[2], device=q.device)
        hidden = (j > i) if window is None else (j > i) | (j <= i - window)
    if key_mask is not None:
        hidden = hidden | ~key_mask[:, None, None]
    if bias is not None and bias.dtype == torch.bool:
        hidden = hidden | ~bias
    elif bias is not None:
        scores = scores + bias
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)), -1)
    weights = scores.softmax(-1, dtype=torch.promote_types(q.dtype, torch.float32)).nan_to_num().to(q.dtype)
    return weights[..., : k.shape[2]] @ v''',
    '''def widen(x):
    """In float32 or wider."""
    return x.float() if x.element_size() < 4 else x''',
    '''def dispatch(choice, experts):
    """Group tokens by expert: run e, its tokens ascending, is rows[offsets[e]:offsets[e + 1]]; `pairs`: their weights.

    `choice` has the ids of each token's experts, -1 for none, or is a mask of tokens and experts.
    """
    if choice.dtype == torch.bool:
        choice = torch.where(choice, torch.arange(experts, device=choice.device), experts)
    flat = torch.where(choice < 0, experts, choice).flatten()
    order = flat.argsort(stable=True)
    ends = F.one_hot(flat, experts + 1).sum(0)[:experts].cumsum(0)
    pairs = order * (flat[order] < experts)
    return F.pad(ends, (1, 0)), pairs // choice.shape[1], pairs''',
    '''def index_put(x, values, axis, *ids):
    """A copy of x with values at indices of the axes from `axis` on."""
    made = x.clone()
    made[(slice(None),) * (axis % x.dim()) + ids] = values
    return made''',
    '''def grouped_matmul(x, w, offsets):
    """Multiply the rows offsets[e]:offsets[e + 1] of x by matrix e of w; rows after the last group give 0."""
    ends = offsets.tolist()
    made = [x[first:last] @ one for first, last, one in zip(ends[:-1], ends[1:], w, strict=True)]
    return torch.cat((*made, x.new_zeros(len(x) - ends[-1], w.shape[2])))''',
    '''def linear_scan(a, b, axis, reverse):
    """h = a * h + b along an axis, from 0 on; with `reverse`, from its end."""
    steps = list(zip(widen(a).unbind(axis), widen(b).unbind(axis)))
    states, h = [], 0.0
    for factor, summand in reversed(steps) if reverse else steps:
        h = factor * h + summand
        states.append(h)
    return torch.stack(states[::-1] if reverse else states, axis).to(b.dtype) if states else b''',
    '''def gelu_tanh(x):
    """GELU by the formula with tanh."""
    return F.gelu(x, approximate="tanh")''',
    '''def expert_hidden(act, up, gate=None):
    """act(gate) * up, or act(up) without a gate; without `act` the clamped form of gpt-oss."""
    if act is None:
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    return act(up) if gate is None else act(gate) * up''',
    '''def mix_experts(x, offsets, rows, pairs, weights, experts, act):
    """Sum the weighted results of each token's experts; the linear layers of an expert are modules or operands."""
    out = torch.zeros(x.shape, dtype=torch.promote_types(weights.dtype, torch.float32), device=x.device)
    ends, weights = offsets.tolist(), weights.flatten()
    for linears, first, last in zip(experts, ends[:-1], ends[1:], strict=True):
        if first < last:
            here = rows[first:last]
            *inner, down = [f if callable(f) else lambda t, f=f: F.linear(t, *f) for f in linears]
            made = down(expert_hidden(act, *[f(x[here]) for f in reversed(inner)]))
            out = out.index_add(0, here, made.to(out.dtype) * weights[pairs[first:last], None])
    return out.to(x.dtype)''',
    '''def attend_routed(x, offsets, rows, pairs, weights, positions, heads, theta, run):
    """Sum the weighted results of causal heads (q, k, v, o), of which each sees its own tokens: those of its run.

    The cache has one row for all heads: their keys, and a 1 for each head that has the token.
    """
    kind = torch.promote_types(x.dtype, torch.float32)
    wide, heads = x.to(kind), [[m.to(kind) for m in head] for head in heads]
    index = torch.searchsorted(offsets[1:], torch.arange(len(rows), device=x.device), right=True)
    share = torch.zeros(x.shape[0] * x.shape[1], len(heads) + 1, dtype=kind, device=x.device)
    used = torch.zeros_like(share).index_put((rows, index), share.new_ones(()))
    share = share.index_put((rows, index), weights.flatten()[pairs].to(kind))
    used, share = (t[:, :-1].unflatten(0, x.shape[:2]) for t in (used, share))
    if run.tokens is not None:
        used = used * run.tokens[:, -x.shape[1] :, None].to(x.device)

    def rotated(t):
        if theta is None:
            return t
        powers = torch.arange(0, t.shape[-1], 2, dtype=kind, device=x.device) / -t.shape[-1]
        angle = positions[..., None] * theta**powers
        return rope(t[:, None], angle.cos().to(kind), angle.sin().to(kind))[:, 0]

    keys = [rotated(F.linear(wide, k)) * used[..., e, None] for e, (_, k, _, _) in enumerate(heads)]
    values = [F.linear(wide, v) * used[..., e, None] for e, (_, _, v, _) in enumerate(heads)]
    keys, values = (torch.cat(t, -1)[:, None].to(x.dtype) for t in ([*keys, used], values))
    if run.cache is not None:
        keys, values = run.cache.update(keys, values, run.next_layer())
    widths = [[len(k) for _, k, _, _ in heads], [len(v) for _, _, v, _ in heads]]
    keys, flags = keys[:, 0].to(kind).tensor_split((sum(widths[0]),), -1)
    keys, values = keys.split(widths[0], -1), values[:, 0].to(kind).split(widths[1], -1)
    past = torch.arange(flags.shape[1], device=x.device) <= torch.arange(run.T, device=x.device)[:, None] + run.past
    out = torch.zeros_like(wide)
    for e, (q, _, _, o) in enumerate(heads):
        seen = (past & (flags[:, None, :, e] > 0.5)) | (used[..., e, None] == 0)
        scores = rotated(F.linear(wide, q)) @ keys[e].transpose(1, 2) * len(q) ** -0.5
        mixed = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ values[e]
        out = out + F.linear(mixed, o) * (share * used)[..., e, None]
    return out.to(x.dtype)''',
)
RUNS = ("mix_experts", "grouped_matmul")
"""Functions that read the lengths of runs of tokens, so that a compiler cannot take them in one graph."""

HELPERS = {text[len("def ") : text.index("(")]: text for text in _HELPERS}
"""Functions that emitted texts call, by name; a file contains the ones it needs."""

_CLASSES = (
    '''class RMSNorm(nn.Module):
    """`rms_norm` with its weight; with an `offset`, times offset + weight in float32."""

    def __init__(self, size, eps, offset=None):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps, self.offset = eps, offset

    def forward(self, x):
        if self.offset is None:
            return rms_norm(x, self.weight, self.eps)
        return rms_norm(x.float(), self.weight.float() + self.offset, self.eps).to(x.dtype)

    def extra_repr(self):
        return f"{tuple(self.weight.shape)}, eps={self.eps}"''',
    '''def eager_attention(
    module, query, key, value, attention_mask, scaling, dropout=0.0, softcap=None, s_aux=None, **kwargs
):
    """Attention in separate steps, which also returns its weights [B, H, T, keys]; `s_aux` are sinks [H]."""
    key = key.repeat_interleave(module.num_key_value_groups, 1)
    value = value.repeat_interleave(module.num_key_value_groups, 1)
    weights = query @ key.transpose(2, 3) * scaling
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if attention_mask is not None:
        weights = weights + attention_mask
    if s_aux is not None:
        weights = torch.cat((weights, s_aux.to(weights)[:, None, None].expand(*weights.shape[:3], 1)), -1)
    weights = weights.softmax(-1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


class Attention(nn.Module):
    """Causal attention of the implementation in the config, with grouped heads; `window`: keys that a query sees.

    With a softcap c, scores s become c·tanh(s / c). An operand after v has the sinks [H]: scores of one more key.
    """

    def __init__(self, groups, scaling, window=None, softcap=None):
        super().__init__()
        self.num_key_value_groups, self.scaling, self.sliding_window = groups, scaling, window
        self.softcap, self.is_causal = softcap, True

    def forward(self, q, k, v, *rest):
        *sinks, run = rest
        if run.cache is not None:
            k, v = run.cache.update(k, v, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention)
        mask = run.masks[self.sliding_window]
        mask = mask if mask is None else mask.to(q.device)
        given = {"scaling": self.scaling, "sliding_window": self.sliding_window, "softcap": self.softcap}
        out, weights = attend(self, q, k, v, mask, **given, **({"s_aux": sinks[0]} if sinks else {}))
        if run.attentions is not None:
            run.attentions.append(weights)
        return out.transpose(1, 2)''',
    '''class BlockPattern(nn.Module):
    """Which query sees which key: `edges` have plane, query block, key block and number of a mask; masks have bits.

    There is one plane for all heads, one for each key head, or one for each query head. Mask 0 has all pairs.
    """

    def __init__(self, tokens, block, planes, edges, masks):
        super().__init__()
        self.tokens, self.block, self.planes = tokens, block, planes
        self.register_buffer("edges", torch.zeros(edges, 4, dtype=torch.int32))
        self.register_buffer("masks", torch.zeros(masks, block, -(-block // 8), dtype=torch.uint8))

    def table(self):
        """The number of the mask of each pair of blocks [planes, blocks, blocks], -1 for pairs without an edge."""
        count = -(-self.tokens // self.block)
        plane, query, key, mask = self.edges.long().unbind(-1)
        return self.edges.new_full((self.planes, count, count), -1).index_put((plane, query, key), mask.int())

    def sees(self, table, plane, i, j):
        """Whether query i sees key j; the arguments are tensors."""
        i, j = i.clamp(0, self.tokens - 1), j.clamp(0, self.tokens - 1)
        mask, at = table[plane, i // self.block, j // self.block], j % self.block
        byte = self.masks[mask.clamp(min=0), i % self.block, at // 8].int()
        return (mask >= 0) & ((byte >> (at % 8)) % 2 == 1)

    def forward(self, run, heads, length):
        """What each query sees of `length` keys: bool [B, heads, T, length], or a block mask for a prompt on CUDA."""
        if isinstance(run.past, int) and run.past + run.T > self.tokens:
            raise ValueError(f"the pattern of attention has {self.tokens} tokens, the text {run.past + run.T}")
        table, here, padding = self.table(), self.edges.device, 0
        if run.tokens is not None:
            padding = (run.tokens.to(here).cumsum(-1) == 0).sum(-1)[:, None, None, None]
        aligned = 128 % self.block == 0 or self.block % 128 == 0
        prompt = here.type == "cuda" and aligned and length == run.T and run.attentions is None
        if prompt and (run.tokens is None or run.tokens.all()):
            return self.block_mask(table, heads, length)
        plane = torch.arange(self.planes, device=here)[:, None, None]
        i = torch.arange(run.T, device=here)[:, None] + run.past - padding
        j = torch.arange(length, device=here) - padding
        seen = (j >= 0) & (j <= i) & self.sees(table, plane, i, j)
        return seen if self.planes == 1 else seen.repeat_interleave(heads // self.planes, -3)

    def block_mask(self, table, heads, length):
        """The mask of FlexAttention for a prompt; its blocks have at least 128 tokens, as its kernels need."""
        size = max(self.block, 128)
        each, count, group = size // self.block, -(-length // size), heads // self.planes
        wide = F.pad(table, (0, each * count, 0, each * count), value=-1)[:, : each * count, : each * count]
        tiles = wide.unflatten(2, (count, each)).unflatten(1, (count, each))
        full = (tiles == 0).all(4).all(2)
        partial = (tiles >= 0).any(4).any(2) & ~full
        lists = []
        for blocks in (partial, full):
            blocks = blocks if self.planes == 1 else blocks.repeat_interleave(group, 0)
            lists += [blocks.sum(-1).int()[None], (~blocks).int().argsort(dim=-1, stable=True).int()[None]]
        sees = lambda b, h, i, j: self.sees(table, h // group, i, j)  # noqa: E731
        return BlockMask.from_kv_blocks(*lists, BLOCK_SIZE=size, mask_mod=sees, seq_lengths=(length, length))''',
    '''def flex(*operands, **options):
    """FlexAttention, compiled at its first call."""
    flex.made = getattr(flex, "made", None) or torch.compile(flex_attention)
    return flex.made(*operands, **options)


class PatternAttention(nn.Module):
    """Attention over a pattern, with grouped heads: FlexAttention for prompts on CUDA, else a mask.

    A query that sees no key gives 0. With a softcap c, scores s become c·tanh(s / c).
    """

    def __init__(self, groups, scaling, softcap=None):
        super().__init__()
        self.num_key_value_groups, self.scaling, self.softcap = groups, scaling, softcap

    def bounded(self, scores):
        return scores if self.softcap is None else torch.tanh(scores / self.softcap) * self.softcap

    def forward(self, q, k, v, pattern, run):
        if run.cache is not None:
            k, v = run.cache.update(k, v, self.layer_idx)
        if pattern not in run.seen:
            run.seen[pattern] = pattern(run, q.shape[1], k.shape[2])
        seen, grouped = run.seen[pattern], self.num_key_value_groups > 1
        if isinstance(seen, BlockMask):
            change = None if self.softcap is None else lambda s, b, h, i, j: self.bounded(s)
            return flex(q, k, v, change, block_mask=seen, scale=self.scaling, enable_gqa=grouped), None
        seen = seen.to(q.device)
        if run.attentions is None and self.softcap is None:
            out = F.scaled_dot_product_attention(q, k, v, seen, scale=self.scaling, enable_gqa=grouped)
            return out.masked_fill(~seen.any(-1, keepdim=True), 0.0), None
        k, v = (t.repeat_interleave(self.num_key_value_groups, 1) for t in (k, v))
        scores = self.bounded(q @ k.transpose(2, 3) * self.scaling).masked_fill(~seen, -torch.inf)
        weights = scores.softmax(-1, dtype=torch.float32).nan_to_num().to(q.dtype)
        if run.attentions is not None:
            run.attentions.append(weights)
        return weights @ v, None''',
    '''class Experts(nn.ModuleDict):
    """Experts by number; `widths` has the width of each, `names` its linear layers: gate if there is one, up, down."""

    def __init__(self, size, widths, names, act, bias):
        super().__init__()
        self.names, self.act = names, act
        for number, width in widths.items():
            shapes = [(size, width)] * (len(names) - 1) + [(width, size)]
            linears = {name: nn.Linear(*shape, bias) for name, shape in zip(names, shapes, strict=True)}
            self.add_module(str(number), nn.ModuleDict(linears))

    def forward(self, x, offsets, rows, pairs, weights):
        experts = [[expert[name] for name in self.names] for expert in self.values()]
        return mix_experts(x, offsets, rows, pairs, weights, experts, self.act)''',
    '''class RoutedHeads(nn.ModuleDict):
    """Heads by number; `widths` has the sizes of keys and values of each, `names` its linear layers: q, k, v, o."""

    def __init__(self, size, widths, names, theta):
        super().__init__()
        self.names, self.theta = names, theta
        for number, (key, value) in widths.items():
            shapes = (size, key), (size, key), (size, value), (value, size)
            linears = {name: nn.Linear(*shape, False) for name, shape in zip(names, shapes, strict=True)}
            self.add_module(str(number), nn.ModuleDict(linears))

    def forward(self, x, offsets, rows, pairs, weights, positions, run):
        heads = [[head[name].weight for name in self.names] for head in self.values()]
        return attend_routed(x, offsets, rows, pairs, weights, positions, heads, self.theta, run)''',
)
CLASSES = {re.findall(r"^class (\w+)\(", text, re.MULTILINE)[-1]: text for text in _CLASSES}
"""Classes of modules that are not torch's own, by name; a file contains the ones it needs."""

WINDOW = '''class Window:
    """What the functions of masks read of a config, for one window."""

    def __init__(self, config, size):
        self._attn_implementation, self.sliding_window = config._attn_implementation, size


'''

WHOLE_TEXTS = '''    def generate(self, *args, **kwargs):
        """As every model of transformers, by running the whole text for each token."""
        return super().generate(*args, **{**kwargs, "use_cache": False})

'''
"""Method of a class whose tokens depend on earlier ones by other operations than attention."""


def no_cache(why: str) -> str:
    """Return the statement of a forward pass that neither reads nor returns a cache."""
    return f"        use_cache, past_key_values = False, None  # {why}\n"


NO_EMBEDS = """        if input_ids is None:
            raise ValueError("this model needs input_ids; more than one op reads them")
"""

MODELING = '''"""A language model whose structure was edited with Graphwright; this file defines its structure.

Edits:
@edits@
"""

import torch
import torch.nn.functional as F
from torch import nn
@flex@from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.masking_utils import @masks@
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import CausalLMOutputWithPast
@interface@from transformers.utils import can_return_tuple

from .configuration_@id@ import EditedConfig

CONSTS = {
@consts@}


@helpers@


class Run:
    """One forward pass: its sizes, dtype, masks by window and cache, and lists of hidden states and attentions."""

    def __init__(self, model, x, masks, cache, past, hidden, attentions):
        self.model, self.masks, self.cache, self.hidden, self.attentions = model, masks, cache, hidden, attentions
@past@        self.B, self.T = x.shape[:2]
        self.device, self.dtype = x.device, x.dtype if x.is_floating_point() else model.dtype
@next@
    def const(self, name, dtype=None):
        """A constant, in the dtype it was written with or in another."""
        return CONSTS[name].to(self.device, dtype)

    def zeros(self, shape, dtype):
        """The sum of no terms."""
        return torch.zeros(shape, dtype=dtype, device=self.device)


@window@class Layer(GradientCheckpointingLayer):
    """A layer; its first operand is a hidden state of the model."""

    def __call__(self, *operands):
        run = operands[-1]
        if run.hidden is not None:
            run.hidden.append(operands[0])
        return super().__call__(*operands)


@blocks@


# module -> its class and arguments, by layer where they differ; {} stands for the layer
MODULES = {
@modules@}

# weight of no such module -> shape
PARAMETERS = {
@parameters@}


class EditedForCausalLM(PreTrainedModel, GenerationMixin):
    """Modules and weights under their checkpoint keys, and the forward pass below."""

    config_class = EditedConfig
    base_model_prefix = ""
    supports_gradient_checkpointing = True
    gradient_checkpointing = False
    _no_split_modules = @no_split@  # noqa: RUF012
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _supports_sdpa = @uncapped@
    _supports_attention_backend = True
    _can_compile_fullgraph = @static@
@tied@
    def __init__(self, config):
        super().__init__(config)
        for name, entry in rows(MODULES):
            cls, *given = entry if isinstance(entry, tuple) else (entry,)
            parent, _, child = name.rpartition(".")
            made = cls(*(getattr(config, a) if isinstance(a, str) else a for a in given))
            self.get_submodule(parent).add_module(child, made)
            if isinstance(made, Layer):
                made.number = int(child)
        for name, shape in rows(PARAMETERS):
            parent, _, child = name.rpartition(".")
            self.get_submodule(parent).register_parameter(child, nn.Parameter(torch.empty(shape)))
        attentions = [m for m in self.modules() if hasattr(m, "num_key_value_groups")]
        for index, module in enumerate(attentions):
            module.config, module.layer_idx = config, index
@count@        self.post_init()

    def _init_weights(self, module):
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim > 1:
                nn.init.normal_(weight, std=getattr(self.config, "initializer_range", 0.02))
            else:
                nn.init.constant_(weight, 0.0 if name == "bias" else 1.0)
@accessors@
    @staticmethod
    def create_masks_for_generate(config, inputs_embeds, attention_mask, past_key_values, position_ids=None, **kwargs):
        """The mask of each window; generate calls this."""
        given = (inputs_embeds, attention_mask, past_key_values, position_ids)
        return {
            w: @mask@
            for w in @windows@
        }@tokens@

    def features(self, @given@, positions, run):
        """What the head reads [B, T, D], or without a head the logits."""
@features@

@whole@    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
                labels=None, use_cache=None, logits_to_keep=0, output_attentions=None, output_hidden_states=None,
                **kwargs):
        """As every causal language model of transformers; attention_mask marks left padding with 0."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
@refused@        x = @embed@ if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = getattr(self.config, "use_cache", True)
        if self.training and self.gradient_checkpointing:
            use_cache, past_key_values = False, None
@cached@        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            position_ids = torch.arange(x.shape[1], device=x.device)[None] + past
            if isinstance(attention_mask, torch.Tensor) and attention_mask.ndim == 2:
                counted = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)
                position_ids = counted.gather(1, position_ids.expand(x.shape[:2]))
        position_ids = position_ids.expand(x.shape[:2])
        masks = attention_mask
        if not isinstance(masks, dict):
            sizes = x if x.ndim == 3 else x[..., None].to(self.dtype)
            masks = self.create_masks_for_generate(self.config, sizes, masks, past_key_values, position_ids)
        given = ((output_hidden_states, "output_hidden_states"), (output_attentions, "output_attentions"))
        wanted = [getattr(self.config, name, False) if flag is None else flag for flag, name in given]
        hidden, attentions = ([] if flag else None for flag in wanted)
        run = Run(self, x, masks, past_key_values, past, hidden, attentions)
        x = self.features(x, position_ids, run)
@last@        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = @head@
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=logits.shape[-1], **kwargs)
        return CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=past_key_values,
            hidden_states=None if hidden is None else tuple(hidden),
            attentions=None if attentions is None else tuple(attentions),
        )


def rows(table):
    """Yield (name, entry) of a table whose entries may differ by layer."""
    for name, entry in table.items():
        for layer, own in entry.items() if isinstance(entry, dict) else [(None, entry)]:
            yield name.format(layer), own
'''


_TOKENS = """        self.past, tokens = past + 0, masks.get("tokens")  # static caches count in place
        self.tokens = tokens if tokens is not None and tokens.ndim == 2 else None
"""
_NEXT = '''
    def next_layer(self):
        """The index in the cache of the next routed attention; the others come first."""
        self.layers += 1
        return self.layers - 1
'''


def parts_of_run(routed: bool, sparse: bool) -> dict[str, str]:
    """Return the parts of the template that depend on how heads attend.

    Routed attention has its own entries in the cache, and attention over patterns makes its masks.
    """
    both = routed or sparse
    past = _TOKENS if both else ""
    past += "        self.layers = model.attentions\n" if routed else ""
    past += "        self.seen = {}  # pattern -> its mask\n" if sparse else ""
    return {
        "tokens": ' | {"tokens": attention_mask}' if both else "",
        "count": "        self.attentions = len(attentions)\n" if routed else "",
        "past": past,
        "next": _NEXT if routed else "",
        "flex": "from torch.nn.attention.flex_attention import BlockMask, flex_attention\n" if sparse else "",
    }


def masks(windows: Set[int | None]) -> dict[str, str]:
    """Return the parts of the template that make the mask of each window, None for full attention."""
    full, sliding = "create_causal_mask(config, *given)", "create_sliding_window_causal_mask(Window(config, w), *given)"
    several = {full: None in windows or not windows, sliding: bool(windows - {None})}
    used = [text for text, wanted in several.items() if wanted]
    return {
        "windows": repr(tuple(sorted(windows, key=lambda w: w or 0))),
        "mask": "\n            if w is None else ".join(used),
        "masks": ", ".join(text.partition("(")[0] for text in used),
        "window": WINDOW if sliding in used else "",
    }


TASK_MODELING = '''"""A model whose structure was edited with Graphwright; this file defines its structure.

Edits:
@edits@
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from .configuration_@id@ import EditedConfig

CONSTS = {
@consts@}


@helpers@


class Run:
    """One forward pass: its named sizes and dtype."""

    def __init__(self, model, @names@):
        self.model, self.dtype, self.device = model, model.dtype, @first@.device
@sizes@
    def const(self, name, dtype=None):
        """A constant, in the dtype it was written with or in another."""
        return CONSTS[name].to(self.device, dtype)

    def zeros(self, shape, dtype):
        """The sum of no terms."""
        return torch.zeros(shape, dtype=dtype, device=self.device)


class Layer(nn.Module):
    """A layer; its last operand is the forward pass."""


@blocks@


# module -> its class and arguments, by layer where they differ; {} stands for the layer
MODULES = {
@modules@}

# weight of no such module -> shape
PARAMETERS = {
@parameters@}

# statistics and other tensors that are not trained -> shape
BUFFERS = {
@buffers@}


class EditedModel(PreTrainedModel):
    """Modules and weights under their checkpoint keys, and the forward pass below."""

    config_class = EditedConfig
    base_model_prefix = ""
    main_input_name = "@first@"

    def __init__(self, config):
        super().__init__(config)
        for name, (cls, *given) in rows(MODULES):
            parent, _, child = name.rpartition(".")
            made = cls(*given)
            self.get_submodule(parent).add_module(child, made)
            if isinstance(made, Layer):
                made.number = int(child)
        for name, shape in rows(PARAMETERS):
            parent, _, child = name.rpartition(".")
            self.get_submodule(parent).register_parameter(child, nn.Parameter(torch.empty(shape)))
        for name, shape in rows(BUFFERS):
            parent, _, child = name.rpartition(".")
            self.get_submodule(parent).register_buffer(child, torch.zeros(shape))
        self.post_init()

    def _init_weights(self, module):
        for name, weight in module.named_parameters(recurse=False):
            if weight.ndim > 1:
                nn.init.normal_(weight, std=getattr(self.config, "initializer_range", 0.02))
            else:
                nn.init.constant_(weight, 0.0 if name == "bias" else 1.0)

    def outputs(self, @names@, run):
        """The outputs by name."""
@features@

    def forward(self, @arguments@, **kwargs):
        """Return the outputs by name; masks are ones by default."""
@defaults@        return ModelOutput(self.outputs(@names@, Run(self, @names@)))


def rows(table):
    """Yield (name, entry) of a table whose entries may differ by layer."""
    for name, entry in table.items():
        for layer, own in entry.items() if isinstance(entry, dict) else [(None, entry)]:
            yield name.format(layer), own if isinstance(own, tuple) else (own,)
'''


def accessors(kind: str, attribute: str, path: str) -> str:
    """Return the methods by which transformers reads and replaces the `input` or `output` embeddings."""
    return f'''
    def get_{kind}_embeddings(self):
        return {attribute}

    def set_{kind}_embeddings(self, value):
        self.set_submodule("{path}", value)
'''
