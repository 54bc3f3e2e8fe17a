"""Questions about tensors and dtypes, and copies, under torch's names."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import CPU, promote
from graphwright.array import dtype as as_dtype
from graphwright.array import result_type as joined
from graphwright.array.dtype import DType, float32
from graphwright.autograd.apply import NUMBERS, TensorBase, as_tensor, device_of
from graphwright.autograd.names import METHOD, TOP, named
from graphwright.errors import ShapeError, UsageError

if TYPE_CHECKING:
    from graphwright.autograd.tensor import Tensor

_ORDER = {"bool": 0, "uint": 1, "int": 2, "float": 3, "float8": 3}


# -- dtypes ------------------------------------------------------------------------------------------------------------
@named(TOP)
def promote_types(type1: Any, type2: Any) -> Any:
    """Return the dtype to which an op casts tensors of two dtypes. Raises: DTypeError for 8-bit floats."""
    return promote(as_dtype(type1), as_dtype(type2))


@named(TOP)
def result_type(tensor1: Any, tensor2: Any) -> Any:
    """Return the dtype to which an op casts two operands, tensors or numbers. Raises: DTypeError."""
    return joined([_category(value) for value in (tensor1, tensor2)])


def _category(value: Any) -> tuple[DType, str]:
    if isinstance(value, TensorBase):
        return value.dtype, "array" if value.ndim else "scalar0d"
    kind = NUMBERS.get(type(value))
    if kind is None:
        raise UsageError("not an operand", where="result_type", expected="a tensor or number", got=type(value).__name__)
    return (float32 if kind.is_float else kind), "python"


@named(TOP)
def can_cast(from_: Any, to: Any) -> bool:
    """Return True if an in-place op may store values of one dtype in a tensor of another: no floats in integers."""
    source, target = (_ORDER[as_dtype(kind).kind] for kind in (from_, to))
    return source <= target or (source == 2 and target == 1)


# -- tensors -----------------------------------------------------------------------------------------------------------
@named()
def is_complex(input: Tensor) -> bool:
    """Return False: there are no complex tensors."""
    return False


@named()
def is_signed(input: Tensor) -> bool:
    """Return True if the dtype has numbers below 0."""
    return input.dtype.kind not in ("bool", "uint")


@named()
def is_nonzero(input: Tensor) -> bool:
    """Return True if the only entry is not 0. Raises: ShapeError unless there is one entry."""
    return bool(input.item() != 0)


@named()
def is_same_size(input: Tensor, other: Tensor) -> bool:
    """Return True if the shapes are equal."""
    return input.shape == other.shape


@named(METHOD)
def is_inference(input: Tensor) -> bool:
    """Return False: tensors made in `inference_mode` are ordinary tensors."""
    return False


@named(METHOD)
def get_device(input: Tensor) -> int:
    """Return the index of the device, -1 for the CPU."""
    return -1 if input.device == CPU else input.device.index


@named(METHOD)
def storage_offset(input: Tensor) -> int:
    """Return the position of the first entry in its memory, in entries."""
    return input.concrete("storage_offset").offset


@named(METHOD)
def data_ptr(input: Tensor) -> int:
    """Return the address of the first entry in the memory of the host. Raises: UsageError on another device."""
    array = input.concrete("data_ptr")
    if array.device != CPU:
        raise UsageError("the memory is not on the CPU", where="data_ptr", got=str(array.device))
    return array.to_numpy(bits=True).__array_interface__["data"][0]


@named()
def adjoint(input: Tensor) -> Tensor:
    """Return a view with the last two axes exchanged."""
    return input.mT


@named(METHOD, "fill_diagonal_")
def fill_diagonal_(input: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """Set the entries with equal indices to a value; with `wrap`, again below the square of a tall matrix.

    Raises: ShapeError below two axes, and for more than two axes of different sizes.
    """
    sizes = input.shape
    if len(sizes) < 2 or (len(sizes) > 2 and len(set(sizes)) > 1):
        expected = "a matrix, or axes of equal sizes"
        raise ShapeError("the tensor has no diagonal", where="fill_diagonal_", expected=expected, got=input.spec)
    step = sum(prod(sizes[axis + 1 :]) for axis in range(len(sizes)))
    end = input.numel() if wrap or len(sizes) > 2 else min(sizes[0], sizes[1]) * sizes[1]
    mask = as_tensor(np.isin(np.arange(input.numel()), np.arange(0, end, step)).reshape(sizes), device=device_of(input))
    return input.masked_fill_(mask, fill_value)


@named(TOP)
def clone(input: Tensor) -> Tensor:
    """Return a copy, through which gradients flow."""
    return input.clone()


@named(TOP)
def detach(input: Tensor) -> Tensor:
    """Return a tensor over the same memory that is not on the tape."""
    return input.detach()
