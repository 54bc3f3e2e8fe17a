"""Calling the machine on a context: some 30 ns where CPython's layout is the one that is known, else by ctypes.

The quick call is a builtin method whose `self` is a bytes object that holds the context's address; the machine is its C
function and returns None, or NotImplemented for a failure. It holds the GIL, so only short code is called in this way.
"""

from __future__ import annotations

import ctypes
import sys
import sysconfig
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from graphwright.array.vm import context as at
from graphwright.array.vm.machine import build

Call = Callable[[], Any]
"""Runs the code; None, or something else if a row failed."""

_NOARGS = 4  # METH_NOARGS
_LASTING = (3, 12)  # the version from which on None is not counted


class _Method(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char_p),
        ("function", ctypes.c_void_p),
        ("flags", ctypes.c_int),
        ("doc", ctypes.c_char_p),
    )


@cache
def _make_method() -> Any:
    """(method, self) -> builtin, or None where the layout of objects is not the known one."""
    plain = sys.implementation.name == "cpython" and not sysconfig.get_config_var("Py_GIL_DISABLED")
    if not plain or bytes.__basicsize__ - 1 != at.PAYLOAD or ctypes.sizeof(ctypes.c_void_p) != 8:
        return None
    make = ctypes.pythonapi.PyCFunction_NewEx
    make.restype, make.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.py_object, ctypes.py_object)
    return make


@cache
def _method() -> _Method:
    return _Method(b"run", build().address, _NOARGS, None)


def quick(context: np.ndarray, memory: Any) -> Call:
    """A call that holds the GIL; it keeps `memory`, what the context points to, alive."""
    return _quick(context, memory) or patient(context, memory)


def guarded(context: np.ndarray, memory: Any, otherwise: Callable[[], None]) -> Call:
    """A call that holds the GIL and looks itself whether it may run: what goes wrong is left to `otherwise`.

    That is called in its place where the number at `GUARD` is another one than `SEEN`, and after a row that failed; so
    no code of Python runs around the machine's.
    """
    context[at.GUARD], context[at.SEEN] = context.ctypes.data, -1  # no segment yet: the first cell is 0
    context[at.ASK] = ctypes.cast(ctypes.pythonapi.PyObject_CallNoArgs, ctypes.c_void_p).value
    context[at.OTHERWISE] = id(otherwise)
    return _quick(context, (memory, otherwise)) or otherwise


def _quick(context: np.ndarray, memory: Any) -> Call | None:
    make = _make_method()
    if make is None:
        return None
    context[at.FINE], context[at.FAILED] = id(None), id(NotImplemented)
    context[at.COUNTED] = sys.version_info < _LASTING
    me = int(context.ctypes.data).to_bytes(8, sys.byteorder)
    return make(ctypes.addressof(_method()), me, (context, memory))


_Plain = ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_int64)


def patient(context: np.ndarray, memory: Any) -> Call:
    """A call that lets other threads of Python run meanwhile; it keeps `memory`, as above, alive."""
    context[at.FINE], context[at.FAILED], context[at.COUNTED] = 0, 1, 0
    block = np.array([context.ctypes.data], np.int64)
    run, me = _Plain(build().address), int(block.ctypes.data) - at.PAYLOAD

    def call(keep: Any = (block, context, memory)) -> Any:
        return NotImplemented if run(me) else None

    return call
