"""What looking at a model costs: import, open and inspect as whole processes, above a bare interpreter."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

from benchmarks.harness import Figure, interval
from graphwright.safetensors import TensorInfo, build_header

_FIELDS = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "intermediate_size": 5632,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}


def sparse_checkpoint(directory: Path) -> None:
    """A TinyLlama-shaped directory whose payload is a hole in the file."""
    from graphwright.models.architectures.architecture import Config
    from graphwright.models.architectures.families import LLAMA

    (directory / "config.json").write_text(json.dumps(_FIELDS))
    infos, at = [], 0
    for _, key, shape, _ in LLAMA.weights(LLAMA.read(Config.read(directory))):
        size = 2
        for n in shape:
            size *= n
        infos.append(TensorInfo(key, "BF16", shape, at, at + size))
        at += size
    header = build_header(infos, {"format": "pt"})
    with open(directory / "model.safetensors", "wb") as file:
        file.write(header)
        file.truncate(len(header) + at)


def run() -> list[Figure]:
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        sparse_checkpoint(directory)
        scripts = {
            "bare interpreter": "pass",
            "import graphwright": "import graphwright",
            "open and inspect a 1.1 B header": f"import graphwright as gw; str(gw.open({name!r}).inspect())",
            "graphwright inspect (the command)": f"import sys; sys.argv = ['graphwright', 'inspect', {name!r}]; "
            "from graphwright.cli import main; main()",
            "import transformers": "import transformers",
        }
        taken: dict[str, list[float]] = {who: [] for who in scripts}
        for _ in range(9):
            for who, script in scripts.items():
                started = perf_counter()
                subprocess.run([sys.executable, "-c", script], check=True, capture_output=True)
                taken[who].append(perf_counter() - started)
        import graphwright as gw

        opens = []
        for _ in range(9):
            started = perf_counter()
            gw.open(directory)
            opens.append((perf_counter() - started) * 1e3)
    figure = Figure(
        "Looking at a model", "whole processes, 9 interleaved rounds; a sparse payload of 2.2 GB that is never read"
    )
    bare = median(taken["bare interpreter"])
    for who, samples in taken.items():
        low, high = interval(samples)
        figure.add(who, median(samples), "s", f"{median(samples) - bare:+.3f} s above a bare interpreter", low, high)
    low, high = interval(opens)
    figure.add(
        "gw.open in a warm process", median(opens), "ms", "config, headers and graph; nothing is loaded", low, high
    )
    return [figure]
