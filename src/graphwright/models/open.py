"""Open, create, inspect and compare models. Opening reads no weight byte; weights stay mapped until they are used."""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from graphwright.arguments import checked
from graphwright.array import CPU, Device, NDArray, backend, from_numpy, random
from graphwright.array import dtype as array_dtype
from graphwright.autograd import Parameter
from graphwright.errors import MissingExtra, UsageError
from graphwright.files import read_whole
from graphwright.models.architectures.architecture import Architecture, Config, read_object
from graphwright.models.architectures.registry import find
from graphwright.models.errors import ConfigError, ModelNotFound, UnsupportedArchitecture
from graphwright.models.generation.text import UNBOUNDED, vocabulary
from graphwright.models.inspect import Inspection, inspect_files
from graphwright.models.loading import build, match_keys
from graphwright.models.metrics import drift
from graphwright.models.model import Model
from graphwright.models.stacks import divide
from graphwright.models.tokenizer import (
    AutoTokenizer,
    ByteTokenizer,
    Tokenizer,
    check_size,
    find_tokenizer,
    need_tokenizer,
    special_ids,
)
from graphwright.program.builder import Builder
from graphwright.program.diff import ProgramDiff
from graphwright.program.files.load import load
from graphwright.program.program import Program
from graphwright.report import Report
from graphwright.safetensors import Checkpoint


@checked
def open(
    path: str | os.PathLike[str], *, dtype: str = "keep", compute: str = "float32", tokenizer: bool = True,
    arch: Architecture | None = None, check: bool = True, trust_code: bool = False, device: Device | str = CPU,
) -> Model:  # fmt: skip
    """Open a Hugging Face directory (or a .safetensors file beside its config.json) as an editable model.

    Args:
        path: the directory, or `bundled` for the small model inside the package; `./bundled` is a directory.
        dtype: `keep` keeps weights in the dtype of the file; a dtype name converts them now, which reads them.
        compute: dtype of activations. bfloat16 and float16 weights widen exactly to float32.
        tokenizer: load the tokenizer, if there is one.
        arch: the family; by default the one that the config names.
        check: False opens a saved model with a broken program, for repair.
        trust_code: run modeling code of the directory (`auto_map`), if transformers does not have the class.
        device: where the model runs, see `Model.to`.
    Raises: DeviceUnavailable; ModelNotFound, ConfigError, UnsupportedArchitecture, TensorMismatch listing every tensor
        that does not fit, UnsupportedDType, UsageError for a dtype that is not floating, HeaderError and other errors
        of `graphwright.safetensors`; all before the first payload byte is read.
    """
    there = Device.parse(device)
    if there != CPU:  # whose backend would load torch
        backend(there)
    for name, wanted in ({"compute": compute} | ({} if dtype == "keep" else {"dtype": dtype})).items():
        if not array_dtype(wanted).is_float:
            expected = "float32, bfloat16, ..."
            raise UsageError(f"{name} is not a floating dtype", where=name, expected=expected, got=wanted)
    source = resolve(path)
    directory = source if source.is_dir() else source.parent
    read = lambda: _open(source, directory, dtype, compute, tokenizer, arch, check, trust_code)  # noqa: E731
    return read_whole(directory, read).to(there)


def _open(
    source: Path,
    directory: Path,
    dtype: str,
    compute: str,
    tokenizer: bool,
    arch: Architecture | None,
    check: bool,
    trust_code: bool,
) -> Model:
    if is_saved(directory):
        return _open_saved(directory, tokenizer, check)
    config = Config.read(directory)
    checkpoint = Checkpoint(source)
    family = family_of(config, compute, tuple(checkpoint), trust_code) if arch is None else arch
    dims = family.read(config)
    checkpoint = divide(checkpoint, family, dims)
    keys = match_keys(family, dims, checkpoint, config)
    program = build(family, dims, keys, checkpoint, dtype, compute, directory.name)
    found = find_tokenizer(directory, config, dims.vocab) if tokenizer else None
    notes = ["config.json names modeling code (auto_map); it is not run"] if config.get("auto_map") else []
    notes += family.notes(config) if family.notes is not None else ()
    if found is not None and not isinstance(found, AutoTokenizer) and found.size < dims.vocab:
        notes.append(f"{dims.vocab - found.size} rows of the embedding have no token: padding")
    ends = special_ids(directory, config)[1]
    if ends and min(ends) >= dims.vocab:
        notes.append(f"eos_token_id {', '.join(map(str, ends))} is outside the vocabulary: no text ends by itself")
    return Model(program, family, dims, config, checkpoint, directory, keys, found, compute, dtype, notes)


def family_of(config: Config, compute: str, files: Collection[str] = (), trust_code: bool = False) -> Architecture:
    """Return the template of a config, else the imported class of transformers; `files` are keys of the checkpoint.

    Raises: UnsupportedArchitecture if there is neither; CaptureError, UnsupportedOperator.
    """
    try:
        return find(config)
    except UnsupportedArchitecture as unknown:
        from graphwright.models.importing.hub import imported

        if str(config.get("model_type")).startswith("graphwright-"):
            raise
        try:
            found = imported(config, compute, files, trust_code=trust_code)
        except MissingExtra:
            raise unknown from None
        if found is None:
            raise
        return found


FACTS = "model.json"
"""File of a saved model beside its program: its checkpoint keys and its dtype of activations."""


def is_saved(directory: Path) -> bool:
    """Return True for a directory that `Model.save` or `Program.save` wrote."""
    return (directory / "program.json").is_file()


def open_any(path: str | os.PathLike[str], *, check: bool = True) -> Model | Program:
    """Open a model, or a saved program that is not a model; of the directory of an evolution, open the champion.

    `check` and errors are those of `open` and `graphwright.program.load`.
    """
    directory = resolve(path)
    champion = directory / "champion"
    if not is_saved(directory) and is_saved(champion):
        directory = champion
    if is_saved(directory) and not (directory / FACTS).is_file():
        return load(directory, check)
    return open(directory, check=check)


def _open_saved(directory: Path, tokenizer: bool, check: bool) -> Model:
    """Open a directory that `Model.save` wrote. Raises: ProgramFileError, ConfigError, InvalidProgram if `check`."""
    if not (directory / FACTS).is_file():
        what, fix = "this is a saved program, not a language model", "graphwright.program.load(path) opens it"
        raise ModelNotFound(what, where=str(directory), expected=f"{FACTS} beside program.json", fix=fix)
    config = Config.read(directory)
    facts, path = read_object(directory / FACTS, 64 << 20, nesting=8), str(directory / FACTS)
    keys, compute, known = facts.get("keys"), facts.get("compute"), ("float32", "float64", "bfloat16", "float16")
    if facts.get("schema") != 1:
        raise ConfigError("model.json has an unsupported schema", where=path, expected=1, got=facts.get("schema"))
    if not isinstance(keys, dict) or not all(isinstance(k, str) for k in keys.values()):
        raise ConfigError("model.json is damaged: `keys` does not map param paths to checkpoint keys", where=path)
    if compute not in known:
        what = "model.json is damaged: `compute` is not a dtype of activations"
        raise ConfigError(what, where=path, expected=" or ".join(known), got=compute)
    family = family_of(config, compute)
    dims = family.read(config)
    program = load(directory, check)
    rows = max([dims.vocab, *(n for n in [vocabulary(program)] if n != UNBOUNDED)])  # an undo may restore the config's
    found = find_tokenizer(directory, config, rows) if tokenizer else None
    return Model(program, family, dims, config, None, directory, keys, found, compute)


def resolve(path: str | os.PathLike[str]) -> Path:
    """Return the path of a model; the name `bundled` stands for the model inside the package.

    Raises: ModelNotFound if the path does not exist or is another kind of file; UsageError if the argument is not a
        path, or is `bundled` while the working directory contains a path of that name.
    """
    if not isinstance(path, str | os.PathLike) or "\0" in os.fspath(path):
        raise UsageError("the argument is not a path to a model", expected="a directory, or 'bundled'", got=path)
    if os.fspath(path) == "bundled":
        from graphwright.models.bundled import bundled

        if os.path.lexists("bundled"):
            fix = f"'./bundled' or {os.path.abspath('bundled')} for the path, {bundled()} for the model"
            raise UsageError("`bundled` is both a path here and the name of the model in the package", where="path",
                             expected="a path, or a working directory without `bundled`", got="bundled",
                             fix=fix)  # fmt: skip
        return bundled()
    source = Path(path)
    if not source.exists():
        raise ModelNotFound("no such path", where=str(source), fix="give a local directory; nothing is downloaded")
    if not source.is_dir() and not (source.is_file() and source.suffix == ".safetensors"):
        fix = f"give its directory, {source.parent}" if source.suffix == ".json" else None
        expected = "a directory, or a .safetensors file beside its config.json"
        kind = "file" if source.is_file() else "pipe or device"
        raise ModelNotFound(f"this {kind} is not a model", where=str(source), expected=expected, fix=fix)
    return source


def create(config: Config, *, seed: int = 0, compute: str = "float32", tokenizer: Tokenizer | None = None) -> Model:
    """Create a model of a config's family with random float32 weights.

    Matrices are N(0, `initializer_range`²), norms scale by 1 and biases are 0. Each weight draws from the Philox stream
    of its name.
    Without `tokenizer`, a model of 256 tokens gets the byte tokenizer.
    Raises: ConfigError, UnsupportedArchitecture; TokenizerMismatch for a tokenizer with more tokens than `vocab_size`.
    """
    family = find(config)
    dims = family.read(config)
    if tokenizer is not None:
        check_size(tokenizer.size, dims.vocab, config.path)
    std = config.number("initializer_range", 0.02)
    b = Builder(config.path.parent.name)
    params, keys, norm = {}, {}, 0.0 if getattr(dims, "norm", "") == "rms_offset" else 1.0
    for path, key, shape, _ in family.weights(dims):
        params[path] = b.param(path, Parameter(_initial(path, shape, std, seed, norm), True, key), key=key)
        keys[path] = key
    family.build(b, dims, params, array_dtype(compute))
    if tokenizer is None and dims.vocab == 256:
        tokenizer = ByteTokenizer()
    return Model(b.build(), family, dims, config, None, config.path.parent, keys, tokenizer, compute)


def _initial(path: str, shape: tuple[int, ...], std: float, seed: int, norm: float) -> NDArray:
    if path.endswith(".bias"):
        return from_numpy(np.zeros(shape, np.float32))
    if len(shape) == 1:
        return from_numpy(np.full(shape, norm, np.float32))
    values = random.normal(int(np.prod(shape)), seed=seed, stream=random.stream_of(path)).reshape(shape)
    return from_numpy(values * np.float32(std))


def config_from(fields: dict, path: str | Path = "config.json") -> Config:
    """Return a config with the given fields; `path` is the file that its errors name, which need not exist."""
    return Config(fields, (json.dumps(fields, indent=2) + "\n").encode(), Path(path))


def inspect_path(path: str | os.PathLike[str]) -> Inspection:
    """Inspect the model at a path; if no architecture describes its class, report what the headers contain."""
    try:
        return open(path, tokenizer=False).inspect()
    except UnsupportedArchitecture as error:
        source = resolve(path)
        config = Config.read(source if source.is_dir() else source.parent)
        return inspect_files(Checkpoint(source), config.path.parent.name, f"unknown class {error.got}")


@dataclass(frozen=True, slots=True, repr=False)
class ModelDiff(Report):
    """Differences of two models.

    `config` maps each field that differs to [left, right], with None if it is absent; `logits` is the drift of the
    logits on a text, if one was given.
    """

    config: dict[str, list[Any]]
    program: ProgramDiff
    logits: dict[str, float] = field(default_factory=dict)
    FIGURES: ClassVar = ("identical",)

    @property
    def identical(self) -> bool:
        """True if nothing differs."""
        return not self.config and self.program.identical

    def _text(self) -> str:
        lines = [f"config {name}: {a} -> {b}" for name, (a, b) in self.config.items()]
        lines.append("structure and weights are equal" if self.program.identical else str(self.program))
        if self.logits:
            moved, nats, top1 = (self.logits[n] for n in ("max_abs_dlogits", "mean_kl_nats", "top1_agreement"))
            lines.append(f"logits differ by up to {moved:.4g}, KL {nats:.4g} nats, top-1 equal {100 * top1:.1f} %")
        return "\n".join(lines)


def compare_models(left: str | Path | Model, right: str | Path | Model, *, text: str | None = None) -> ModelDiff:
    """Compare two models, or what two directories contain; also logits on a `text`, encoded by the left model.

    Saved programs that are not models are compared by structure and weights. Raises: UsageError for a text with one.
    """
    a, b = (open_any(m) if isinstance(m, str | Path) else m for m in (left, right))
    if not (isinstance(a, Model) and isinstance(b, Model)):
        if text is not None:
            raise UsageError("a text can only be compared on two language models", where="text",
                             fix="leave it out: structure and weights are compared")  # fmt: skip
        p, q = (m.program if isinstance(m, Model) else m for m in (a, b))
        return ModelDiff({}, q.diff(p))
    fields = sorted((a.config.keys() | b.config.keys()) - {"_name_or_path", "transformers_version"})
    config = {f: [a.config.get(f), b.config.get(f)] for f in fields if a.config.get(f) != b.config.get(f)}
    logits: dict[str, float] = {}
    if text is not None:
        ids = np.asarray(need_tokenizer(a).encode(text), np.int64)
        logits = drift([a.logits(ids)], [b.logits(ids)])
    return ModelDiff(config, b.program.diff(a.program), logits)
