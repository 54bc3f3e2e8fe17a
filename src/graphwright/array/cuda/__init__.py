"""GPUs: which there are, and their memory, under torch's names (`gw.cuda`). Importing this folder loads no torch.

Functions take a device as `Device`, a name such as "cuda:1", or the index of a GPU; by default the first GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from graphwright.array.backend import backend
from graphwright.array.device import Device, DeviceUnavailable
from graphwright.errors import UsageError

AnyDevice = Device | str | int | None


def device_count() -> int:
    """Return the number of GPUs that this build can use."""
    cuda = import_module("torch.cuda")
    return cuda.device_count() if cuda.is_available() else 0


def is_available() -> bool:
    """Return True if there is a GPU that this build can use."""
    return device_count() > 0


def get_device_name(device: AnyDevice = None) -> str:
    """Return the name of a GPU as its driver gives it. Raises: DeviceUnavailable."""
    found = _backend(device).device
    return import_module("torch.cuda").get_device_name(found.index) if found.kind == "cuda" else str(found)


def synchronize(device: AnyDevice = None) -> None:
    """Wait until all work queued on a device has run. Raises: DeviceUnavailable; DriverError for what failed there."""
    _backend(device).driver.synchronize()


def memory_allocated(device: AnyDevice = None) -> int:
    """Return the bytes of all arrays on a device."""
    return _backend(device).pool.stats().live


def max_memory_allocated(device: AnyDevice = None) -> int:
    """Return the largest value of `memory_allocated` since the start or the last `reset_peak_memory_stats`."""
    return _backend(device).pool.stats().peak


def memory_reserved(device: AnyDevice = None) -> int:
    """Return the bytes that the pool of a device holds, in arrays and for later ones."""
    return _backend(device).pool.stats().reserved


def memory_stats(device: AnyDevice = None) -> dict[str, int]:
    """Return the totals of a device's pool, by torch's names; `waste` and `cached` are explained in `Stats`.

    Bytes of arrays are `requested_bytes`; `allocated_bytes` are these and what sizes were rounded up by.
    """
    stats = _backend(device).pool.stats()
    return {
        "requested_bytes.all.current": stats.live, "requested_bytes.all.peak": stats.peak,
        "allocated_bytes.all.current": stats.live + stats.waste, "reserved_bytes.all.current": stats.reserved,
        "allocation.all.allocated": stats.allocs, "allocation.all.freed": stats.frees,
        "allocation.all.current": stats.allocs - stats.frees,
        "waste": stats.waste, "cached": stats.cached, "stale": stats.stale, "failed": stats.failed,
    }  # fmt: skip


def memory_summary(device: AnyDevice = None) -> str:
    """Return the totals of a device's pool and its largest blocks as a table."""
    return _backend(device).pool.summary()


def reset_peak_memory_stats(device: AnyDevice = None) -> None:
    """Set the peak of `max_memory_allocated` to the current value."""
    _backend(device).pool.reset_peak()


def empty_cache(device: AnyDevice = None) -> int:
    """Return memory that no array uses to the driver, after waiting for its last use; return the number of bytes."""
    found = _backend(device)
    freed = found.pool.empty_cache()
    if found.device.kind == "cuda":
        import_module("torch.cuda").empty_cache()
    return freed


def set_memory_limit(limit: float | None, device: AnyDevice = None) -> None:
    """Limit the memory of a device's pool: bytes, a fraction (float <= 1) of all memory, or None for no limit.

    The variable GRAPHWRIGHT_CUDA_LIMIT is the limit at the start.

    Raises: UsageError if it is negative, infinite or no number.
    """
    _backend(device).pool.set_limit(limit)


def set_per_process_memory_fraction(fraction: float, device: AnyDevice = None) -> None:
    """Limit the memory of a device's pool to a fraction of all memory. Raises: UsageError if it is not from 0 to 1."""
    if not 0 <= fraction <= 1:
        raise UsageError("a fraction of memory is from 0 to 1", where="set_per_process_memory_fraction",
                         got=f"{fraction:g}", fix="set_memory_limit takes bytes")  # fmt: skip
    set_memory_limit(float(fraction), device)


def _backend(device: AnyDevice) -> Any:
    """Return the backend of a device with a pool. Raises: DeviceUnavailable."""
    found = Device("cuda", device or 0) if isinstance(device, int | None) else Device.parse(device)
    made: Any = backend(found)
    if not hasattr(made, "pool"):
        raise DeviceUnavailable("this device has no pool of memory", got=str(found), fix='a device such as "cuda"')
    return made


def make(device: Device) -> Any:
    """Return a new backend of a GPU. Raises: DeviceUnavailable with the reason."""
    torch: Any = import_module("torch")
    if torch.version.cuda is None:
        why, fix = f"torch {torch.__version__} is built without CUDA", "install torch for CUDA"
    elif not torch.cuda.is_available():
        why, fix = "torch finds no NVIDIA GPU, or no driver for one", "nvidia-smi shows GPUs and their driver"
    elif device.index >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        why = f"there {'is 1 GPU' if count == 1 else f'are {count} GPUs'}, the last with index {count - 1}"
        fix = f'device="cuda:{count - 1}"'
    else:
        from graphwright.array.cuda.cuda_backend import CudaBackend
        from graphwright.array.cuda.driver import TorchDriver

        return CudaBackend(device, TorchDriver(device))
    what = f"the device is not available: {why}"
    raise DeviceUnavailable(what, got=str(device), fix=f'{fix}, or use device="cpu"')
