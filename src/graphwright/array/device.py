"""Device: where an array lives. Naming one is free; one that is not here is refused at its use, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeGuard, cast

from graphwright.errors import UsageError

KINDS = ("cpu", "cuda", "sim", "meta")
"""`sim` is host memory under the rules of a GPU, `meta` specs without bytes."""


class DeviceUnavailable(UsageError):
    """A device that this machine or this build does not have."""


class DeviceMismatch(UsageError):
    """Operands that lie on different devices."""


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Device:
    """A kind of device and its index; `Device("cuda") is Device("cuda:0") is Device("cuda", 0)`: one object each.

    Raises: UsageError for text that names no device.
    """

    kind: str
    index: int

    def __new__(cls, kind: str, index: int = 0) -> Self:
        """The one object of this kind and index."""
        name, _, number = kind.partition(":")
        if name not in KINDS or not (number or "0").isdecimal() or (number and index) or index < 0:
            raise UsageError("unknown device", expected=f"{', '.join(KINDS)}, or kind:index", got=repr(kind))
        key = name, int(number or index)
        if key not in _DEVICES:
            made = object.__new__(cls)
            object.__setattr__(made, "kind", key[0])
            object.__setattr__(made, "index", key[1])
            _DEVICES.setdefault(key, made)
        return cast("Self", _DEVICES[key])

    def __reduce__(self) -> tuple:
        return Device, (self.kind, self.index)

    @classmethod
    def parse(cls, text: str | Self) -> Self:
        """Read `"cpu"`, `"cuda:1"`; a Device is itself. Raises: UsageError."""
        return text if isinstance(text, cls) else cls(str(text))

    def __str__(self) -> str:
        return self.kind if self.kind in ("cpu", "meta") and not self.index else f"{self.kind}:{self.index}"


_DEVICES: dict[tuple[str, int], Device] = {}


def names_device(value: object) -> TypeGuard[Device | str]:
    """Whether this is a device or the name of one, as against a dtype."""
    return isinstance(value, Device) or (isinstance(value, str) and value.partition(":")[0] in KINDS)


CPU = Device("cpu")
