"""0-d tensors with an axis against torch: values, shapes, dtypes, gradients, and refusals of other axes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import ShapeError

AXIS = """
    all amax amin aminmax any argmax argmin argsort count_nonzero cummax cummin cumprod cumsum diff flatten flip
    log_softmax logcumsumexp logsumexp max mean median min mode nanmean nanmedian nansum prod softmax sort squeeze
    std sum unbind unsqueeze var
"""
KEEPDIM = "all amax amin any argmax argmin logsumexp max mean median min mode prod std sum var"
SEVERAL = "all amax amin any count_nonzero logsumexp mean nansum std sum var"
NAMED = ("aminmax", "diff")
"""Methods whose axis is no positional argument."""
home: Callable[[Any], Any] = lambda x: torch if isinstance(x, torch.Tensor) else gw  # noqa: E731
id_of = lambda x, *shape: home(x).zeros(shape, dtype=home(x).int64)  # noqa: E731
CASES: dict[str, Callable[[Any, int], Any]] = {
    **{n: lambda x, d, n=n: getattr(x, n)(**{"dim": d}) if n in NAMED else getattr(x, n)(d) for n in AXIS.split()},
    **{f"{n}, kept": lambda x, d, n=n: getattr(x, n)(d, keepdim=True) for n in KEEPDIM.split()},
    **{f"{n}, a tuple": lambda x, d, n=n: getattr(x, n)((d,)) for n in SEVERAL.split()},
    **{f"{n}, twice": lambda x, d, n=n: getattr(x, n)((0, d)) for n in SEVERAL.split()},
    "topk": lambda x, d: x.topk(1, d),
    "topk of two": lambda x, d: x.topk(2, d),
    "kthvalue": lambda x, d: x.kthvalue(1, d),
    "norm": lambda x, d: x.norm(2, d),
    "quantile": lambda x, d: x.quantile(0.5, d),
    "roll": lambda x, d: x.roll(1, d),
    "movedim": lambda x, d: x.movedim(d, 0),
    "transpose": lambda x, d: x.transpose(d, 0),
    "permute": lambda x, d: x.permute(d),
    "select": lambda x, d: x.select(d, 0),
    "narrow": lambda x, d: x.narrow(d, 0, 1),
    "split": lambda x, d: x.split(1, d),
    "gather": lambda x, d: x.gather(d, id_of(x)),
    "index_select": lambda x, d: x.index_select(d, id_of(x, 1)),
    "index_add": lambda x, d: x.index_add(d, id_of(x, 1), x * 2),
    "index_fill": lambda x, d: x.index_fill(d, id_of(x, 1), 3),
    "scatter": lambda x, d: x.scatter(d, id_of(x), x * 2),
    "scatter_add": lambda x, d: x.scatter_add(d, id_of(x), x * 2),
    "normalize": lambda x, d: home(x).nn.functional.normalize(x, dim=d),
    "glu": lambda x, d: home(x).nn.functional.glu(x, d),
    "stack": lambda x, d: home(x).stack([x, x], d),
    "concatenate": lambda x, d: home(x).cat([x, x], d),
    "vector_norm": lambda x, d: home(x).linalg.vector_norm(x, 2, d),
}


def results(case: str, x: Any, axis: int) -> list[Any]:
    found = CASES[case](x, axis)
    return list(found) if isinstance(found, tuple | list) else [found]


@pytest.mark.filterwarnings("ignore:.*degrees of freedom is <= 0:UserWarning")
@pytest.mark.parametrize("axis", [0, -1, 1, -2])
@pytest.mark.parametrize("case", CASES)
def test_a_scalar_takes_the_axes_that_torch_takes(case: str, axis: int) -> None:
    mine = gw.tensor(1.7, dtype="float64", requires_grad=True)
    theirs = torch.tensor(1.7, dtype=torch.float64, requires_grad=True)
    try:
        wanted = results(case, theirs, axis)
    except (IndexError, RuntimeError):
        with pytest.raises(ShapeError):
            CASES[case](mine, axis)
        return
    found = results(case, mine, axis)
    assert [t.dtype.name for t in found] == [str(t.dtype).removeprefix("torch.") for t in wanted]
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(a.detach().numpy(), b.detach().numpy())
        assert a.shape == tuple(b.shape)
    assert found[0].requires_grad == wanted[0].requires_grad
    if wanted[0].requires_grad and not np.isnan(wanted[0].detach().numpy()).any():
        (found[0] * 3).sum().backward()
        (wanted[0] * 3).sum().backward()
        assert mine.grad is not None
        assert theirs.grad is not None
        np.testing.assert_allclose(mine.grad.numpy(), theirs.grad.numpy(), rtol=1e-12, atol=1e-15)
