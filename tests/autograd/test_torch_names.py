"""Torch's spellings: each line of `torch_spellings.txt` gives here what it gives in torch, and the same gradients."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.autograd import names
from graphwright.errors import DTypeError, GraphwrightError, ShapeError, UsageError

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's, of coming changes
LINES = (Path(__file__).parent / "torch_spellings.txt").read_text(encoding="utf-8").splitlines()
RNG = np.random.default_rng(0)
SQUARE = RNG.normal(size=(4, 4))
INPUTS: dict[str, np.ndarray] = {
    "x": RNG.normal(size=(3, 4)).astype("f4"), "y": RNG.uniform(0.2, 1.8, (3, 4)).astype("f4"),
    "p": RNG.uniform(0.05, 0.95, (3, 4)).astype("f4"), "v": RNG.normal(size=4).astype("f4"),
    "w": RNG.normal(size=4).astype("f4"), "A": (SQUARE @ SQUARE.T + 4 * np.eye(4)).astype("f4"),
    "B": RNG.normal(size=(2, 3, 4)).astype("f4"), "C": RNG.normal(size=(2, 4, 5)).astype("f4"),
    "I": np.array([[0, 2], [3, 1], [2, 0]]), "J": np.array([2, 0]), "m": RNG.random((3, 4)) < 0.5,
    "z": RNG.integers(-3, 4, (3, 4)), "u": RNG.integers(1, 6, (3, 4)), "t": np.array([1, 0, 3]),
    "img": RNG.normal(size=(2, 4, 6, 6)).astype("f4"), "seq": RNG.normal(size=(2, 4, 7)).astype("f4"),
    "s": np.array([0, -0.0, 1, -1, np.inf, np.nan, 0.6, -2.5, 1e30], "f4"),
    "r": np.array([0, 0, 1, 2, 1, 1, 0.2, np.nan, 1e-30], "f4"),
    "n": np.array([[1, np.nan, 3, 2], [2, 2, np.nan, 0], [-1, 1, 5, np.inf]], "f4"),
    "vol": RNG.normal(size=(1, 2, 4, 4, 4)).astype("f4"), "q": RNG.normal(size=(2, 2, 5, 4)).astype("f4"),
}  # fmt: skip


def sections() -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for line in LINES:
        if line.startswith("# "):
            found[line[2:]] = []
        else:
            [*found.values()][-1].append(line)
    return found


def spaces(differentiable: bool = False) -> tuple[dict[str, Any], dict[str, Any]]:
    """Names that the expressions use, in torch and here."""
    theirs: dict[str, Any] = {
        k: torch.tensor(a, requires_grad=differentiable and a.dtype.kind == "f") for k, a in INPUTS.items()
    }
    mine: dict[str, Any] = {
        k: gw.tensor(a, requires_grad=differentiable and a.dtype.kind == "f") for k, a in INPUTS.items()
    }
    theirs |= {"T": torch, "F": torch.nn.functional, "nn": torch.nn, "np": np}
    return theirs, mine | {"T": gw, "F": gw.nn.functional, "nn": gw.nn, "np": np}


def plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        value = value.detach()
        host = (value.float() if value.dtype is torch.bfloat16 else value).numpy(force=True)
        return str(value.dtype).removeprefix("torch."), host
    if isinstance(value, gw.Tensor):
        return value.dtype.name, value.detach().numpy("float32" if value.dtype.as_bits else None)
    if isinstance(value, np.ndarray):
        return str(value.dtype), value
    if isinstance(value, tuple | list):
        return tuple(map(plain, value))
    return value if isinstance(value, int | float | str | type(None)) else type(value).__name__


def assert_same(mine: Any, theirs: Any, where: str) -> None:
    if isinstance(theirs, tuple) and len(theirs) == 2 and isinstance(theirs[1], np.ndarray):
        assert mine[0] == theirs[0], where
        assert mine[1].shape == theirs[1].shape, where
        np.testing.assert_allclose(mine[1].astype("f8"), theirs[1].astype("f8"), rtol=1e-4, atol=1e-5, err_msg=where)
    elif isinstance(theirs, tuple):
        assert isinstance(mine, tuple), where
        assert len(mine) == len(theirs), where
        for a, b in zip(mine, theirs, strict=True):
            assert_same(a, b, where)
    else:
        assert mine == (pytest.approx(theirs, rel=1e-5) if isinstance(theirs, float) else theirs), where


@pytest.mark.parametrize("section", sections())
def test_expressions_in_torch_spelling_have_the_values_of_torch(section: str) -> None:
    for text in sections()[section]:
        theirs, mine = spaces()
        assert_same(plain(eval(text, mine)), plain(eval(text, theirs)), text)


ON_HOST = re.compile(r"\.({})\(".format("|".join(n for n, row in names.NAMES.items() if row.differs)))
"""Functions without a gradient here."""


DIFFERENTIABLE = [s for s in sections() if s not in ("in place", "create", "dtype", "autograd")]


def gradients(text: str, lib: Any, space: dict[str, Any], leaves: list[str], second: bool) -> list[np.ndarray] | None:
    """Gradients of a weighted sum of the entries, or of the sum of the squares of these; None without any."""
    value, inputs = eval(text, space), [space[name] for name in leaves]
    if not hasattr(value, "requires_grad") or not value.requires_grad or ON_HOST.search(text):
        return None
    factor = np.random.default_rng(1).normal(size=tuple(value.shape)).astype(plain(value)[0])
    options: dict[str, Any] = {"create_graph": second, "allow_unused": True}
    found = lib.autograd.grad((value * lib.tensor(factor)).sum(), inputs, **options)
    if second:
        squares = [(g * g).sum() for g in found if g is not None and g.requires_grad]
        if not squares:
            return None
        found = lib.autograd.grad(sum(squares[1:], squares[0]), inputs, allow_unused=True)
    made = []
    for g, leaf in zip(found, inputs, strict=True):
        g = g.detach() if isinstance(g, gw.Tensor) else g
        options = {"force": True} if isinstance(g, torch.Tensor) else {}
        made.append(np.zeros(leaf.shape) if g is None else g.numpy(**options))
    return made


@pytest.mark.parametrize("second", [False, True], ids=["first", "second"])
@pytest.mark.parametrize("section", DIFFERENTIABLE)
def test_expressions_in_torch_spelling_have_the_gradients_of_torch(section: str, second: bool) -> None:
    compared = 0
    for text in sections()[section]:
        theirs, mine = spaces(differentiable=True)
        leaves = [n for n, v in theirs.items() if isinstance(v, torch.Tensor) and v.requires_grad]
        try:
            truth = gradients(text, torch, theirs, leaves, second)
        except (RuntimeError, NotImplementedError):  # has no gradient in torch
            continue
        if truth is None:
            continue
        found = gradients(text, gw, mine, leaves, second)
        for name, a, b in zip(leaves, found or [np.zeros(t.shape) for t in truth], truth, strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4 if not second else 1e-3, err_msg=f"{text}: {name}")
            compared += bool(b.any())
    curved = ("unary method", "reduce", "linalg", "F losses")
    assert compared or section not in (curved if second else (*curved, "shape", "index"))


BAD: dict[str, type[GraphwrightError]] = {
    "T.gcd(v, w)": DTypeError,
    "T.nextafter(J, J)": DTypeError,
    "T.mvlgamma(y, 0)": UsageError,
    "T.slice_scatter(x, y[:1], 0, 1, 3)": ShapeError,
    "T.scatter_add(x, 0, I, v)": ShapeError,
    "T.scatter_reduce(x, 0, I, v, 'amax')": ShapeError,
    "x.put_(J, v[:1])": ShapeError,
    "T.index_add(x, 0, J, y[:2].double())": DTypeError,
    "T.index_add(x, 0, J, v)": ShapeError,
    "T.index_copy(x, 0, J, y[:1])": ShapeError,
    "T.index_copy(x, 0, J, y[:2, :1])": ShapeError,
    "T.index_fill(x, 0, J, v)": ShapeError,
    "T.masked_select(x, z)": DTypeError,
    "T.masked_select(x, m[:2])": ShapeError,
    "T.masked_scatter(x, m[:2], y)": ShapeError,
    "T.bincount(J, minlength=-1)": UsageError,
    "T.histc(T.tensor([1.0, float('nan')]), 4)": UsageError,
    "T.histc(v, 0)": UsageError,
    "T.histc(v, 4, 1, -1)": UsageError,
    "T.unique(T.tensor(1.0), dim=0)": ShapeError,
    "T.quantile(x, T.tensor([[0.1]]))": ShapeError,
    "T.quantile(v[:0], 0.5)": ShapeError,
    "T.median(x[:0], 0)": ShapeError,
    "T.renorm(x, 2, 0, -1.0)": UsageError,
    "x.narrow(0, 1.5, 1)": DTypeError,
    "v.unfold(0, 3, 0)": ShapeError,
    "v.unfold(0, -1, 1)": ShapeError,
    "T.meshgrid()": UsageError,
    "T.meshgrid(x)": ShapeError,
    "T.cartesian_prod()": UsageError,
    "T.combinations(x)": ShapeError,
    "T.combinations(v, -1)": ShapeError,
    "T.block_diag(B)": ShapeError,
    "T.tril_indices(-1, 2)": ShapeError,
    "T.tensordot(x, y, 3)": ShapeError,
    "T.tensordot(x, y, -1)": ShapeError,
    "T.tensordot(x, y, ([0], [0, 1]))": ShapeError,
    "T.tensordot(x, y, ([0, 0], [0, 1]))": ShapeError,
    "T.cosine_similarity(x, y[:2])": ShapeError,
    "F.binary_cross_entropy(p, p[:, :1])": ShapeError,
    "F.binary_cross_entropy_with_logits(x[:, :1], p[:, 0])": ShapeError,
    "F.cross_entropy(x, J[[0, 1, 1]], label_smoothing=1.5)": UsageError,
    "F.gaussian_nll_loss(x, y, -y)": UsageError,
    "F.margin_ranking_loss(x, x[0], y[0])": ShapeError,
    "F.multi_margin_loss(x, t, p=3)": UsageError,
    "F.ctc_loss(seq, T.ones(4, 3).long(), T.tensor([2] * 4), T.tensor([4] * 4))": ShapeError,
    "F.ctc_loss(seq, T.ones(4, 3).long(), T.tensor([2] * 4), T.tensor([-1] * 4))": ShapeError,
    "F.ctc_loss(seq, T.ones(7).long(), T.tensor([2] * 4), T.tensor([2] * 4))": ShapeError,
    "F.ctc_loss(seq, T.ones(9).long(), T.tensor([2] * 4), T.tensor([2] * 4))": ShapeError,
    "F.ctc_loss(seq, T.ones(1, 3).long(), T.tensor([2] * 4), T.tensor([2] * 4))": ShapeError,
    "F.celu(x, 0.0)": UsageError,
    "F.interpolate(z[None, None], size=(2, 2), mode='bicubic')": DTypeError,
    "F.affine_grid(B[:, :2, :3], (3, 1, 4, 5))": ShapeError,
    "F.affine_grid(B[:, :2, :3], (2, 1, 4))": ShapeError,
    "F.affine_grid(B[:, :2, :3], (2, 1, 0, 4))": ShapeError,
    "F.embedding_bag(J, A, T.tensor([0, 9]), include_last_offset=True)": ShapeError,
}
"""Calls that torch refuses too -> the error here."""


@pytest.mark.parametrize("text", BAD)
def test_bad_input_raises_a_typed_error(text: str) -> None:
    theirs, mine = spaces()
    with pytest.raises((RuntimeError, TypeError, ValueError, IndexError)):
        eval(text, theirs)
    with pytest.raises(BAD[text]):
        eval(text, mine)


def test_a_hard_gumbel_softmax_is_one_hot_where_the_soft_one_has_ties() -> None:
    x = gw.tensor(np.tile([3e4, -3e4], (1, 8)).astype("f4")).bfloat16()  # the noise is lost in rounding
    found = gw.nn.functional.gumbel_softmax(x, hard=True)
    assert found.float().sum().item() == 1.0


@pytest.mark.parametrize("function", [gw.cosine_similarity, gw.pairwise_distance])
def test_similarities_of_bfloat16_are_computed_in_float32_and_rounded_once(function: Any) -> None:
    x, y = (gw.tensor(INPUTS[name]).bfloat16() for name in "xy")
    wide = function(x.float(), y.float())
    found = function(x, y)
    assert found.dtype.name == "bfloat16"
    np.testing.assert_array_equal(found.float().numpy(), wide.bfloat16().float().numpy())


@pytest.mark.parametrize("name", sorted(n for n, row in names.NAMES.items()))
def test_names_are_those_of_torch(name: str) -> None:
    row = names.NAMES[name]
    assert row.function.__doc__
    for home, owner in ((names.METHOD, torch.Tensor), (names.TOP, torch)):
        if home in row.homes:
            assert hasattr(owner, name) or row.differs, home
    assert not row.in_place or hasattr(torch.Tensor, f"{name}_") or row.differs


def test_both_names_of_a_parameter_work_and_together_are_refused() -> None:
    x = gw.tensor(INPUTS["x"])
    for a, b in ((x.sum(dim=1), x.sum(axis=1)), (x.mean(1, keepdim=True), x.mean(axis=1, keepdims=True))):
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    with pytest.raises(UsageError, match="two names of one parameter"):
        x.sum(dim=1, axis=1)
    with pytest.raises(UsageError, match="a parameter is missing"):
        x.cumsum()
    with pytest.raises(GraphwrightError):
        x.sum(dim=5)


def test_the_package_exports_each_name() -> None:
    assert set(names.functions()) <= set(dir(gw))
    for name, function in names.functions().items():
        assert getattr(gw, name) is function or name in ("dropout",)


def test_the_page_of_names_is_up_to_date() -> None:
    script = Path(__file__).parents[2] / "scripts" / "torch_names.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
