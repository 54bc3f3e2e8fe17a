"""config.json: fields read with type and range checks; unchanged files are written back byte for byte."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from graphwright.files import JsonError, read_json
from graphwright.models.errors import ConfigError, ModelNotFound

_LIMIT = 8 << 20
LARGEST = sys.float_info.max  # JSON integers are unbounded; larger ones have no float


class Config(Mapping[str, Any]):
    """The fields of a config.json.

    Attributes:
        path: the file.
        raw: its bytes, written back if no field changed.
    """

    def __init__(self, fields: Mapping[str, Any], raw: bytes, path: Path) -> None:
        self.fields, self.raw, self.path = dict(fields), raw, path

    @staticmethod
    def read(directory: Path, name: str = "config.json") -> Config:
        """Read a config. Raises: ModelNotFound without a config.json; ConfigError if it is not a JSON object."""
        path = directory / name
        if not path.is_file():
            raise ModelNotFound(
                f"no {name} here", where=str(directory), fix="give the directory that save_pretrained wrote"
            )
        try:
            fields = read_json(path, _LIMIT, nesting=16)
        except (JsonError, OSError) as error:
            got = str(error)
            if isinstance(error, JsonError):
                got = error.what if error.got is None else f"{error.what}: {error.got}"
            raise ConfigError("config.json cannot be read", where=str(path), got=got) from error
        if not isinstance(fields, dict):
            raise ConfigError("config.json is not an object", where=str(path), got=type(fields).__name__)
        return Config(fields, path.read_bytes(), path)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self) -> Any:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 31) -> int:
        """An integer field; the default if it is absent or null. Raises: ConfigError naming the field."""
        value = self.fields.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise ConfigError(f"config field {name!r} is invalid", where=str(self.path),
                              expected=f"an integer in {least}..{most}", got=value)  # fmt: skip
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self.fields.get(name)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise ConfigError(
                f"config field {name!r} is invalid", where=str(self.path), expected="a number above 0", got=value
            )
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean field."""
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(
                f"config field {name!r} is invalid", where=str(self.path), expected="true or false", got=value
            )
        return value

    def choice(self, name: str, default: str, among: tuple[str, ...]) -> str:
        """A string field with known values."""
        value = self.fields.get(name)
        value = default if value is None else value
        if value not in among:
            raise ConfigError(
                f"config field {name!r} is invalid", where=str(self.path), expected=", ".join(among), got=value
            )
        return value

    def __repr__(self) -> str:
        return f"Config({json.dumps(self.fields)[:200]})"
