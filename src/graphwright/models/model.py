"""Model: a program with its config, tokenizer and files; running it, measuring it, and the doors to the other jobs."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from copy import copy
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np

from graphwright.array import Device
from graphwright.errors import ShapeError, UsageError
from graphwright.models.generation.cache import Cache, need_rows_of
from graphwright.models.generation.cached_program import with_padding
from graphwright.models.generation.generate import decode, generate
from graphwright.models.generation.paged import PagedCache
from graphwright.models.generation.sampling import Sampling, need
from graphwright.models.generation.text import check_ids, check_mask, vocabulary
from graphwright.models.health import check_finite
from graphwright.models.inspect import inspect_program
from graphwright.models.perplexity import bits_per_byte
from graphwright.models.tokenizer import special_ids
from graphwright.plan import plan_for
from graphwright.verbs import verb

if TYPE_CHECKING:
    from graphwright.array import NDArray
    from graphwright.models.architectures.architecture import Architecture
    from graphwright.models.architectures.config import Config
    from graphwright.models.export.export import ExportPlan
    from graphwright.models.export.receipt import Receipt
    from graphwright.models.generation.cache import Rows
    from graphwright.models.generation.generate import Generation
    from graphwright.models.inspect import Inspection
    from graphwright.models.perplexity import BitsPerByte
    from graphwright.models.tokenizer import Tokenizer
    from graphwright.program import AssemblyReport, Program
    from graphwright.program.editing.journal import Entry
    from graphwright.progress import Report
    from graphwright.safetensors import Checkpoint
    from graphwright.surgery import Findings


class GenerateOptions(TypedDict, total=False):
    """Keywords of `Model.generate` besides `n`; its signature has their defaults."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    stop: str | Sequence[str]
    stream: Callable[[str], object] | None
    logprobs: int
    cache: Rows | None
    repetition_penalty: float
    presence: float
    frequency: float
    processors: Sequence[Any]
    use_model_defaults: bool
    first_stream: int
    allow_stale: bool
    cancel: Callable[[], bool] | None


class PagedOptions(TypedDict, total=False):
    """Keywords of `Model.new_cache` for a paged cache."""

    blocks: int | None
    nbytes: int | None
    block: int
    dtype: str | None
    prefix_bytes: int | None
    poison: bool


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
        eos_ids: tokens that end a text, from generation_config.json or the config.
        compute: dtype of activations.
        stored: dtype that weights were converted to when opened, or `keep`.
        notes: what was found and is no error, e.g. rows of the embedding beyond the tokenizer.
    """

    def __init__(
        self,
        program: Program,
        arch: Architecture,
        dims: Any,
        config: Config,
        checkpoint: Checkpoint | None,
        directory: Path,
        keys: dict[str, str],
        tokenizer: Tokenizer | None,
        compute: str,
        stored: str = "keep",
        notes: Sequence[str] = (),
    ) -> None:
        self.program, self.arch, self.dims, self.config = program, arch, dims, config
        self.checkpoint, self.directory, self.keys = checkpoint, directory, keys
        self.tokenizer, self.compute, self.stored, self.notes = tokenizer, compute, stored, tuple(notes)
        self.eos_ids = special_ids(directory, config)[1]
        self._padded: tuple[int, Program] | None = None
        self._original: Program | None = None

    @property
    def original(self) -> Program:
        """The program as opened, over the bytes of the file; made again from the headers at the first call."""
        if self._original is None:
            from graphwright.models.open import build

            if self.checkpoint is None:
                raise UsageError(
                    "the model was not opened from a checkpoint",
                    where=self.directory.name,
                    fix="model.program.at(seq) gives an earlier state",
                )
            self._original = build(
                self.arch,
                self.dims,
                self.keys,
                self.checkpoint,
                self.stored,
                self.compute,
                f"{self.directory.name} (original)",
            )
        return self._original

    @property
    def opened(self) -> bool:
        """True if the model lies in its directory: a checkpoint, or a saved one, and not a config alone."""
        return self.checkpoint is not None or (self.directory / "program.json").is_file()

    def with_program(self, program: Program, config: Config | None = None, dims: Any = None) -> Model:
        """The same model, files and tokenizer with another program, and the config and dimensions that fit it."""
        made = copy(self)
        made.program, made._padded = program, None
        made.config, made.dims = config or self.config, dims or self.dims
        return made

    def select(self, pattern: str = "**", **filters: Any) -> Any:
        """Nodes of the program by path pattern and filters, or units of them; see `Program.select`."""
        return self.program.select(pattern, **filters)

    # -- running -----------------------------------------------------------------------------------------------------
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
        seen = check_mask(mask, batch.shape)
        positions = np.maximum(np.cumsum(seen, axis=1) - 1, 0)
        return self._run(self._with_padding(), batch, {"mask": seen}, positions).reshape(*np.shape(ids), -1)

    def _run(
        self, p: Program, ids: np.ndarray, extra: dict[str, np.ndarray], positions: np.ndarray | None = None
    ) -> np.ndarray:
        feeds = {"ids": ids, **extra}
        if "positions" in {p.path(n) for n in p.inputs()}:
            default = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
            feeds["positions"] = np.ascontiguousarray(default if positions is None else positions)
        dims = {"B": ids.shape[0], "T": ids.shape[1]}
        plan = plan_for(p, {p.path(n): p.spec(n).bind(dims) for n in p.inputs()}, ("logits",), freeze=True)
        result: NDArray = plan(feeds)["logits"]
        host = result.to_numpy("float32")
        if host.ndim != 3 or host.shape[:2] != ids.shape:
            raise ShapeError(
                "the output `logits` has another shape than scores for every token",
                where=self.program.path(self.program.output("logits")),
                expected=f"[{ids.shape[0]}, {ids.shape[1]}, V]",
                got=list(host.shape),
                fix="model.program.run(...) gives outputs of any shape",
            )
        check_finite(self.program, host, ids)
        return host

    def _with_padding(self) -> Program:
        if self._padded is None or self._padded[0] != self.program.version:
            self._padded = (self.program.version, with_padding(self.program))
        return self._padded[1]

    def check_ids(self, ids: Any) -> np.ndarray:
        """Ids as a contiguous int64 array [B, T]. Raises: PromptError for none, or one out of range."""
        return check_ids(ids, self.vocab)

    @property
    def vocab(self) -> int:
        """Rows of the embedding, as it is now."""
        return vocabulary(self.program)

    # -- the cache ---------------------------------------------------------------------------------------------------
    @overload
    def new_cache(
        self, tokens: int | None, batch: int = 1, *, kind: Literal["static"], device: str = "cpu"
    ) -> Cache: ...
    @overload
    def new_cache(
        self,
        tokens: int | None = None,
        batch: int = 1,
        *,
        kind: Literal["paged"] = "paged",
        device: str = "cpu",
        **options: Unpack[PagedOptions],
    ) -> PagedCache: ...
    def new_cache(
        self,
        tokens: int | None = None,
        batch: int = 1,
        *,
        kind: str = "paged",
        device: str = "cpu",
        dtype: str | None = None,
        **options: Any,
    ) -> Cache | PagedCache:
        """An empty KV cache.

        Args:
            tokens: rows to make room for; of a paged cache `blocks` or `nbytes` may say the size instead.
            batch: sequences; of a paged cache, those expected, each of which may waste part of a block.
            kind: `paged` for sequences of any lengths in blocks, which can be forked: `cache.sequence()` is one;
                `static` for `batch` sequences of equal length, contiguous, itself what is filled.
            device: where the rows lie, and steps run.
            dtype: of the rows of a paged cache: "float32", "bfloat16" or "float16"; that of the activations by default.
            options: of a paged cache: `blocks`, `nbytes`, `block`, `prefix_bytes`, `poison`, see `PagedCache`.
        """
        there = Device.parse(device)
        if kind == "paged":
            return PagedCache(self.program, tokens=tokens, sequences=batch, kind=dtype, device=there, **options)
        if kind != "static" or options or dtype is not None:
            raise UsageError("no such kind of cache", expected="paged, or static without options", got=(kind, *options))
        return Cache(self.program, batch, 0 if tokens is None else tokens, there)

    def prefill(self, cache: Rows, ids: Any, **options: Any) -> np.ndarray:
        """Append ids [B, T] (or [T]) to a cache; logits behind the last, float32 [B, V]. See `Cache.prefill`."""
        need_rows_of(self.program, cache)
        return cache.prefill(self.check_ids(ids), **options)

    def decode(
        self, cache: Rows, steps: int = 1, *, stream: int | None = None, allow_stale: bool = False, **sampling: Any
    ) -> Generator[int]:
        """Choose and append up to `steps` tokens, one by one; see `models.generation.generate.decode`.

        Args:
            cache: one sequence with at least one token.
            steps: tokens at most.
            stream: number of the random stream; by default the sequence's own, which no fork of it shares.
            allow_stale: run on rows of another state of the model.
            sampling: fields of `Sampling`.
        """
        need_rows_of(self.program, cache)
        number = cache.stream if stream is None else stream
        need("steps", steps)
        need("stream", number)
        if steps < 0:
            raise UsageError("tokens at most", where="steps", expected=">= 0", got=steps)
        return decode(cache, steps, Sampling(**sampling), number, allow_stale)

    def reprefill(self, cache: Rows) -> None:
        """Fill a cache again from its tokens, with the model as it is now; see `Cache.refill`."""
        need_rows_of(self.program, cache)
        cache.refill()

    @overload
    def generate(
        self, prompt: Any, max_new_tokens: int = 64, *, n: Literal[1] = 1, **options: Unpack[GenerateOptions]
    ) -> Generation: ...
    @overload  # `Any` stands for the single one that an `n` of 1 gives
    def generate(
        self, prompt: Any, max_new_tokens: int = 64, *, n: int, **options: Unpack[GenerateOptions]
    ) -> list[Generation] | Any: ...
    def generate(
        self,
        prompt: Any,
        max_new_tokens: int = 64,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        min_p: float = 0.0,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        n: int = 1,
        stream: Callable[[str], object] | None = None,
        logprobs: int = 0,
        cache: Rows | None = None,
        repetition_penalty: float = 1.0,
        presence: float = 0.0,
        frequency: float = 0.0,
        processors: Sequence[Any] = (),
        use_model_defaults: bool = False,
        first_stream: int = 0,
        allow_stale: bool = False,
        cancel: Callable[[], bool] | None = None,
    ) -> Generation | list[Generation]:
        """Continue a text (or ids); see `graphwright.models.generation.generate`. A list of `n` results if n > 1."""
        given = {
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "seed": seed,
            "repetition_penalty": repetition_penalty,
            "presence": presence,
            "frequency": frequency,
            "processors": tuple(processors) if isinstance(processors, list) else processors,
        }
        defaults = Sampling()
        sampling = {name: value for name, value in given.items() if value != getattr(defaults, name)}
        return generate(
            self,
            prompt,
            max_new_tokens,
            stop=stop,
            n=n,
            stream=stream,
            logprobs=logprobs,
            cache=cache,
            first_stream=first_stream,
            allow_stale=allow_stale,
            use_model_defaults=use_model_defaults,
            cancel=cancel,
            **sampling,
        )

    def perplexity(
        self, text: str, *, window: int = 256, stride: int = 128, report: Report | None = None
    ) -> BitsPerByte:
        """How well the model predicts a text: nats per token, bits per byte, perplexity; see `models.perplexity`."""
        return bits_per_byte(self, text, window=window, stride=stride, report=report)

    def quantize(self, kind: str = "int8", where: str = "**") -> Entry:
        """Matrices as int8 with a scale per group, in one edit that can be undone; see `models.quantize`."""
        from graphwright.models.quantize import quantize

        return quantize(self, kind, where)

    # -- surgery -----------------------------------------------------------------------------------------------------
    def orthogonalize(self, where: Any, method: str = "polar", **options: Any) -> Any:
        """Make matrices orthonormal in one edit; see `graphwright.surgery.orthogonalize`. Gives its `OrthoReport`."""
        return verb("orthogonalize")(self, where, method, **options)

    def compress(self, where: Any, method: str = "best", budget: Any = None, **options: Any) -> Any:
        """Matrices as factors in one edit; see `graphwright.surgery.compress`. Gives its `CompressionReport`."""
        return verb("compress")(self, where, method, budget, **options)

    def prune(self, target: Any, calibration: Any = None, **options: Any) -> Any:
        """Take away the units that matter least, in one edit that can be undone; see `graphwright.surgery.prune`.

        Args:
            target: `surgery.Ratio(0.3)`, or another budget of size.
            calibration: data; by default the bundled text.
            options: keywords of `surgery.prune`.
        Returns: a `PruneReport`; with `dry_run=True` a `PrunePlan`.
        """
        return verb("prune")(self, target, calibration, **options)

    # -- looking -----------------------------------------------------------------------------------------------------
    def inspect(self) -> Inspection:
        """Family, tree, shapes, dtypes, bytes, FLOPs and KV bytes per token; reads no weight."""
        return inspect_program(self.program, self.arch.name, self.config, self.dims)

    def validate(self) -> AssemblyReport:
        """Does everything fit, the program and the files it came from; see `graphwright.models.assembly.validate`."""
        from graphwright.models.assembly import validate

        return validate(self)

    def diagnose(self, text: str | None = None, **options: Any) -> Findings:
        """What is wrong with the program, its weights, and what contradicts its config: `Findings`.

        Args:
            text: runs it as a probe, with the cross-entropy of the next token as the loss.
            options: `kinds`, `limits`, `report`, `cancel`; see `graphwright.surgery.diagnose`.
        Raises: UsageError for unknown kinds or limits, and while an edit is open.
        """
        return verb("diagnose")(self, text, **options)

    def parameters(self) -> Iterator[Any]:
        """Trainable variables; what an optimizer takes."""
        return iter(self.program.parameters())

    def variables(self) -> dict[str, Any]:
        """Params and states by key: what a saved training holds."""
        return self.program.variables()

    def structure_hash(self) -> str:
        """That of the program."""
        return self.program.structure_hash()

    # -- leaving -----------------------------------------------------------------------------------------------------
    def export_plan(self, prefer: str = "stock") -> ExportPlan:
        """Which rungs can carry the model as it is now, and why not; reads no payload, writes nothing."""
        from graphwright.models.export.export import export_plan

        return export_plan(self, prefer)

    def export(self, directory: Any, **options: Any) -> Receipt:
        """Write a checkpoint that `transformers` loads, and prove it; see `graphwright.models.export.export.export`."""
        from graphwright.models.export.export import export

        return export(self, directory, **options)

    def save(self, directory: Any, *, history: str = "full", overwrite: bool = False) -> Path:
        """Save program, journal, config and tokenizer, so that `gw.open(directory)` continues where this stopped."""
        from graphwright.models.saved import save_model

        return save_model(self, directory, history=history, overwrite=overwrite)

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(repr(self))}</code></p>{self.program._repr_html_()}"

    def __repr__(self) -> str:
        p = self.program
        return f"Model({self.arch.name}, {self.directory.name!r}, {len(p)} nodes, version {p.version})"


def need_tokenizer(model: Model) -> Tokenizer:
    """The tokenizer. Raises: UsageError if there is none."""
    if model.tokenizer is None:
        raise UsageError(
            "the model has no tokenizer",
            where=str(model.directory),
            fix="put its tokenizer.json beside config.json; from Python, token ids do too",
        )
    return model.tokenizer
