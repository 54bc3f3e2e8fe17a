"""Model classes of transformers without a template: captured on the meta device, kept as skeletons in the user's cache.

The first opening of a class with a config imports torch and transformers and captures it; later ones read the skeleton.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphwright.array import DType
from graphwright.errors import GraphwrightError, MissingExtra
from graphwright.models.architectures import tasks
from graphwright.models.architectures.architecture import Architecture, Config, Join, Stack
from graphwright.models.architectures.tasks import LANGUAGE_MODEL
from graphwright.models.errors import CaptureError, UnsupportedArchitecture, UnsupportedOperator
from graphwright.models.importing.recover.later import reads_later
from graphwright.models.importing.report import Imported
from graphwright.models.importing.skeleton import Skeleton, load_skeleton, save_skeleton, skeleton_of
from graphwright.models.importing.tasks import hub_task
from graphwright.program.weights import is_abstract

if TYPE_CHECKING:
    from graphwright.program.program import Program

_NAMES = {"input_ids": "ids", "position_ids": "positions"}
"""Inputs of causal language models, by transformers' names and by those of every language model here."""


@dataclass(frozen=True, slots=True)
class ImportedDims:
    """What downstream asks of any model: vocabulary, layers, longest input, whether the head is the embedding."""

    vocab: int
    layers: int
    positions: int
    tied: bool


@dataclass(frozen=True, slots=True)
class ImportedArchitecture(Architecture):
    """A model class with one config, as its skeleton."""

    skeleton: Skeleton = field(kw_only=True)

    def weights(self, dims: Any) -> Iterator[tuple[str, str, tuple[int, ...], tuple[str, ...]]]:
        """Yield (path, checkpoint key, shape, sizes as text) of each tensor that the checkpoint has."""
        for path, spec in self.skeleton.stored.items():
            yield path, self.skeleton.facts["keys"][path], spec.sizes, tuple(map(str, spec.shape))

    def resized(self, config: Config, compute: str) -> tuple[Architecture, Any]:
        """Capture the class with another config; see `Architecture.resized`. Raises: CaptureError, MissingExtra."""
        found = imported(config, compute)
        assert found is not None
        return replace(found, joins=self.joins, stacks=self.stacks), found.read(config)

    def shapes(self, dims: Any) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor that the checkpoint has, by key."""
        return {self.skeleton.facts["keys"][path]: spec.sizes for path, spec in self.skeleton.stored.items()}

    def shapes_for(self, config: Config) -> dict[str, tuple[int, ...]] | None:
        """Make the class on the meta device; see `Architecture.shapes_for`."""
        import torch

        made = _class_of(config, False)
        try:
            with torch.device("meta"):
                state = made(_hub_config(config)).state_dict()
        except Exception:  # a class may refuse a config by any error
            return None
        return {path: tuple(tensor.shape) for path, tensor in state.items() if path in self.skeleton.stored}

    def known_fields(self, config: Config) -> Mapping[str, Any]:
        """Return the fields of a config, with transformers' defaults of the others."""
        return {**json.loads(_hub_config(config).to_json_string(use_diff=False)), **config.fields}


def imported(
    config: Config, compute: str, files: Collection[str] = (), *, trust_code: bool = False
) -> ImportedArchitecture | None:
    """Return the architecture of a class that transformers has, from the cache or by capturing it; None for others.

    `files` are the keys of the checkpoint, whose names may be those of an older version of the class.
    Raises: UnsupportedArchitecture for files whose tensors transformers rearranges in a way that no view of them has;
        MissingExtra without transformers; CaptureError, UnsupportedOperator.
    """
    folder = cache_folder() / _digest(config, compute, files)
    skeleton = load_skeleton(folder)
    if skeleton is None:
        made = _class_of(config, trust_code)
        if made is None:
            return None
        skeleton = _captured(made, config, compute, files)
        with suppress(OSError):  # a cache that cannot be written costs time only
            save_skeleton(skeleton, folder)
    facts = skeleton.facts
    dims, unread = ImportedDims(**facts["dims"]), facts["unread"]
    text = f"{len(unread)} tensors of the files are not read: {', '.join(unread[:3])}" + ", ..." * (len(unread) > 3)

    def build(b: Any, _: Any, params: Mapping[str, Any], kind: DType) -> None:
        skeleton.build(b, params, kind)

    return ImportedArchitecture(
        facts["model_type"], (facts["class"],), (), lambda _: dims, (), build, prefix="", ignored=("",),
        fields={}, notes=lambda _: (text,) * bool(unread), buffers=frozenset(facts["buffers"]), task=facts["task"],
        imported=Imported.from_json(facts["imported"]), skeleton=skeleton,
        joins=tuple(Join(key, tuple(parts)) for key, parts in facts["joins"].items()),
        stacks=tuple(Stack(key, tuple(parts)) for key, parts in facts["stacks"].items()),
    )  # fmt: skip


# -- the cache ---------------------------------------------------------------------------------------------------------
def cache_folder() -> Path:
    """Return the folder of captured classes: `graphwright/imports` in the user's cache."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "graphwright" / "imports"


@cache
def _sources() -> str:
    """Return a digest of the code that decides what a capture gives."""
    found = sha256()
    for path in (Path(tasks.__file__), *sorted(Path(__file__).parent.rglob("*.py"))):
        found.update(path.read_bytes())
    return found.hexdigest()


def _digest(config: Config, compute: str, files: Collection[str]) -> str:
    ignored = {"_name_or_path", "transformers_version"}
    fields = {name: value for name, value in config.fields.items() if name not in ignored}
    try:
        versions = [version(name) for name in ("torch", "transformers")]
    except ModuleNotFoundError as error:
        raise MissingExtra("hf", "model classes without a template") from error
    facts = [fields, compute, versions, _sources(), sorted(files)]
    return sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:32]


# -- capture -----------------------------------------------------------------------------------------------------------
def _captured(made: Any, config: Config, compute: str, files: Collection[str]) -> Skeleton:
    import torch

    name = made.__name__
    hub_config, task = _hub_config(config), hub_task(name)
    module, values = meta_module(made, hub_config, getattr(torch, compute), files)
    with _one_text_a_row(), _numbers_kept():
        p = _program(module, hub_config, task, values)
        if task == LANGUAGE_MODEL and reads_later(p):  # it cannot have learnt to predict them
            task = "masked-lm"
            p = _program(module, hub_config, task, values)
    p.name = config.path.parent.name
    state, report = module.state_dict(), p.imported
    assert report is not None
    constants = {p.key(n): p.weights.array(p.key(n)) for kind in ("const", "state") for n in p.of_kind(kind)
                 if p.key(n) not in state}  # fmt: skip
    dims = {
        "vocab": int(getattr(hub_config, "vocab_size", 0) or 0),
        "layers": int(getattr(hub_config, "num_hidden_layers", 0) or 0),
        "positions": int(getattr(hub_config, "max_position_embeddings", 0) or 0),
        "tied": bool(getattr(hub_config, "tie_word_embeddings", False)),
    }
    lost = sorted(key for key, array in constants.items() if is_abstract(array))
    if lost:
        raise UnsupportedArchitecture("buffers of the class have no value: no file has them, and its `_init_weights`"
                                      " does not write them", where=name, expected="a value", got=", ".join(lost[:5]),
                                      fix="make it with transformers, and use graphwright.from_torch")  # fmt: skip
    made_of, trained = skeleton_of(p, constants, {}), {p.key(n) for n in p.params()}
    form = file_form(module, files) if files else FileForm({key: key for key in state}, {}, {})
    keys = form.keys
    for key, others in tied_keys(module).items():
        if key in made_of.stored and key not in keys:
            keys[key] = next((keys[other] for other in others if other in keys), key)
    read = {keys.setdefault(key, key) for key in made_of.stored}
    read |= {key for key, parts in form.stacks.items() if read.intersection(parts)}
    read |= {part for key, (_, parts) in form.joined.items() if key in read for part in parts}
    facts = {"class": name, "model_type": config["model_type"], "task": task, "dims": dims,
             "buffers": [key for key in made_of.stored if key not in trained], "keys": keys,
             "joins": {key: list(names) for key, (names, _) in form.joined.items()}, "stacks": form.stacks,
             "unread": sorted(key for key in files if key not in read), "imported": report.to_json()}  # fmt: skip
    return replace(made_of, facts=facts)


_FIXED = (frozenset(), frozenset("N"), frozenset("HWTSLN"), frozenset("HWTSLNCB"))
"""Names of sizes that become numbers: those of the first try, and of others where the class's code has no graph.

`N` becomes `B` instead: a class that joins texts and images needs as many of them.
"""


def _program(module: Any, hub_config: Any, task: str, values: Mapping[str, Any]) -> Program:
    """Capture a module on the meta device, with as many named sizes as its code allows.

    Raises: CaptureError with the reason of the first try; UnsupportedOperator.
    """
    from graphwright.models.importing.torch_modules import program_of

    rename, errors, tried = _NAMES if task == LANGUAGE_MODEL else {}, list[Exception](), list[Any]()
    inputs: dict[str, Any] = {}
    for fixed in _FIXED:
        inputs, sizes, numbers = example_inputs(module, hub_config, task, fixed)
        if sizes in tried:
            continue
        tried.append(sizes)
        try:
            p = program_of(module, (), inputs, sizes=sizes, values=values, rename=rename)
        except UnsupportedOperator as error:
            error.where = type(module).__name__
            error.fix = f"{error.fix}; or, if these operators are not needed for other inputs, {_OWN_INPUTS}"
            raise
        except Exception as error:  # code of any class, for inputs that it may not be meant for
            errors = [error] if fixed == {"N"} else [*errors, error]
            continue
        assert isinstance(p.imported, Imported)
        why = {n: f"{size}: {_reason(errors[0])}" for n, size in numbers.items()}
        p.imported = replace(p.imported, fixed={**p.imported.fixed, **why})
        return p
    raise CaptureError("the class has no graph for these inputs", where=type(module).__name__,
                       expected=", ".join(f"{name}{list(t.shape)}" for name, t in inputs.items()),
                       got=_reason(errors[0]), fix=_OWN_INPUTS) from errors[0]  # fmt: skip


_OWN_INPUTS = "load it with transformers and capture it with your own inputs: gw.from_torch(module, (), {name: tensor})"


def _reason(error: Exception) -> str:
    """Return an error in one line: of those of torch, its own reason and the line of the class's code."""
    if not isinstance(error, GraphwrightError):
        return f"{type(error).__name__}: {error}".strip().partition("\n")[0][:300]
    where = f" ({error.where})" if error.where else ""
    return f"{error.got if isinstance(error, CaptureError) else error.what}{where}"


@contextmanager
def _one_text_a_row() -> Iterator[None]:
    """Context manager: keep transformers from deriving masks of several texts in a row from the positions."""
    from transformers import masking_utils

    before = masking_utils.find_packed_sequence_indices
    masking_utils.find_packed_sequence_indices = lambda position_ids: None
    try:
        yield
    finally:
        masking_utils.find_packed_sequence_indices = before


def _numbers_kept() -> Any:
    """Context manager: numbers that code makes tensors of keep their values, which the meta device would drop."""
    import torch
    from torch.overrides import TorchFunctionMode

    class Numbers(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            given = dict(kwargs or {})
            value = args[0] if args else given.get("data")
            if func is torch.tensor and isinstance(value, int | float):
                kind = given.get("dtype") or torch.tensor(value).dtype
                return torch.full((), value, dtype=kind, device=given.get("device"))
            if func is torch.Tensor.__getitem__ and isinstance(args[1], tuple):
                index = tuple(torch.tensor(i, device="cpu") if isinstance(i, list) else i for i in args[1])
                args = (args[0], index)
            return func(*args, **given)

    return Numbers()


def _hub_config(config: Config) -> Any:
    """Return transformers' config of the fields of a config."""
    import transformers

    return transformers.AutoConfig.for_model(config["model_type"], **_plain(config))


def _plain(config: Config) -> dict[str, Any]:
    """Return the fields of a config that its class takes, without what only names the files."""
    left_out = {
        "model_type",
        "architectures",
        "transformers_version",
        "auto_map",
        "_name_or_path",
        "torch_dtype",
        "dtype",
    }
    return {name: _numbers_of(value) for name, value in config.fields.items() if name not in left_out}


_NOT_FINITE = {"Infinity": float("inf"), "-Infinity": float("-inf"), "NaN": float("nan")}


def _numbers_of(value: Any) -> Any:
    """Return the value of a config's field, with numbers for objects such as `{"__float__": "Infinity"}`.

    transformers writes numbers that JSON does not have in this form. `Config` keeps it, so exports write it again.
    """
    if isinstance(value, list):
        return [_numbers_of(part) for part in value]
    if not isinstance(value, dict):
        return value
    number = _NOT_FINITE.get(str(value.get("__float__"))) if len(value) == 1 else None
    return {name: _numbers_of(part) for name, part in value.items()} if number is None else number


def _class_of(config: Config, trust_code: bool) -> Any:
    """Return the class that a config names; None if transformers does not have it, or has it for other configs."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtra("hf", "model classes without a template") from error
    classes = config.get("architectures") or []
    name = classes[0] if isinstance(classes, list) and classes and isinstance(classes[0], str) else ""
    known = getattr(transformers, name, None) if name.isidentifier() else None
    if known is None and trust_code and isinstance(config.get("auto_map"), Mapping):
        from transformers.dynamic_module_utils import get_class_from_dynamic_module

        path = next((v for k, v in config["auto_map"].items() if str(v).endswith(f".{name}")), None)
        if path is not None:
            known = get_class_from_dynamic_module(path, str(config.path.parent))
    fits = getattr(getattr(known, "config_class", None), "model_type", None) == config.get("model_type")
    return known if fits else None


@dataclass(frozen=True, slots=True)
class FileForm:
    """How the tensors of files become those of a module's state.

    Attributes:
        keys: keys of the state -> keys of the files, or of the weights that are joined or divided.
        joined: keys of weights that the files have as several tensors -> (names of these as in `Join`, their keys).
        stacks: keys of tensors that are several weights -> their keys, as in `Stack`.
    """

    keys: dict[str, str]
    joined: dict[str, tuple[tuple[str, ...], list[str]]]
    stacks: dict[str, list[str]]


def file_form(module: Any, files: Collection[str]) -> FileForm:
    """Return how tensors of files become those of a module, whose names in files may be those of an older version.

    Raises: UnsupportedArchitecture if transformers rearranges some of the files other than by joining rows.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    known = get_model_conversion_mapping(module)
    renamings = [t for t in known if isinstance(t, WeightRenaming)]
    converters = [t for t in known if isinstance(t, WeightConverter)]
    state, form = module.state_dict(), FileForm({}, {}, {})
    gathered: dict[str, dict[str, list[str]]] = {}  # key of the state -> pattern of a converter -> keys of files
    for key in sorted(files, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, module.base_model_prefix, state)
        if pattern is not None and name in state and key not in state:
            gathered.setdefault(name, {}).setdefault(pattern, []).append(key)
        else:
            form.keys.setdefault(name, key)
    for name, found in gathered.items():
        converter = next(c for c in converters if next(iter(found)) in c.source_patterns)
        parts = [found.get(pattern, []) for pattern in converter.source_patterns]
        kinds = [(type(op).__name__, getattr(op, "dim", None)) for op in converter.operations]
        merged, every = [("MergeModulelist", 0)], [*chain.from_iterable(parts)]
        if kinds in (merged, [*merged, ("Concatenate", 1)]) and (names := _numbered(parts)) is not None:
            form.keys[name], form.joined[name] = name, (names, every)
        elif kinds == [("Concatenate", 0)]:
            form.keys[name], form.joined[name] = name, (tuple(every), every)
        elif kinds in ([("Chunk", 0)], [("Split", 0)]) and len(parts) == len(parts[0]) == 1:
            first, *others = converter.target_patterns
            divided = [name, *(name.replace(first, other) for other in others)]
            form.stacks[parts[0][0]] = divided
            form.keys.update((key, key) for key in divided)
        else:
            raise UnsupportedArchitecture("transformers rearranges tensors of these files when it loads them",
                                          where=every[0], expected=name,
                                          got=", ".join(map(repr, converter.operations)),
                                          fix="load them with transformers and use graphwright.from_torch")  # fmt: skip
    return form


def _numbered(parts: list[list[str]]) -> tuple[str, ...] | None:
    """Return each list of keys as one with `{e}` for the numbers of experts; None if they differ in other words."""
    names = []
    for keys in parts:
        words = [key.split(".") for key in keys]
        at = [i for i, found in enumerate(zip(*words, strict=False)) if len(set(found)) > 1]
        if len(keys) == 1:  # of one expert
            at = [i for i, word in enumerate(words[0]) if word == "0"][-1:]
        if len(at) != 1 or len(set(map(len, words))) > 1 or not all(w[at[0]].isdecimal() for w in words):
            return None
        names.append(".".join([*words[0][: at[0]], "{e}", *words[0][at[0] + 1 :]]))
    return tuple(names)


def tied_keys(module: Any) -> dict[str, list[str]]:
    """Map the key of each tied parameter of a module to all of its keys; a file has only one of them."""
    found: dict[int, list[str]] = {}
    for key, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(key)
    return {key: keys for keys in found.values() if len(keys) > 1 for key in keys}


def meta_module(made: Any, hub_config: Any, dtype: Any, files: Collection[str] = ()) -> tuple[Any, dict[str, Any]]:
    """Make a module of a class on the meta device; return it and the values of buffers that no checkpoint has.

    Frozen parameters that these files need not have, and do not have, become such buffers.
    """
    import torch

    def make(attention: str) -> Any:
        hub_config._attn_implementation = attention
        before = torch.get_default_dtype()
        torch.set_default_dtype(dtype)  # as in `from_pretrained`: buffers that the class makes in a dtype keep it
        try:
            with torch.device("meta"):
                return made(hub_config).eval()
        finally:
            torch.set_default_dtype(before)

    hub_config.use_cache = False
    try:
        module = make("sdpa")
    except (ValueError, ImportError):  # the class has no such attention
        module = make("eager")
    module.to("meta")  # legacy constructors such as torch.FloatTensor ignore the device above
    module.tie_weights()
    for parameter in module.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(dtype)
    if dtype is not torch.float32:  # its inputs stay float32
        module.register_forward_pre_hook(_cast_inputs(dtype), with_kwargs=True)
    if files:
        _make_buffers(module, files)
    values: dict[str, Any] = {}
    for path, part in module.named_modules():
        names = [n for n, b in part._buffers.items() if b is not None and n in part._non_persistent_buffers_set]
        for name in names:
            like = part._buffers[name]
            part._buffers[name] = torch.full(like.shape, _unwritten(like), dtype=like.dtype, device="cpu")
        if names:
            with torch.no_grad():
                _initialise(module, path, part, names)
        for name in names:
            made = part._buffers[name]
            part._buffers[name] = made.to("meta")
            if _is_written(made):
                values[f"{path}.{name}" if path else name] = made
    return module, values


def _make_buffers(module: Any, files: Collection[str]) -> None:
    """Turn frozen parameters that files need not have, and do not have, into buffers that the class initialises."""
    optional = [re.compile(p) for p in getattr(module, "_keys_to_ignore_on_load_missing", None) or ()]
    for path, part in module.named_modules():
        for name, parameter in list(part._parameters.items()):
            key = f"{path}.{name}" if path else name
            if parameter is None or parameter.requires_grad or key in files:
                continue
            if any(pattern.search(key) for pattern in optional):
                del part._parameters[name]
                part.register_buffer(name, parameter.data, persistent=False)


def _initialise(module: Any, path: str, part: Any, names: Collection[str]) -> None:
    """Run the initialisation of the innermost model of transformers around a part, as `from_pretrained` does.

    It is that of the part, and, while some of these buffers of it are unwritten, of the modules around it.
    """
    around = [module.get_submodule(path.rsplit(".", up)[0]) if up else part for up in range(path.count(".") + 1)]
    own = next((m for m in around if hasattr(m, "_init_weights")), module)
    for one in around:
        own._init_weights(one)
        if all(_is_written(part._buffers[name]) for name in names):
            return


def _is_written(buffer: Any) -> bool:
    """Return whether the initialisation of a buffer wrote its values; True for bools, of which that is not known."""
    import torch

    untouched = buffer.isnan() if buffer.is_floating_point() else buffer == _unwritten(buffer)
    return buffer.dtype is torch.bool or not buffer.numel() or not bool(untouched.all())


def _unwritten(buffer: Any) -> Any:
    """Return a number that the initialisation of a buffer would not write."""
    return float("nan") if buffer.is_floating_point() else 119 if buffer.dtype.itemsize == 1 else -12345


def _cast_inputs(dtype: Any) -> Any:
    """Return the hook of a module that casts its floating inputs."""

    def cast(module: Any, args: Any, kwargs: Any) -> Any:
        return args, {k: v.to(dtype) if getattr(v, "is_floating_point", bool)() else v for k, v in kwargs.items()}

    return cast


def example_inputs(
    module: Any, hub_config: Any, task: str, fixed: Collection[str] = ()
) -> tuple[dict[str, Any], dict[str, tuple[Any, ...]], dict[str, int]]:
    """Return example inputs of a module, on the meta device, their shapes with named sizes, and those of `fixed`.

    `N`, the number of texts beside `B` images, is another name for `B` if it is fixed. Raises: CaptureError for a class
    whose inputs have no known shapes.
    """
    import inspect

    import torch

    accepted = inspect.signature(module.forward).parameters
    main = getattr(module, "main_input_name", "input_ids")
    shapes = _input_shapes(module, hub_config, task, main if isinstance(main, str) else main[0], accepted)
    needed = [n for n, p in accepted.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]
    if unknown := [name for name in needed if name not in shapes]:
        raise CaptureError("no shape is known for inputs that the class needs", where=type(module).__name__,
                           expected=f"only inputs such as {', '.join(_KINDS)}", got=", ".join(unknown),
                           fix=_OWN_INPUTS)  # fmt: skip
    numbers = {"B": 3, "T": 13, "S": 7, "N": 5, "C": 2, "L": 16_007, "H": 64, "W": 96}
    whole = {name: 224 if name in "HW" else n for name, n in numbers.items() if name in fixed}
    inputs, named, used = {}, dict[str, tuple[Any, ...]](), dict[str, int]()
    for name, shape in shapes.items():
        if "N" in fixed:
            shape = tuple("B" if n == "N" else n for n in shape)
        sizes = [{**numbers, **whole}[n] if isinstance(n, str) else int(n) for n in shape]
        inputs[name] = torch.empty(sizes, dtype=getattr(torch, _KINDS[name]), device="meta")
        named[name] = tuple(whole.get(n, n) if isinstance(n, str) else n for n in shape)
        used |= {n: whole[n] for n in shape if n in whole}
    return inputs, {name: shape for name, shape in named.items() if any(isinstance(n, str) for n in shape)}, used


_KINDS = {"input_ids": "int64", "attention_mask": "int64", "position_ids": "int64", "decoder_input_ids": "int64",
          "pixel_values": "float32", "input_features": "float32", "input_values": "float32", "past_values": "float32",
          "past_time_features": "float32", "past_observed_mask": "float32"}  # fmt: skip
"""Inputs that have known shapes -> dtype of their examples."""


def _input_shapes(
    module: Any, hub_config: Any, task: str, main: str, accepted: Collection[str]
) -> dict[str, tuple[Any, ...]]:
    """Return the shapes of a module's inputs, with named sizes."""
    wide = getattr(hub_config, "vision_config", hub_config)
    shapes: dict[str, tuple[Any, ...]] = {}
    if main == "pixel_values" or ("pixel_values" in accepted and _reads_images_apart(module, hub_config)):
        size = getattr(wide, "image_size", ("H", "W"))
        height, width = (size, size) if isinstance(size, int) else tuple(size)
        frames = (wide.num_frames,) if hasattr(wide, "num_frames") else ()
        shapes["pixel_values"] = ("B", *frames, getattr(wide, "num_channels", 3), height, width)
        if "input_ids" in accepted and (main == "input_ids" or hasattr(hub_config, "text_config")):
            shapes["input_ids"] = ("N", "T")
            if "attention_mask" in accepted:
                shapes["attention_mask"] = ("N", "T")
    elif main == "input_features":
        shapes["input_features"] = ("B", hub_config.num_mel_bins, 2 * hub_config.max_source_positions)
    elif main == "input_values" and hasattr(hub_config, "num_mel_bins") and hasattr(hub_config, "max_length"):
        shapes["input_values"] = ("B", hub_config.max_length, hub_config.num_mel_bins)
    elif main == "input_values":
        channels = (hub_config.audio_channels,) if hasattr(hub_config, "audio_channels") else ()
        shapes["input_values"] = ("B", *channels, "L")
    elif main == "past_values":
        length = hub_config.context_length + max(getattr(hub_config, "lags_sequence", None) or [0])
        channels = getattr(hub_config, "num_input_channels", getattr(hub_config, "input_size", 1))
        several = hasattr(hub_config, "num_input_channels") or channels > 1
        shapes["past_values"] = values = ("B", length, channels) if several else ("B", length)
        if "past_time_features" in accepted:
            shapes["past_time_features"] = ("B", length, hub_config.num_time_features)
            shapes["past_observed_mask"] = values
    else:
        choices = ("C",) if task == "multiple-choice" else ()
        shapes["input_ids"] = ("B", *choices, "T")
        if task == LANGUAGE_MODEL and "position_ids" in accepted:
            shapes["position_ids"] = ("B", "T")
        elif task != LANGUAGE_MODEL and "attention_mask" in accepted:
            shapes["attention_mask"] = ("B", *choices, "T")
    if getattr(hub_config, "is_encoder_decoder", False) and "decoder_input_ids" in accepted:
        shapes["decoder_input_ids"] = ("B", "S")
    return shapes


def _reads_images_apart(module: Any, hub_config: Any) -> bool:
    """Return whether a module reads images beside its text: no tokens of the text stand for them."""
    kinds = getattr(module, "input_modalities", ())
    tokens = ("image_token_id", "image_token_index")
    return "image" in kinds and all(getattr(hub_config, name, None) is None for name in tokens)
