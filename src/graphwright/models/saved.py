"""Saved models: program and journal, with config, tokenizer and `model.json` beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphwright.files import JsonError, StrPath, UnreadableFile, read_json
from graphwright.models.errors import ConfigError
from graphwright.models.export.write import companion_files
from graphwright.models.tokenizer import byte_tokenizer_json

if TYPE_CHECKING:
    from graphwright.models.model import Model

FACTS = "model.json"
_COMPUTE = ("float32", "float64", "bfloat16", "float16")


def save_model(model: Model, directory: StrPath, *, history: Any = "full", overwrite: bool = False) -> Path:
    """Save a model so that `gw.open` can continue it: structure, weights, journal and undo, config, tokenizer.

    Raises: as `Program.save`; an existing directory then stays as it was.
    """
    files = {"config.json": model.config.raw}
    facts = {"schema": 1, "keys": model.keys, "compute": model.compute, "source": model.directory.name}
    files[FACTS] = (json.dumps(facts, indent=1) + "\n").encode()
    for file in companion_files(model.directory):
        files.setdefault(file.name, file.read_bytes())
    if model.checkpoint is None and model.tokenizer is not None and model.tokenizer.size == 256:
        files.setdefault("tokenizer.json", byte_tokenizer_json().encode())
    model.program.save(directory, history=history, overwrite=overwrite, companions=files)
    return Path(directory)


def is_saved(directory: Path) -> bool:
    """True for a directory that `save_model` wrote."""
    return (directory / "program.json").is_file()


def read_facts(directory: Path) -> dict[str, Any]:
    """Read and check `model.json`. Raises: ConfigError."""
    path = directory / FACTS
    try:
        facts = read_json(path, 64 << 20)
    except (JsonError, UnreadableFile) as error:
        raise ConfigError("model.json cannot be read", where=str(path), got=str(error)) from error
    keys = facts.get("keys") if isinstance(facts, dict) else None
    if not isinstance(keys, dict) or facts.get("schema") != 1:
        got = facts.get("schema") if isinstance(facts, dict) else type(facts).__name__
        raise ConfigError("model.json has another schema", where=str(path), expected=1, got=got)
    if not all(isinstance(k, str) for k in keys.values()) or facts.get("compute") not in _COMPUTE:
        raise ConfigError("model.json is damaged", where=str(path), expected=f"compute {' or '.join(_COMPUTE)}",
                          got=facts.get("compute"))  # fmt: skip
    return facts
