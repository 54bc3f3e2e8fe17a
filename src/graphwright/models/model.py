"""`Model`: a program with its config, tokenizer and files; runs, measures, edits and exports them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import numpy as np

from graphwright.arguments import checked
from graphwright.array import CPU, Device, NDArray, backend
from graphwright.autograd import Parameter, Variable
from graphwright.errors import ShapeError, UsageError
from graphwright.models.architectures.architecture import Architecture, Config
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.export.write import save_model
from graphwright.models.generation.cache import CHUNK, KVCache, StaticCache, check_cache_of
from graphwright.models.generation.cached_program import with_padding
from graphwright.models.generation.generate import decode, generate, generate_many
from graphwright.models.generation.padding import tokens_first
from graphwright.models.generation.paged import PagedCache, PagedKeywords
from graphwright.models.generation.pattern_rows import extend_patterns
from graphwright.models.generation.recomputed import check_cacheable_program
from graphwright.models.generation.text import (
    UNBOUNDED,
    check_ids,
    check_mask,
    encoded,
    feeds_of,
    padded_ids,
    vocabulary,
)
from graphwright.models.inspect import Inspection, inspect_program
from graphwright.models.loading import build
from graphwright.models.metrics import check_finite, perplexity, validate
from graphwright.models.quantize import quantize
from graphwright.models.resize_vocab import resize_vocab
from graphwright.models.tokenizer import Tokenizer, special_ids
from graphwright.plan.compile import plan_for
from graphwright.plan.options import CompileOptions
from graphwright.program.exclusive import exclusive
from graphwright.program.program import Program
from graphwright.program.run import check_feeds
from graphwright.program.selection import Filters, Selection
from graphwright.report import ShortDict
from graphwright.safetensors import Checkpoint
from graphwright.signatures import keywords, late

if TYPE_CHECKING:
    from graphwright.models.export.ladder import ExportPlan
    from graphwright.program.axes.units import Units
    from graphwright.program.derived.rewrite import PatchPoint
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.op_graph import Ref
    from graphwright.program.run import Run


@checked
@dataclass(eq=False, repr=False)
class Model:
    """A model: its program, config, tokenizer and files.

    Attributes:
        program: the graph; the model runs as edited by `program.edit(...)`.
        arch: the family.
        config, config_dims: fields of the config as it was opened, and the dimensions read from them; edits of the
            program do not change them, exports write the changed ones.
        checkpoint, directory: the files that weights are mapped from; never written.
        keys: dict from param path to checkpoint key.
        eos_ids: tokens that end a text, from generation_config.json or the config.
        compute: dtype of activations.
        stored: dtype to which weights were converted when opened; `keep` if they were not.
        notes: findings while opening, e.g. rows of the embedding without a token.
        device: where plans, caches and training of this model run by default, see `to`.
    """

    program: Program
    arch: Architecture
    config_dims: Any
    config: Config
    checkpoint: Checkpoint | None
    directory: Path
    keys: dict[str, str]
    tokenizer: Tokenizer | None
    compute: str
    stored: str = "keep"
    notes: Sequence[str] = ()
    device: Device = CPU

    def __post_init__(self) -> None:
        self.notes, self.keys = tuple(self.notes), ShortDict(self.keys)
        self.eos_ids = special_ids(self.directory, self.config)[1]
        self._padded: tuple[int, Program] | None = None
        self._original: Program | None = None

    @property
    def original(self) -> Program:
        """The program as it was opened, over the bytes of the file; rebuilt from the headers at the first access."""
        if self._original is None:
            if self.checkpoint is None:
                raise UsageError("`original` is unknown: the model has no checkpoint", where=self.directory.name,
                                 fix="model.program.at(seq) gives an earlier state")  # fmt: skip
            name = f"{self.directory.name} (original)"
            options = self.checkpoint, self.stored, self.compute, name
            self._original = build(self.arch, self.config_dims, self.keys, *options)
        return self._original

    @property
    def opened(self) -> bool:
        """True if the directory has a checkpoint or a saved program; False if it has only a config."""
        return self.checkpoint is not None or (self.directory / "program.json").is_file()

    def with_program(self, program: Program, config: Config | None = None, dims: Any = None) -> Model:
        """Copy the model with another program and optionally its config and dimensions, keeping files and tokenizer."""
        made = copy(self)
        made.program, made._padded = program, None
        made.config, made.config_dims = config or self.config, dims or self.config_dims
        return made

    @overload
    def select(self, pattern: str = "**", *, units: None = None, **filters: Unpack[Filters]) -> Selection: ...
    @overload
    def select(self, pattern: str = "**", *, units: str, **filters: Unpack[Filters]) -> Units: ...
    @keywords(Selection.of)
    def select(self, pattern: str = "**", *, units: str | None = None, **filters: Unpack[Filters]) -> Selection | Units:
        """Select nodes of the program by path pattern and filters, or units of them; see `Program.select`."""
        return self.program.select(pattern, units=units, **filters)

    @keywords(Program.edit)
    def edit(self, why: str, **options: Any) -> Transaction:
        """Open an edit of the program: `with model.edit("drop a branch") as e: ...`; see `Program.edit`."""
        return self.program.edit(why, **options)

    def undo(self, n: int = 1) -> None:
        """Undo the last `n` edits of the program; see `Program.undo`."""
        self.program.undo(n)

    def redo(self, n: int = 1) -> None:
        """Redo the last `n` undone edits of the program; see `Program.redo`."""
        self.program.redo(n)

    # -- running -----------------------------------------------------------------------------------------------------
    def to(self, device: Device | str) -> Model:
        """Run on another device from now on, and return the model.

        Weights stay mapped or where they are. The first run on a device copies there what it reads, in the dtype of
        the file; training moves what it changes. Caches and steps that exist already stay on their device.
        Raises: DeviceUnavailable.
        """
        there = Device.parse(device)
        if there != CPU:  # whose backend would load torch
            backend(there)
        self.device = there
        return self

    @property
    def task(self) -> str:
        """What the model computes, such as `causal-lm` or `image-classification`."""
        return self.arch.task

    def __call__(self, ids: Any = None, mask: Any = None, **inputs: Any) -> Any:
        """Return the logits of a causal language model for a text or ids, see `logits`; of others, see `outputs`."""
        if self.task == LANGUAGE_MODEL and not inputs:
            return self.logits(ids, mask)
        return self.outputs(ids, **inputs)

    def outputs(self, main: Any = None, **inputs: Any) -> dict[str, np.ndarray]:
        """Return the outputs of the program by name, for inputs by name.

        >>> model.outputs(pixel_values=images)["logits"]

        Args:
            main: the first input, without its name; a text is encoded, to ids [1, T], for a model of texts.
            inputs: array-likes. Some have a default, see `Architecture`: `attention_mask` is ones.
        Raises: FeedError naming every input that is missing, unknown, or of a wrong shape or dtype.
        """
        with exclusive(self.program):
            p = self.program
            specs = {p.path(n): p.spec(n) for n in p.inputs()}
            given = dict(inputs) if main is None else {next(iter(specs)): main, **inputs}
            if isinstance(main, str):
                given[next(iter(specs))] = [encoded(self, main)]
            feeds, _ = check_feeds(p, {**given, **self._defaults(given)})
            plan = plan_for(p, {n: t.spec for n, t in feeds.items()}, p.output_names(), self._options())
            return {name: found.to_numpy() for name, found in plan(feeds).items()}

    def _defaults(self, given: Mapping[str, Any]) -> dict[str, np.ndarray]:
        """Return the default of each input that is not given, in the named sizes of the `given` inputs."""
        p, sizes = self.program, dict[str, int]()
        specs = {p.path(n): p.spec(n) for n in p.inputs()}
        for name, array in given.items():
            if name in specs:
                specs[name].match(np.shape(array), sizes)
        absent = {n: specs[n].bind(sizes) for n in self.arch.defaults if n in specs and n not in given}
        known = {n: spec for n, spec in absent.items() if all(isinstance(d, int) for d in spec.shape)}
        return {n: np.full(spec.sizes, self.arch.defaults[n], spec.dtype.numpy) for n, spec in known.items()}

    def run(
        self, ids: Any, *, keep: str | Sequence[Ref] = "all", capture: Collection[PatchPoint] = (),
        patch: Mapping[PatchPoint, Any] | None = None,
    ) -> Run:  # fmt: skip
        """Run the program node by node on a text or ids, so that every value can be read, and replaced by `patch`.

        >>> run = model.run("The following", keep=["layers.1.mlp.act"], patch={"layers.0.attn.o": array})
        >>> np.asarray(run["logits"]), np.asarray(run.value("layers.1.mlp.act"))

        Args:
            ids: a text, or int array-like [B, T] or [T], which is run as [1, T].
            keep, capture, patch: see `Program.run`.
        Raises: PromptError; errors of `Program.run`.
        """
        with exclusive(self.program):
            feeds = feeds_of(self.program, self.check_ids(ids))
            return self.program.run(feeds, keep=keep, capture=capture, patch=patch)

    def logits(self, ids: Any, mask: Any = None, *, deterministic: bool = False) -> np.ndarray:
        """Return the logits of the next token at every position: float32 [B, T, V], or [T, V] for a text or ids [T].

        Args:
            ids: a text, or int array-like [B, T] or [T].
            mask: bool array-like of the same shape, false for padding; positions are counted without padding, and so
                are the rows of attention patterns.
            deterministic: give the bits of `program.run`; see `CompileOptions`.
        Raises: PromptError; NonFinite naming the weight that has a NaN or infinity.
        """
        with exclusive(self.program):
            batch = self.check_ids(ids)
            shape = batch.shape[isinstance(ids, str) or np.ndim(ids) < 2 :]
            if mask is None:
                return self._run(self.program, batch, deterministic).reshape(*shape, -1)
            if self._padded is None or self._padded[0] != self.program.plan_version:
                self._padded = self.program.plan_version, with_padding(self.program)
            seen = check_mask(mask, batch.shape)
            order = tokens_first(self.program, seen)
            if order is not None:
                batch, seen = (np.take_along_axis(each, order, 1) for each in (batch, seen))
            positions = np.maximum(np.cumsum(seen, axis=1) - 1, 0)
            found = self._run(self._padded[1], batch, deterministic, mask=seen, positions=positions)
            if order is not None:
                found = np.take_along_axis(found, np.argsort(order, axis=1)[..., None], 1)
            return found.reshape(*shape, -1)

    def _options(self, deterministic: bool = False) -> CompileOptions:
        return CompileOptions(freeze=True, deterministic=deterministic, device=self.device)

    def _run(self, p: Program, ids: np.ndarray, deterministic: bool, **extra: np.ndarray) -> np.ndarray:
        extend_patterns(p, ids.shape[1])
        shape, ids = ids.shape, padded_ids(p, ids)
        feeds = feeds_of(p, ids, **{name: padded_ids(p, array) for name, array in extra.items()})
        dims = {"B": ids.shape[0], "T": ids.shape[1]}
        specs = {p.path(n): p.spec(n).bind(dims) for n in p.inputs()}
        plan = plan_for(p, specs, ("logits",), self._options(deterministic))
        result: NDArray = plan(feeds)["logits"]
        host = result.to_numpy("float32")
        host = host[:, : shape[1]] if host.shape[:2] == ids.shape else host
        if host.ndim != 3 or host.shape[:2] != shape:
            raise ShapeError("the output `logits` does not have one row of scores per token",
                             where=self.program.path(self.program.output("logits")),
                             expected=f"[{shape[0]}, {shape[1]}, V]", got=list(host.shape),
                             fix="model.program.run(...) returns outputs of any shape")  # fmt: skip
        check_finite(self.program, host, ids[:, : shape[1]])
        return host

    def check_ids(self, ids: Any) -> np.ndarray:
        """Convert a text or ids to contiguous int64 [B, T].

        Raises: PromptError; UsageError without a tokenizer, or for a model of another task.
        """
        if self.task != LANGUAGE_MODEL:
            inputs = ", ".join(f"{name}=..." for name in self.program.input_names())
            raise UsageError("this model does not predict the next token of a text", where=self.directory.name,
                             expected=f"a {LANGUAGE_MODEL}", got=self.task, fix=f"model.outputs({inputs})")  # fmt: skip
        return check_ids(encoded(self, ids), self.vocab)

    @property
    def vocab(self) -> int:
        """Number of rows of the embedding, in its current state."""
        return vocabulary(self.program)

    @property
    def dims(self) -> Any:
        """The dimensions of the config, with the program's present size of the vocabulary."""
        given, rows = self.config_dims, self.vocab
        return given if rows in (UNBOUNDED, getattr(given, "vocab", rows)) else replace(given, vocab=rows)

    # -- generation --------------------------------------------------------------------------------------------------
    generate = generate
    generate_many = generate_many

    @overload
    def new_cache(
        self, tokens: int | None, batch: int = 1, *, kind: Literal["static"], device: Device | str | None = None,
        deterministic: bool = False,
    ) -> StaticCache: ...  # fmt: skip
    @overload
    def new_cache(
        self, tokens: int | None = None, batch: int = 1, *, kind: Literal["paged"] = "paged",
        device: Device | str | None = None, deterministic: bool = False, **options: Unpack[PagedKeywords],
    ) -> PagedCache: ...  # fmt: skip
    @keywords(PagedCache)
    def new_cache(
        self, tokens: int | None = None, batch: int = 1, *, kind: str = "paged", device: Device | str | None = None,
        deterministic: bool = False, **options: Unpack[PagedKeywords],
    ) -> StaticCache | PagedCache:  # fmt: skip
        """Make an empty KV cache.

        Args:
            tokens: capacity; a paged cache accepts `blocks` or `nbytes` instead.
            batch: number of sequences; a paged cache only uses it to add one block per sequence.
            kind: `paged` for sequences of any lengths, which can be forked: `cache.sequence()` makes one; `static` for
                `batch` sequences of equal length in contiguous memory.
            device: the device that holds the entries and runs the steps; by default that of the model.
            deterministic: as in `CompileOptions`, for the steps.
            options: options of a paged cache, see `PagedCache`.
        Raises: UsageError for an unknown kind, options with kind `static`, a size below 1, and for an imported class
            whose tokens depend on earlier ones by other ops than attention.
        """
        target = self.device if device is None else Device.parse(device)
        if self.arch.imported is not None:
            check_cacheable_program(self.program)
        if kind == "paged":
            return PagedCache(
                self.program, tokens=tokens, batch=batch, device=target, deterministic=deterministic, **options
            )
        if kind != "static":
            raise UsageError("unknown kind of cache", where="kind", expected="paged or static", got=kind)
        if options:
            raise UsageError("a static cache does not have these options", where="kind", got=", ".join(options),
                             fix="remove them, or use kind='paged'")  # fmt: skip
        return StaticCache(self.program, batch, 0 if tokens is None else tokens, target, deterministic)

    def prefill(self, cache: KVCache, ids: Any, *, chunk: int = CHUNK, allow_stale: bool = False) -> np.ndarray:
        """Append a text or ids [B, T] or [T]; return the logits after the last id, float32 [B, V].

        See `KVCache.prefill`.
        """
        check_cache_of(self.program, cache)
        return cache.prefill(self.check_ids(ids), chunk=chunk, allow_stale=allow_stale)

    decode = decode

    def reprefill(self, cache: KVCache) -> None:
        """Run the tokens of a cache again, with the model's current state; see `KVCache.refill`."""
        check_cache_of(self.program, cache)
        cache.refill()

    # -- measuring ---------------------------------------------------------------------------------------------------
    perplexity = perplexity
    validate = validate

    def inspect(self) -> Inspection:
        """Report family, tree, shapes, dtypes, bytes, FLOPs and KV bytes per token; reads no weight."""
        with exclusive(self.program):
            return inspect_program(self.program, self.arch.name, self.config.path.parent.name, self.dims)

    def parameters(self) -> Iterator[Parameter]:
        """Iterate over the trainable variables; see `Program.parameters`."""
        return self.program.parameters()

    def named_parameters(self) -> Iterator[tuple[str, Variable]]:
        """Iterate over (checkpoint key, variable) of all params; see `Program.named_parameters`."""
        return self.program.named_parameters()

    def variables(self) -> dict[str, Variable]:
        """Return the params and states as a dict from key to variable."""
        return self.program.variables()

    def structure_hash(self) -> str:
        """Return the sha256 of the program's structure, without the values of weights."""
        return self.program.structure_hash()

    # -- editing -----------------------------------------------------------------------------------------------------
    quantize = quantize
    resize_vocab = resize_vocab

    @late
    def orthogonalize(self):
        """Make matrices orthonormal in one edit; see `graphwright.surgery.orthogonalize`."""
        from graphwright.surgery import orthogonalize

        return orthogonalize

    @late
    def compress(self):
        """Replace matrices by smaller factors in one edit; see `graphwright.surgery.compress`."""
        from graphwright.surgery import compress

        return compress

    @late
    def prune(self):
        """Remove the units that matter least, in one edit that can be undone; see `graphwright.surgery.prune`."""
        from graphwright.surgery import prune

        return prune

    @late
    def diagnose(self):
        """Find defects of the program and its weights, and contradictions with the config; see `surgery.diagnose`."""
        from graphwright.surgery import diagnose

        return diagnose

    # -- files -------------------------------------------------------------------------------------------------------
    def export_plan(self, prefer: str = "class") -> ExportPlan:
        """Plan an export: which levels can carry the model, and why not; reads no payload, writes nothing."""
        from graphwright.models.export.ladder import Ladder

        return Ladder(self).plan(prefer)

    @late
    def export(self):
        """Write a checkpoint that transformers loads, with a receipt; see `graphwright.models.export.export.export`."""
        from graphwright.models.export.export import export

        return export

    save = save_model

    def _repr_html_(self) -> str:
        return f"<p><code>{escape(repr(self))}</code></p>{self.program._repr_html_()}"

    def __repr__(self) -> str:
        p = self.program
        return f"Model({self.arch.name}, {self.directory.name!r}, {len(p)} nodes, version {p.version})"
