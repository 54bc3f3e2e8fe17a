"""Device: where an array lives. This build runs on the CPU; other kinds are named, and refused with the reason."""

from __future__ import annotations

from dataclasses import dataclass

from graphwright.errors import UsageError


class DeviceUnavailable(UsageError):
    """A device that this machine or this build does not have."""


@dataclass(frozen=True, slots=True)
class Device:
    """A kind of device and its index; `Device.parse("cuda") == Device.parse("cuda:0")`."""

    kind: str
    index: int = 0

    @staticmethod
    def parse(text: str | Device) -> Device:
        """Read `"cpu"`, `"cpu:0"`.

        Raises: DeviceUnavailable for a kind that cannot run here; UsageError for text that names no device.
        """
        if isinstance(text, Device):
            return text
        kind, _, index = text.partition(":")
        if kind not in ("cpu", "cuda") or not (index or "0").isdigit():
            raise UsageError("unknown device", expected="cpu or cuda[:index]", got=repr(text))
        if kind != "cpu":
            raise DeviceUnavailable("no backend for this device yet", got=text, fix='device="cpu"')
        return Device(kind, int(index or 0))

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")
