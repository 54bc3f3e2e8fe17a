"""Rung 4: classes of transformers that have sizes per layer, as data; one is used only if all its shapes fit.

No class of transformers up to 5.23 has sizes per layer and is the function of a llama, mistral or qwen checkpoint, so
that the table that comes with the package is empty. Any config takes a `per_layer_config` there, but the classes of
these families refuse to be built from one; those that read it, or a list of sizes, are other functions (Gemma 3n and 4,
Laguna, Step 3.7), and OpenELM and DeciLM bring code of their own. `add_host` enters a class.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.models.export.template_reader import shape_of
from graphwright.models.export.uniform import Reason
from graphwright.models.export.write import write_model
from graphwright.program import Value

if TYPE_CHECKING:
    from graphwright.models.export.template_reader import TemplateBranch, TemplateMatch
    from graphwright.models.model import Model

LAST_LOOKED_AT = "5.23"
"""The latest transformers that was searched for hosts."""


@dataclass(frozen=True, slots=True)
class Host:
    """A class with sizes per layer.

    Attributes:
        family: name of the architecture whose programs it can carry.
        classes: its config class and model class, each `module:Class`.
        versions: of transformers: from this one (included), up to this one (left out); None for no end.
        config: config of the source, and for each layer dimension name -> size (0 for a branch that is gone) -> fields
            of the host's config.
        key: path of a weight -> its key in the host.
    """

    family: str
    classes: tuple[str, str]
    versions: tuple[str, str | None]
    config: Callable[[Mapping[str, Any], list[Mapping[str, int]]], dict[str, Any]]
    key: Callable[[str], str]


@dataclass(frozen=True, slots=True)
class Hosted:
    """A host that fits.

    Attributes:
        host: it.
        fields: of its config.
        keys: path of a weight -> its key in the host.
    """

    host: Host
    fields: dict[str, Any]
    keys: dict[str, str]


HOSTS: list[Host] = []


def add_host(host: Host) -> Host:
    """Enter a class into the table. Raises: UsageError for one that stands there."""
    if any(h.family == host.family and h.classes == host.classes for h in HOSTS):
        raise UsageError("this host is in the table", where=host.classes[1])
    HOSTS.append(host)
    return host


def find_host(model: Model, reading: TemplateMatch) -> Hosted | list[Reason]:
    """The first host whose shapes are those of the program, or why none is."""
    family = model.arch.name
    known = [h for h in HOSTS if h.family == family]
    if not known:
        why = f"transformers has no class with sizes per layer for {family} (searched up to {LAST_LOOKED_AT})"
        return [Reason("", why)]
    if reading.unread:
        return [Reason(reading.program.path(n), why) for n, why in reading.unread.items()]
    reasons: list[Reason] = []
    for host in known:
        found = _fitted(model, reading, host)
        if isinstance(found, Hosted):
            return found
        reasons += found
    return reasons


def _fitted(model: Model, reading: TemplateMatch, host: Host) -> Hosted | list[Reason]:
    name = host.classes[1]
    if (why := _unusable(host)) is not None:
        return [Reason("", f"{name}: {why}")]
    sizes: dict[int, dict[str, int]] = {}
    for i, slot in enumerate(reading.slots):
        known = reading.sizes.get(i) or dict.fromkeys(_names(model, slot), 0)
        sizes.setdefault(slot.layer or 0, {}).update(known)
    fields = host.config(model.config.fields, [sizes[n] for n in sorted(sizes)])
    shapes = host_shapes(host, fields)
    weights = {path: bound for part in reading.read_parts() for path, bound in part.weights.items()}
    p = reading.program
    if computed := [p.path(b if isinstance(b, Value) else b.end) for path, b in weights.items()
                    if not isinstance(b, Value) or p.path(b) != path]:  # fmt: skip
        return [Reason(path, f"{name}: has no place for a weight that is computed") for path in computed]
    if tables := [p.path(part.key_head) for part in reading.read_parts() if part.key_head is not None]:
        return [Reason(path, f"{name}: has no place for a table of key heads") for path in tables]
    terms = {path: dims for path, _, _, dims in model.arch.weights(model.dims)}
    here = {host.key(path): shape_of(reading.program, b, len(terms[path])) for path, b in weights.items()}
    wrong = [
        Reason(key, f"{name}: {list(shapes[key]) if key in shapes else 'nothing'} instead of "
                    f"{list(here[key]) if key in here else 'nothing'}")
        for key in dict.fromkeys([*here, *shapes])
        if here.get(key) != shapes.get(key)
    ]  # fmt: skip
    return wrong or Hosted(host, fields, {path: host.key(path) for path in weights})


def _names(model: Model, slot: TemplateBranch) -> set[str]:
    """Dimensions that the weights of a branch have."""
    terms = (dims for path, _, _, dims in model.arch.weights(model.dims) if path.startswith(f"{slot.name}."))
    return {t.partition("*")[0] for dims in terms for t in dims} - {"hidden"}


def _unusable(host: Host) -> str | None:
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        return "transformers is not installed"
    low, high = host.versions
    if _numbers(installed) < _numbers(low) or (high is not None and _numbers(installed) >= _numbers(high)):
        return f"is for transformers {low} to {high or 'the latest'}, and {installed} is installed"
    return None


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:3] if part.isdigit())


def host_shapes(host: Host, fields: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Key -> shape of a host built on the meta device: no weight is made."""
    from graphwright.array.torch_module import on_meta

    parts = (name.partition(":") for name in host.classes)
    config_class, model_class = (getattr(import_module(module), name) for module, _, name in parts)
    with on_meta():
        model = model_class(config_class(**fields))
    return {key: tuple(value.shape) for key, value in model.state_dict().items()}


def write_hosted(
    model: Model, hosted: Hosted, place: Path, *, dtype: str = "keep", max_shard_size: int | str | None = None
) -> None:
    """The program's weights under the host's keys, and its config."""
    p = model.program.fork()
    with p.edit("keys of the host") as e:
        for node in p.params():
            if (path := p.path(node)) in hosted.keys and p.key(node) != hosted.keys[path]:
                e.rename(node, path, key=hosted.keys[path])
    fields = {**hosted.fields, "architectures": [hosted.host.classes[1].partition(":")[2]]}
    config = (json.dumps(fields, indent=2) + "\n").encode()
    write_model(
        model.with_program(p),
        place,
        dtype=dtype,
        max_shard_size=max_shard_size,
        config=config,
        only=hosted.keys.values(),
    )
