"""Device: where an array is stored. Any device can be named; using an unavailable one raises DeviceUnavailable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeGuard, cast

from graphwright.errors import UsageError

KINDS = ("cpu", "cuda", "sim", "meta")
"""`sim` is host memory with the rules of a GPU, `meta` has specs without bytes."""


class DeviceUnavailable(UsageError):
    """This machine or build does not have the device."""


class DeviceMismatch(UsageError):
    """Operands are on different devices."""


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Device:
    """A kind of device and its index; `Device("cuda") is Device("cuda:0") is Device("cuda", 0)`. Raises: UsageError."""

    kind: str
    index: int

    def __new__(cls, kind: str, index: int = 0) -> Self:
        """Return the single object of this kind and index."""
        name, _, number = kind.partition(":")
        if name not in KINDS or not (number or "0").isdecimal() or (number and index) or index < 0:
            got = f"{kind!r}, index {index}" if index else repr(kind)
            expected = f"one of {', '.join(KINDS)}, with an index >= 0 as in cuda:1 or as a second argument"
            raise UsageError("invalid device", expected=expected, got=got)
        key = name, int(number or index)
        if key not in _DEVICES:
            made = object.__new__(cls)
            object.__setattr__(made, "kind", key[0])
            object.__setattr__(made, "index", key[1])
            _DEVICES.setdefault(key, made)
        return cast("Self", _DEVICES[key])

    @property
    def type(self) -> str:
        """The kind, under torch's name."""
        return self.kind

    def __reduce__(self) -> tuple:
        return Device, (self.kind, self.index)

    @classmethod
    def parse(cls, text: str | Self) -> Self:
        """Parse `"cpu"` or `"cuda:1"`; a Device is returned unchanged. Raises: UsageError."""
        return text if isinstance(text, cls) else cls(str(text))

    def __str__(self) -> str:
        return self.kind if self.kind in ("cpu", "meta") and not self.index else f"{self.kind}:{self.index}"


_DEVICES: dict[tuple[str, int], Device] = {}


def names_device(value: object) -> TypeGuard[Device | str]:
    """Return whether the value is a Device or the name of a device; False for a dtype."""
    return isinstance(value, Device) or (isinstance(value, str) and value.partition(":")[0] in KINDS)


CPU = Device("cpu")
