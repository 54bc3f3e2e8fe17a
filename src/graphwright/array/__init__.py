"""Arrays, independent of array libraries: DType, Device, Layout, Spec, Storage, NDArray, Backend."""

from __future__ import annotations

from graphwright.array import cuda, random
from graphwright.array.backend import Backend, MissingKernel, backend
from graphwright.array.device import CPU, Device, DeviceMismatch, DeviceUnavailable, names_device
from graphwright.array.dtype import (
    BY_TAG,
    DTYPES,
    DType,
    bfloat16,
    bool_,
    dtype,
    finfo,
    float8_e4m3fn,
    float8_e5m2,
    float16,
    float32,
    float64,
    iinfo,
    int8,
    int16,
    int32,
    int64,
    promote,
    result_type,
    uint8,
)
from graphwright.array.layout import Layout
from graphwright.array.memory_pool import upload
from graphwright.array.ndarray import NDArray, ReadOnlyArray, empty, from_dlpack, from_numpy
from graphwright.array.spec import Dim, Spec, UnboundDim, broadcast_shapes, sample_sizes
from graphwright.array.storage import Storage, StorageClosed, WriteCount, Writers, changes
from graphwright.array.threads import get_num_threads, set_num_threads

__all__ = [
    "BY_TAG",
    "CPU",
    "DTYPES",
    "Backend",
    "DType",
    "Device",
    "DeviceMismatch",
    "DeviceUnavailable",
    "Dim",
    "Layout",
    "MissingKernel",
    "NDArray",
    "ReadOnlyArray",
    "Spec",
    "Storage",
    "StorageClosed",
    "UnboundDim",
    "WriteCount",
    "Writers",
    "backend",
    "bfloat16",
    "bool_",
    "broadcast_shapes",
    "changes",
    "cuda",
    "dtype",
    "empty",
    "finfo",
    "float8_e4m3fn",
    "float8_e5m2",
    "float16",
    "float32",
    "float64",
    "from_dlpack",
    "from_numpy",
    "get_num_threads",
    "iinfo",
    "int8",
    "int16",
    "int32",
    "int64",
    "names_device",
    "promote",
    "random",
    "result_type",
    "sample_sizes",
    "set_num_threads",
    "uint8",
    "upload",
]  # fmt: skip
