"""The small model inside the package, and the options that it was trained with."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

from graphwright.models.errors import ModelNotFound
from graphwright.models.train import TrainOptions

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16", "hidden_act": "silu",
    "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 6,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 256, "max_position_embeddings": 512,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "use_cache": True,
    "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
    "initializer_range": 0.02, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip

RECIPE = TrainOptions(steps=700, batch=16, window=256, lr=3e-3, warmup=100, floor=0.05, weight_decay=0.1, clip=1.0)


def bundled() -> Path:
    """Return the directory of the bundled model. Raises: ModelNotFound if the package was built without it."""
    directory = Path(__file__).parent / "data" / "pydoc-llama"
    if not (directory / "config.json").is_file():
        raise ModelNotFound("this build of the package has no bundled model", where=str(directory),
                            fix="python examples/train_bundled.py --out DIR trains it")  # fmt: skip
    return directory


def pydoc_split() -> tuple[str, str]:
    """Return (training text, held-out text) from `pydoc_data.topics` of the running Python.

    Sorted topics are split at blank lines; empty and repeated paragraphs (ignoring white space) are dropped. A
    paragraph is held out iff the first byte of the sha256 of its text, with white space collapsed, is below 26. So the
    split depends only on content: a paragraph is held out in every Python version or in none.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    sides: tuple[list[str], list[str]] = ([], [])
    for name in sorted(topics):
        for paragraph in topics[name].split("\n\n"):
            key = " ".join(paragraph.split())
            if not key or key in seen:
                continue
            seen.add(key)
            sides[sha256(key.encode()).digest()[0] < 26].append(paragraph.strip("\n"))
    return "\n\n".join(sides[0]), "\n\n".join(sides[1])


def text_sha256(text: str) -> str:
    """Return the sha256 of a text in UTF-8, as hex digits."""
    return sha256(text.encode()).hexdigest()
