"""Threads of kernels, and GPUs, by torch's names."""

from __future__ import annotations

import pytest

import graphwright as gw
from graphwright.array import DeviceUnavailable
from graphwright.errors import UsageError


def test_the_number_of_threads_is_set_for_kernels() -> None:
    before = gw.get_num_threads()
    try:
        gw.set_num_threads(1)
        assert gw.get_num_threads() == 1
    finally:
        gw.set_num_threads(before)
    with pytest.raises(UsageError, match="threads"):
        gw.set_num_threads(0)


def test_machines_without_gpu_have_none() -> None:
    assert not gw.cuda.is_available()
    assert gw.cuda.device_count() == 0
    assert str(gw.device("cuda" if gw.cuda.is_available() else "cpu")) == "cpu"
    with pytest.raises(DeviceUnavailable):
        gw.zeros(2).cuda()
