"""The params of a program in one safetensors file: written atomically, and checked completely before params change."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from graphwright.array import BY_TAG, NDArray, from_numpy
from graphwright.autograd import Tensor, Variable
from graphwright.files import StrPath
from graphwright.program.kinds import PARAM
from graphwright.safetensors import Checkpoint, CheckpointError, TensorData, write_tensors

if TYPE_CHECKING:
    from graphwright.program.program import Program


class ParameterMismatch(CheckpointError):
    """The params in the file do not match the params of the program."""


def parameters_of(p: Program) -> dict[str, Variable]:
    """Return a dict from checkpoint key to param, in topological order. A tied param is listed once."""
    keys = dict.fromkeys(p.key(n) for n in p.order() if p.op(n) == PARAM)
    return {key: p.weights[key] for key in keys}


def save_parameters(p: Program, path: StrPath) -> None:
    """Write the params to a safetensors file, under their keys and in their dtypes.

    An existing file is replaced atomically. Raises: FileError if writing fails; an existing file is then unchanged.
    """
    own = {key: variable.data for key, variable in parameters_of(p).items()}
    write_tensors(path, [TensorData(k, a.dtype.safetensors, a.shape, lambda a=a: _bits(a)) for k, a in own.items()])


def load_parameters(p: Program, path: StrPath, strict: bool = True) -> tuple[list[str], list[str]]:
    """Load the values of params from a file. All values are read and checked before the first param is changed.

    With `strict`, missing and unexpected keys are mismatches. Shapes and dtypes must always match.
    Returns: (missing keys, unexpected keys).
    Raises: ParameterMismatch listing all mismatches; CheckpointError for a damaged file; UnreadableFile.
    """
    own = parameters_of(p)
    with Checkpoint(path) as checkpoint:
        missing = [key for key in own if key not in checkpoint]
        unexpected = [key for key in checkpoint if key not in own]
        wrong = [f"{key}: missing" for key in missing if strict]
        wrong += [f"{key}: not a param of this program" for key in unexpected if strict]
        for key, variable in own.items():
            info = checkpoint.info(key) if key in checkpoint else None
            if info is not None and (tuple(info.shape), BY_TAG.get(info.tag)) != (variable.shape, variable.dtype):
                wrong.append(f"{key}: expected {variable.spec}, got {info.tag}{list(info.shape)}")
        if wrong:
            raise ParameterMismatch("the params do not match the program:\n  " + "\n  ".join(wrong), where=path)
        arrays: dict[str, NDArray] = {}
        for key, variable in own.items():
            if key in checkpoint:
                host = np.frombuffer(bytearray(checkpoint.bytes(key)), variable.dtype.numpy)
                arrays[key] = from_numpy(host.reshape(variable.shape), bits=variable.dtype)
    for key, array in arrays.items():
        own[key].assign(Tensor(array))
    return missing, unexpected


def _bits(array: NDArray) -> np.ndarray:
    return np.ascontiguousarray(array.to_numpy(bits=True))
