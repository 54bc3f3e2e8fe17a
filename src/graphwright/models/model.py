"""Model: a program with its config, tokenizer and files; running it, measuring it, and the doors to the other jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import NDArray
from graphwright.errors import UsageError
from graphwright.models.architecture import Architecture
from graphwright.models.cache import Cache
from graphwright.models.config import Config
from graphwright.models.errors import PromptError
from graphwright.models.generate import Generation, generate
from graphwright.models.health import check_finite
from graphwright.models.inspect import Inspection, inspect_program
from graphwright.models.padding import with_padding
from graphwright.models.perplexity import BitsPerByte, bits_per_byte
from graphwright.models.tokenizer import Tokenizer
from graphwright.plan import plan_for
from graphwright.program import Program
from graphwright.safetensors import Checkpoint

if TYPE_CHECKING:
    from graphwright.models.export import ExportPlan
    from graphwright.models.receipt import Receipt
    from graphwright.progress import Report


class Model:
    """An opened model.

    Attributes:
        program: the graph; edit it with `program.edit(...)`, and the model runs as edited.
        arch, dims: family and dimensions as read from the config.
        config: the config's fields.
        checkpoint: the files that weights are mapped from; never written.
        directory: where they lie.
        keys: param path -> checkpoint key.
        tokenizer: or None.
        compute: dtype of activations.
    """

    def __init__(self, program: Program, arch: Architecture, dims: Any, config: Config, checkpoint: Checkpoint | None,
                 directory: Path, keys: dict[str, str], tokenizer: Tokenizer | None, compute: str) -> None:  # fmt: skip
        self.program, self.arch, self.dims, self.config = program, arch, dims, config
        self.checkpoint, self.directory, self.keys = checkpoint, directory, keys
        self.tokenizer, self.compute = tokenizer, compute
        self._padded: tuple[int, Program] | None = None

    # -- running ----------------------------------------------------------------------------------------------------------
    def logits(self, ids: Any, mask: Any = None) -> np.ndarray:
        """Scores of the next token at every position: float32 [B, T, V] (or [T, V] for ids [T]).

        Args:
            ids: int array-like [B, T] or [T].
            mask: bool array-like of the same shape, false for padding; positions then count the true ones.
        Raises: PromptError; NonFinite naming the weight that holds a NaN or infinity.
        """
        batch = self.check_ids(ids)
        if mask is None:
            return self._run(self.program, batch, {}).reshape(*np.shape(ids), -1)
        seen = np.asarray(mask).astype(bool).reshape(batch.shape)
        positions = np.maximum(np.cumsum(seen, axis=1) - 1, 0)
        return self._run(self._with_padding(), batch, {"mask": seen}, positions).reshape(*np.shape(ids), -1)

    def _run(self, p: Program, ids: np.ndarray, extra: dict[str, np.ndarray], positions: np.ndarray | None = None) -> np.ndarray:
        feeds = {"ids": ids, **extra}
        if "positions" in {p.path(n) for n in p.inputs()}:
            default = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            feeds["positions"] = np.ascontiguousarray(default if positions is None else positions)
        dims = {"B": ids.shape[0], "T": ids.shape[1]}
        plan = plan_for(p, {p.path(n): p.spec(n).bind(dims) for n in p.inputs()}, ("logits",), freeze=True)
        result: NDArray = plan(feeds)["logits"]
        host = result.to_numpy("float32")
        check_finite(self.program, host)
        return host

    def _with_padding(self) -> Program:
        if self._padded is None or self._padded[0] != self.program.version:
            self._padded = (self.program.version, with_padding(self.program))
        return self._padded[1]

    def check_ids(self, ids: Any) -> np.ndarray:
        """Ids as a contiguous int64 array [B, T]. Raises: PromptError for none, or one out of range."""
        batch = np.atleast_2d(np.asarray(ids))
        if batch.ndim != 2 or batch.dtype.kind not in "iu" and batch.size:
            raise PromptError("ids are integers [B, T] or [T]", got=f"{batch.dtype} {list(batch.shape)}")
        if batch.size == 0:
            raise PromptError("an empty prompt", fix="give at least one token; model.tokenizer.bos_id is a start")
        vocab = self.vocab
        if batch.min() < 0 or batch.max() >= vocab:
            bad = int(np.argmax((batch < 0) | (batch >= vocab)))
            raise PromptError("a token id out of range", where=f"position {bad % batch.shape[1]}", expected=f"0..{vocab - 1}",
                              got=int(batch.reshape(-1)[bad]))  # fmt: skip
        return np.ascontiguousarray(batch, np.int64)

    @property
    def vocab(self) -> int:
        """Rows of the embedding."""
        return self.dims.vocab

    def new_cache(self, capacity: int, batch: int = 1) -> Cache:
        """An empty KV cache of `capacity` rows for `batch` sequences."""
        return Cache(self.program, batch, capacity)

    def reprefill(self, cache: Cache) -> None:
        """Fill a cache again from its tokens, with the model as it is now."""
        tokens = cache.tokens
        cache.reset()
        if tokens.shape[1]:
            cache.step(tokens)

    def generate(self, prompt: Any, max_new_tokens: int = 64, *, temperature: float = 0.0, top_k: int = 0, top_p: float = 1.0,
                 min_p: float = 0.0, repetition_penalty: float = 1.0, seed: int = 0, stop: tuple[str, ...] = (), n: int = 1,
                 stream: Callable[[str], None] | None = None, logprobs: int = 0) -> Generation | list[Generation]:  # fmt: skip
        """Continue a text (or ids); see `graphwright.models.generate`. A list of `n` results if n > 1."""
        return generate(self, prompt, max_new_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
                        repetition_penalty=repetition_penalty, seed=seed, stop=stop, n=n, stream=stream, logprobs=logprobs)  # fmt: skip

    def perplexity(self, text: str, *, window: int = 256, stride: int = 128, report: Report | None = None) -> BitsPerByte:
        """How well the model predicts a text: nats per token, bits per byte, perplexity; see `models.perplexity`."""
        return bits_per_byte(self, text, window=window, stride=stride, report=report)

    # -- looking ----------------------------------------------------------------------------------------------------------
    def inspect(self) -> Inspection:
        """Family, tree, shapes, dtypes, bytes, FLOPs and KV bytes per token; reads no weight."""
        return inspect_program(self.program, self.arch.name, self.config, self.dims)

    def parameters(self) -> Iterator[Any]:
        """Trainable variables; what an optimizer takes."""
        return iter(self.program.parameters())

    # -- leaving ----------------------------------------------------------------------------------------------------------
    def export_plan(self) -> ExportPlan:
        """Which rung can carry the model as it is now, and why not a better one; reads no payload, writes nothing."""
        from graphwright.models.export import export_plan

        return export_plan(self)

    def export(self, directory: Any, **options: Any) -> Receipt:
        """Write a checkpoint that `transformers` loads, and prove it; see `graphwright.models.export.export`."""
        from graphwright.models.export import export

        return export(self, directory, **options)

    def save(self, directory: Any, *, history: str = "full", overwrite: bool = False) -> Path:
        """Save program, journal, config and tokenizer, so that `gw.open(directory)` continues where this stopped."""
        from graphwright.models.saved import save_model

        return save_model(self, directory, history=history, overwrite=overwrite)

    def __repr__(self) -> str:
        return f"Model({self.arch.name}, {self.directory.name!r}, {len(self.program)} nodes, version {self.program.version})"


def need_tokenizer(model: Model) -> Tokenizer:
    """The tokenizer. Raises: UsageError if there is none."""
    if model.tokenizer is None:
        raise UsageError("the model has no tokenizer", where=str(model.directory), fix="give token ids instead of text")
    return model.tokenizer
