"""The built-in model families, with a function for each that reads the sizes of a `Decoder` from its config."""

from __future__ import annotations

from graphwright.models.architectures.architecture import Architecture, Config
from graphwright.models.architectures.decoder import KEYS, Decoder, build_decoder, layer_types, read_decoder

_WINDOW, _FIRST_WINDOWED = 4096, 28  # if the fields are absent; null means no window


def _llama(config: Config) -> Decoder:
    """Read Llama dimensions: `attention_bias` adds biases to q, k, v and o, `mlp_bias` to the MLP."""
    bias, mlp_bias = config.flag("attention_bias", False), config.flag("mlp_bias", False)
    return read_decoder(config, q_bias=bias, o_bias=bias, mlp_bias=mlp_bias)


def _mistral(config: Config) -> Decoder:
    """Read Mistral dimensions: no biases, and one sliding window for all layers unless the config sets it to null."""
    return read_decoder(config, lambda c, layers: (sliding_window(c),) * layers, kv_heads=8, longest=131072)


def _qwen2(config: Config) -> Decoder:
    """Read Qwen2 and Qwen2.5 dimensions: biases on q, k, v; sliding windows in upper layers if the config has them."""
    return read_decoder(config, _qwen_windows, kv_heads=32, vocab=151936, longest=32768, q_bias=True)


def _qwen3(config: Config) -> Decoder:
    """Read Qwen3 dimensions: an RMSNorm of each head of q and k; `attention_bias` adds biases to q, k, v and o."""
    bias = config.flag("attention_bias", False)
    return read_decoder(config, _qwen_windows, head_dim=128, kv_heads=32, vocab=151936, longest=32768, q_bias=bias,
                        o_bias=bias, qk_norm=True)  # fmt: skip


def sliding_window(config: Config) -> int | None:
    """Return the window of layers that have one; None if the config sets it to null."""
    silent = "sliding_window" not in config
    return config.size("sliding_window", _WINDOW) if silent or config["sliding_window"] is not None else None


def needed_window(config: Config) -> int:
    """Return the window of layers that have one; the config cannot set it to null."""
    window = sliding_window(config)
    if window is None:
        raise config.invalid("sliding_window", "a number of tokens: some layers have a window", None)
    return window


def _qwen_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Return each layer's window or None: `layer_types` decides, else layers from `max_window_layers` on have one."""
    window = sliding_window(config) if config.flag("use_sliding_window", False) else None
    first = config.size("max_window_layers", _FIRST_WINDOWED, least=0)
    return layer_types(config, layers, window, lambda i: i >= first)


# LlamaConfig.validate_architecture requires the multiple even if head_dim is set. TinyLlama, SmolLM, Llama 2 and
# Llama 3.x have this class too.
LLAMA = Architecture("llama", ("LlamaForCausalLM",), ("llama",), _llama, KEYS, build_decoder,
                     multiples=(("hidden", "heads"),))  # fmt: skip
MISTRAL = Architecture("mistral", ("MistralForCausalLM",), ("mistral",), _mistral, KEYS, build_decoder)
QWEN2 = Architecture("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), _qwen2, KEYS, build_decoder)
QWEN3 = Architecture("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), _qwen3, KEYS, build_decoder)
FAMILIES = LLAMA, MISTRAL, QWEN2, QWEN3
