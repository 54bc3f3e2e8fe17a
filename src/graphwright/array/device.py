"""Device: where an array lives. Naming one is free; one that is not here is refused at its use, with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self, TypeGuard

from graphwright.errors import UsageError

KINDS = ("cpu", "cuda", "sim", "meta")
"""`sim` is host memory under the rules of a GPU, `meta` specs without bytes."""


class DeviceUnavailable(UsageError):
    """A device that this machine or this build does not have."""


class DeviceMismatch(UsageError):
    """Operands that lie on different devices."""


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device and its index; `Device("cuda") == Device("cuda:0") == Device("cuda", 0)`.

    Raises: UsageError for text that names no device.
    """

    kind: str
    index: int = 0

    def __post_init__(self) -> None:
        kind, _, index = self.kind.partition(":")
        if kind not in KINDS or not (index or "0").isdecimal() or (index and self.index) or self.index < 0:
            raise UsageError("unknown device", expected=f"{', '.join(KINDS)}, or kind:index", got=repr(self.kind))
        if index:
            object.__setattr__(self, "kind", kind)
            object.__setattr__(self, "index", int(index))

    @classmethod
    def parse(cls, text: str | Self) -> Self:
        """Read `"cpu"`, `"cuda:1"`; a Device is itself. Raises: UsageError."""
        return text if isinstance(text, cls) else cls(str(text))

    def __str__(self) -> str:
        return self.kind if self.kind in ("cpu", "meta") and not self.index else f"{self.kind}:{self.index}"


def names_device(value: object) -> TypeGuard[Device | str]:
    """Whether this is a device or the name of one, as against a dtype."""
    return isinstance(value, Device) or (isinstance(value, str) and value.partition(":")[0] in KINDS)


CPU = Device("cpu")
