"""The Python calls that one addition of two tensors makes, in order."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import torch

import graphwright
from graphwright.array import NDArray
from graphwright.autograd import Tensor, tensor

PACKAGE = str(Path(graphwright.__file__).parent)


def calls_of_an_addition(taped: bool) -> tuple[list[str], Tensor]:
    """Names of the package's functions and of torch's, in the order of their calls."""
    x = tensor(np.ones(3, np.float32), requires_grad=taped)
    _ = x + x  # fills the caches of this use
    seen: list[str] = []  # without comprehensions, which later Pythons do not call

    def note(frame: FrameType, event: str, called: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and "<" not in frame.f_code.co_name:
            seen.append(frame.f_code.co_qualname)
        if event == "c_call" and called is torch.add:
            seen.append("torch.add")

    sys.setprofile(note)
    try:
        y = x + x
    finally:
        sys.setprofile(None)
    return seen, y


WITHOUT_A_TAPE = [
    "_operators.<locals>.left",  # Tensor.__add__
    "apply",
    "_plain",
    "compute",
    "backend",
    "NDArray.impl",
    "NDArray.impl",
    "torch.add",
    "NDArray.owning",
    "TensorBase.__init__",
]


def test_an_untaped_addition_makes_only_these_calls() -> None:
    seen, y = calls_of_an_addition(False)
    assert seen == WITHOUT_A_TAPE
    assert y.node is None


def test_a_taped_addition_adds_one_tape_node() -> None:
    seen, y = calls_of_an_addition(True)
    assert [name for name in seen if "TapeNode" not in name and name not in ("NDArray.spec", "_user_frame")] == (
        WITHOUT_A_TAPE
    )
    assert [name for name in seen if "TapeNode" in name] == ["TapeNode.__init__", "TapeNode.take"]
    assert y.node is not None


@pytest.mark.parametrize("taped", [False, True])
def test_an_addition_allocates_no_storage_object(taped: bool) -> None:
    _, y = calls_of_an_addition(taped)
    assert isinstance(y.data, NDArray)
    assert y.data._storage is None  # the result is its own memory until a view, a write or a caller wants the block
    assert y.data.storage.nbytes == 12
