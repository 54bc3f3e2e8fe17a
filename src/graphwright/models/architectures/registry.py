"""The registry of model families: those of this package, those of plugins, and those that a program registers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches

from graphwright.arguments import checked
from graphwright.errors import UsageError
from graphwright.models.architectures.albert import ALBERT
from graphwright.models.architectures.architecture import Architecture, Config
from graphwright.models.architectures.bert import BERT, ROBERTA, XLM_ROBERTA
from graphwright.models.architectures.clip import CLIP_VISION, SIGLIP_VISION
from graphwright.models.architectures.dinov2 import DINOV2
from graphwright.models.architectures.distilbert import DISTILBERT
from graphwright.models.architectures.families import FAMILIES
from graphwright.models.architectures.gemma import GEMMA_FAMILIES
from graphwright.models.architectures.gpt2 import GPT2
from graphwright.models.architectures.modernbert import MODERNBERT
from graphwright.models.architectures.moe_families import MOE_FAMILIES
from graphwright.models.architectures.olmo import OLMO2, OLMO3
from graphwright.models.architectures.phi3 import PHI3
from graphwright.models.architectures.vit import VIT
from graphwright.models.errors import UnsupportedArchitecture
from graphwright.plugins import load_plugins

_DECODERS = (*FAMILIES, *GEMMA_FAMILIES, PHI3, OLMO2, OLMO3, GPT2, *MOE_FAMILIES)
_ENCODERS = (*BERT, *ROBERTA, *XLM_ROBERTA, *DISTILBERT, *ALBERT, *MODERNBERT, *VIT, *DINOV2, *CLIP_VISION,
             *SIGLIP_VISION)  # fmt: skip
_registry = {name: arch for arch in (*_DECODERS, *_ENCODERS) for name in (*arch.classes, *arch.model_types)}


@checked
def register(arch: Architecture) -> Architecture:
    """Add a family. Raises: UsageError if another family has one of its classes or model types."""
    for name in (*arch.classes, *arch.model_types):
        other = _registry.get(name)
        if other is not None and other is not arch:
            what = f"this class or model type already belongs to the architecture {other.name!r}"
            raise UsageError(what, where=name, got=f"the architecture {arch.name!r}, which has it too")
    for name in (*arch.classes, *arch.model_types):
        _registry[name] = arch
    return arch


def architectures() -> Mapping[str, Architecture]:
    """Map each class name and model type to its family; the first call loads plugins (entry points)."""
    load_plugins("graphwright.architectures", register)
    return _registry


def find(config: Config) -> Architecture:
    """Find the family of a config. Raises: UnsupportedArchitecture naming likely misspellings, else all families."""
    known = architectures()
    classes = [] if config.get("architectures") is None else config["architectures"]
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise config.invalid("architectures", "a list of class names", classes)
    wanted = classes or [str(config.get("model_type"))]
    for name in wanted:
        if name in known:
            return known[name]
    near = _similar(wanted[0], known)
    fix = "add it with graphwright.models.register(Architecture(...)); `graphwright inspect` works without it"
    if str(config.get("model_type")).startswith("graphwright-"):
        fix = "this is an export with generated code, for transformers; to edit further, open a directory of model.save"
    raise UnsupportedArchitecture("no registered architecture describes this class", where=str(config.path),
                                  got=wanted[0],
                                  expected=", ".join(near) or ", ".join(sorted({a.name for a in known.values()})),
                                  fix=fix)  # fmt: skip


def _similar(wanted: str, known: Mapping[str, Architecture]) -> list[str]:
    """Return up to three classes or model types whose name before the task (`ForCausalLM`) is almost `wanted`'s."""
    stems = {name: _TASK.split(name)[0].lower() for name in (wanted, *known)}
    close = get_close_matches(stems.pop(wanted), stems.values(), 3, 0.85)
    return get_close_matches(wanted, [name for name, stem in stems.items() if stem in close], 3, 0.5)


_TASK = re.compile("For[A-Z]|LMHead|Model")
