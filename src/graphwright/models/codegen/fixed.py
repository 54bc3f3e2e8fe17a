"""The fixed part of generated modeling code, around the blocks of a structure."""

CONFIGURATION = '''"""Configuration of a model whose structure was edited with Graphwright."""

from transformers import PretrainedConfig


class EditedConfig(PretrainedConfig):
    """Fields of the edited class. The modeling file defines the structure and all sizes.

    `num_hidden_layers` counts attention nodes, because transformers sizes caches by it.
    """

    model_type = "graphwright-@id@"
'''

HELPERS = {
    "rms_norm": '''def rms_norm(x, weight, eps):
    """Scale to unit root mean square in float32, cast back, times the weight."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)''',
    "rope_table": '''def rope_table(positions, frequencies, scale):
    """cos and sin [B, T, d/2] of position times frequency."""
    angle = positions[..., None].to(torch.float32) * frequencies
    return angle.cos() * scale, angle.sin() * scale''',
    "rope_dynamic": '''def rope_dynamic(positions, frequencies, theta, factor, original):
    """Frequencies for the longest position."""
    length, dim = int(positions.max()) + 1, 2 * len(frequencies)
    if length <= original:
        return frequencies
    scaled = theta * (factor * length / original - (factor - 1)) ** (dim / (dim - 2))
    return 1.0 / scaled ** (torch.arange(0, dim, 2, device=frequencies.device) / dim)''',
    "rope": '''def rope(x, cos, sin):
    """Rotate pairs half an axis apart; entries after the rotated part stay."""
    half = cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), -1)''',
    "rope_pairs": '''def rope_pairs(x, cos, sin):
    """Rotate neighbouring pairs; entries after the rotated part stay."""
    width = 2 * cos.shape[-1]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    a, b, rest = x[..., :width:2], x[..., 1:width:2], x[..., width:]
    return torch.cat((torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2), rest), -1)''',
    "attend": '''def attend(q, k, v, run, scale, window=None):
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
}
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
