"""`autocast` in torch's spelling."""

from __future__ import annotations

from typing import Any

import pytest

import graphwright as gw
from graphwright.errors import DTypeError


@pytest.mark.parametrize(
    ("args", "options", "wanted"),
    [
        ((), {}, gw.bfloat16),
        (("cpu",), {}, gw.bfloat16),
        (("cpu",), {"dtype": gw.float16}, gw.float16),
        (("cpu", gw.float16), {}, gw.float16),
        ((gw.float16,), {}, gw.float16),
        ((), {"device_type": "cpu", "dtype": gw.bfloat16, "enabled": False}, gw.float32),
    ],
)
def test_arguments_are_those_of_torch(args: Any, options: Any, wanted: Any) -> None:
    with gw.autocast(*args, **options):
        assert (gw.ones(2, 2) @ gw.ones(2, 2)).dtype is wanted
    with pytest.raises(DTypeError), gw.autocast("cpu", dtype=gw.float32):
        pass
