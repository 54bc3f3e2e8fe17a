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
            fix = "give the directory that save_pretrained wrote"
            raise ModelNotFound(f"no {name} here", where=str(directory), fix=fix)
        return Config(read_object(path, _LIMIT, nesting=16), path.read_bytes(), path)

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    def __iter__(self) -> Any:
        return iter(self.fields)

    def __len__(self) -> int:
        return len(self.fields)

    def size(self, name: str, default: int | None = None, *, least: int = 1, most: int = 1 << 31) -> int:
        """An integer field; the default if it is absent or null. Raises: ConfigError naming the field."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self.invalid(name, f"an integer in {least}..{most}", value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A positive finite number."""
        value = self._given(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= LARGEST:
            raise self.invalid(name, "a number above 0", value)
        return float(value)

    def flag(self, name: str, default: bool) -> bool:
        """A boolean field."""
        value = self._given(name, default)
        if not isinstance(value, bool):
            raise self.invalid(name, "true or false", value)
        return value

    def choice(self, name: str, default: str, among: tuple[str, ...]) -> str:
        """A string field with known values."""
        value = self._given(name, default)
        if value not in among:
            raise self.invalid(name, ", ".join(among), value)
        return value

    def invalid(self, name: str, expected: str, got: object) -> ConfigError:
        """The error for an invalid value of a field."""
        return ConfigError(f"config field {name!r} is invalid", where=str(self.path), expected=expected, got=got)

    def _given(self, name: str, default: Any) -> Any:
        value = self.fields.get(name)
        return default if value is None else value

    def __repr__(self) -> str:
        return f"Config({json.dumps(self.fields)[:200]})"


def read_object(path: Path, limit: int, *, nesting: int) -> dict[str, Any]:
    """The object in a JSON file. Raises: ConfigError."""
    try:
        data = read_json(path, limit, nesting=nesting)
    except (JsonError, OSError) as error:
        got = str(error)
        if isinstance(error, JsonError):
            got = error.what if error.got is None else f"{error.what}: {error.got}"
        raise ConfigError(f"{path.name} cannot be read", where=str(path), got=got) from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path.name} is not an object", where=str(path), got=type(data).__name__)
    return data
