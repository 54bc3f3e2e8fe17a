"""Threads of kernels, and GPUs, by torch's names."""

from __future__ import annotations

import pytest

import graphwright as gw
from graphwright.array import DeviceUnavailable
from graphwright.array.threads import ThreadCounts, thread_counts, using_threads
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


def test_products_of_numpy_use_as_many_threads_as_kernels() -> None:
    before = thread_counts()
    with using_threads(2):
        assert (thread_counts().kernels, gw.get_num_threads()) == (2, 2)
        assert thread_counts().products == (2 if before.products else 0)
        with pytest.raises(ValueError, match="inside"), using_threads(ThreadCounts(1, 1)):
            raise ValueError("inside")
        assert thread_counts().kernels == 2
    assert thread_counts() == before


def test_machines_without_gpu_have_none() -> None:
    assert not gw.cuda.is_available()
    assert gw.cuda.device_count() == 0
    assert str(gw.device("cuda" if gw.cuda.is_available() else "cpu")) == "cpu"
    with pytest.raises(DeviceUnavailable):
        gw.zeros(2).cuda()
