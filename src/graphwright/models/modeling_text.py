"""The fixed part of generated modeling code: what every exported structure needs around its own blocks."""

CONFIGURATION = '''"""Configuration of a model whose structure was edited with Graphwright."""

from transformers import PretrainedConfig


class EditedConfig(PretrainedConfig):
    """The fields of the original class; sizes are read from the weights."""

    model_type = "graphwright-@id@"
    keys_to_ignore_at_inference = ["past_key_values"]
'''

MODELING = '''"""A language model whose structure was edited with Graphwright; this file is its structure, written out.

Edits:
@edits@
"""

import math

import torch
import torch.nn.functional as F
from torch import nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutputWithPast

from .configuration_@id@ import EditedConfig

SHAPES = {
@shapes@}

CONSTS = {
@consts@}


def rms_norm(x, weight, eps):
    """Scale to unit root mean square in float32, cast back, times the weight."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rope_table(positions, frequencies, scale):
    """cos and sin [B, T, d/2] of position times frequency."""
    angle = positions[..., None].to(torch.float32) * frequencies
    return angle.cos() * scale, angle.sin() * scale


def rope_dynamic(positions, frequencies, theta, factor, original):
    """Frequencies for the longest position."""
    length, dim = int(positions.max()) + 1, 2 * len(frequencies)
    if length <= original:
        return frequencies
    stretched = theta * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / stretched ** (torch.arange(0, dim, 2, device=frequencies.device) / dim)


def rope(x, cos, sin):
    """Turn pairs half an axis apart; entries past the rotated part pass."""
    half = cos.shape[-1]
    cos, sin = cos[:, None], sin[:, None]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)


def attend(q, k, v, scale, window, run):
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
    return scores.softmax(-1, dtype=torch.float32).to(q.dtype) @ v.repeat_interleave(groups, 1)


class Run:
    """One forward pass: the padding mask, the cache, and how many attention nodes have used it."""

    def __init__(self, model, mask, cache):
        self.model, self.mask, self.cache, self.count = model, mask, cache, 0

    def cached(self, k, v):
        if self.cache is None:
            return k, v
        self.count += 1
        return self.cache.update(k, v, self.count - 1)

    def const(self, name):
        values, dtype = CONSTS[name]
        return torch.tensor(values, dtype=dtype, device=self.model.device)


@functions@


class EditedForCausalLM(PreTrainedModel, GenerationMixin):
    """Weights under their checkpoint keys, and the forward pass below."""

    config_class = EditedConfig
    _no_split_modules = []

    def __init__(self, config):
        super().__init__(config)
        for key, shape in SHAPES.items():
            *path, name = key.split(".")
            place = self
            for part in path:
                if not hasattr(place, part):
                    place.add_module(part, nn.Module())
                place = getattr(place, part)
            place.register_parameter(name, nn.Parameter(torch.empty(shape)))
        self.post_init()

    def _init_weights(self, module):
        for weight in module.parameters(recurse=False):
            nn.init.normal_(weight, std=1.0 / math.sqrt(weight.shape[-1]))

    def logits(self, ids, positions, run):
        """[B, T, V] of token ids and their positions."""
        w = dict(self.named_parameters())
@forward@

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None,
                labels=None, logits_to_keep=0, **ignored):
        """As every causal language model of transformers; attention_mask marks left padding with 0."""
        if use_cache is None:
            use_cache = not self.training and labels is None
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        past = past_key_values.get_seq_length() if past_key_values is not None else 0
        if position_ids is None:
            if attention_mask is not None:
                position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, past : past + input_ids.shape[1]]
            else:
                position_ids = torch.arange(past, past + input_ids.shape[1], device=input_ids.device)[None]
        position_ids = position_ids.expand(input_ids.shape)
        logits = self.logits(input_ids, position_ids, Run(self, attention_mask, past_key_values if use_cache else None))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten())
        if logits_to_keep:
            logits = logits[:, -logits_to_keep:]
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=past_key_values if use_cache else None)
'''
