"""llama.cpp as a peer: the checkpoint's weights as GGUF, in bfloat16 and q8_0, decoded in a process of its own.

Two pools of threads in one process would slow both, so the process is asked over a pipe, a line of JSON each way.
This file is also what it runs, with the interpreter that `scripts/llama_cpp.sh` made; `LLAMA_CPP` names its folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import numpy as np

HERE = Path(os.environ.get("LLAMA_CPP", Path(__file__).parents[1] / "build" / "llama.cpp")) / "bin" / "python"
ABSENT = "llama.cpp is not here: scripts/llama_cpp.sh builds it in some minutes"
KINDS = "bf16", "q8_0"


# -- asked ------------------------------------------------------------------------------------------------------------
class Peer:
    """The process; `about` names its version and the instruction sets it uses."""

    def __init__(self, checkpoint: Path) -> None:
        own = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_"))}  # llama.cpp's own defaults
        self.process = subprocess.Popen(
            [HERE, "-I", __file__, checkpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=own
        )  # -I: this folder would hide the package of this file's name
        self.about: str = self._read()["about"]

    def ask(self, **question: Any) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(question) + "\n")
        self.process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"llama.cpp's process ended with status {self.process.wait()}")
        return json.loads(line)


@contextmanager
def peer(checkpoint: Path) -> Iterator[Peer | None]:
    """The process for a folder with config.json and model.safetensors; None where there is no llama.cpp."""
    if not HERE.is_file():
        yield None
        return
    found = Peer(checkpoint)
    try:
        yield found
    finally:
        found.process.kill()
        found.process.communicate()


class Theirs:
    """One sequence of llama.cpp, its cache at the end of the prompt; flash attention and a float16 cache, its defaults.

    Args:
        kind: one of `KINDS`.
        threads: how many to use, asked for at each call.
    """

    def __init__(self, peer: Peer, kind: str, ids: np.ndarray, threads: Any) -> None:
        self.peer, self.kind, self.threads, self.used = peer, kind, threads, 0.0
        started = perf_counter()
        self.peer.ask(kind=kind, prompt=ids.tolist(), threads=threads())
        self.cold = perf_counter() - started

    def tokens(self, count: int) -> list[int]:
        answer = self.peer.ask(kind=self.kind, count=count, threads=self.threads())
        self.used = answer["cpu"]
        return answer["tokens"]

    def cpu(self) -> float:
        """Seconds of CPU that the process had used when it last answered."""
        return self.used


# -- answering, in the other interpreter ------------------------------------------------------------------------------
def serve(checkpoint: Path) -> None:
    import llama_cpp as c  # pyright: ignore

    quiet = c.llama_log_callback(lambda level, text, _: level == 4 and sys.stderr.buffer.write(text))  # errors alone
    c.llama_log_set(quiet, None)
    c.llama_backend_init()
    files = {kind: checkpoint / f"{kind}.gguf" for kind in KINDS}
    convert(checkpoint, files["bf16"])
    rule = c.llama_model_quantize_default_params()
    rule.ftype = c.LLAMA_FTYPE_MOSTLY_Q8_0
    assert not c.llama_model_quantize(bytes(files["bf16"]), bytes(files["q8_0"]), rule)
    uses = [part.strip() for part in c.llama_print_system_info().decode().split("|") if part.strip().endswith("= 1")]
    say(about=f"llama.cpp of llama-cpp-python {c.__version__} ({', '.join(part.split()[-3] for part in uses)})")
    runs: dict[str, Sequence] = {}
    for line in sys.stdin:
        question = json.loads(line)
        if "prompt" in question:
            runs[question["kind"]] = Sequence(files[question["kind"]], question["prompt"], question["threads"])
            say()
        else:
            say(tokens=runs[question["kind"]].tokens(question["count"], question["threads"]), cpu=process_time())


def say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


class Sequence:
    """A model, its context, and the first token after the prompt."""

    def __init__(self, file: Path, prompt: list[int], threads: int) -> None:
        import llama_cpp as c  # pyright: ignore

        self.c = c
        self.model = c.llama_model_load_from_file(bytes(file), c.llama_model_default_params())
        fields = c.llama_context_default_params()
        fields.n_ctx = fields.n_batch = 128
        self.context = c.llama_init_from_model(self.model, fields)
        self.vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self.model))
        self.position = len(prompt)
        c.llama_set_n_threads(self.context, threads, threads)
        self.first = int(self.logits(prompt).argmax())

    def tokens(self, count: int, threads: int) -> list[int]:
        """The largest each time; the cache is at the end of the prompt again afterwards."""
        self.c.llama_set_n_threads(self.context, threads, threads)
        made = [self.first]
        while len(made) < count:
            made.append(int(self.logits(made[-1:]).argmax()))
        assert self.c.llama_memory_seq_rm(self.c.llama_get_memory(self.context), 0, self.position, -1)
        return made

    def logits(self, ids: list[int]) -> np.ndarray:
        """Logits after the last of `ids`; [vocabulary], valid until the next call."""
        held = (self.c.llama_token * len(ids))(*ids)  # a batch only points at it
        assert not self.c.llama_decode(self.context, self.c.llama_batch_get_one(held, len(ids)))
        return np.ctypeslib.as_array(self.c.llama_get_logits_ith(self.context, -1), (self.vocabulary,))


def convert(checkpoint: Path, file: Path) -> None:
    """Write the bfloat16 weights of a Llama checkpoint as GGUF without a vocabulary; norms in float32."""
    import gguf  # pyright: ignore

    config = json.loads((checkpoint / "config.json").read_text())
    width, heads, groups = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    layers = config["num_hidden_layers"]
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_tokenizer_model("no_vocab")
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(width)
    writer.add_block_count(layers)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(groups)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_dimension_count(width // heads)
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, layers)
    weights = checkpoint / "model.safetensors"
    with weights.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    for key, field in header.items():
        w = np.memmap(weights, "u2", "r", 8 + size + field["data_offsets"][0], tuple(field["shape"]))
        name = names.get_name(key, try_suffixes=(".weight",))
        if w.ndim == 1:
            writer.add_tensor(name, (w.astype("u4") << 16).view("f4"))
        else:
            if "q_proj" in key or "k_proj" in key:
                w = interleaved(w, heads if "q_proj" in key else groups)
            writer.add_tensor(name, w, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def interleaved(w: np.ndarray, heads: int) -> np.ndarray:
    """Rows of each head as (0, d/2, 1, d/2 + 1, ...): llama.cpp turns neighbours, transformers the halves of a head.

    w: [heads · d, D].
    """
    return w.reshape(heads, 2, -1, w.shape[1]).swapaxes(1, 2).reshape(w.shape)


if __name__ == "__main__":
    serve(Path(sys.argv[1]))
