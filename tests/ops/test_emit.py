"""The emit table is total, and each text computes what its op computes."""

from __future__ import annotations

import ast
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from graphwright.array import Spec, dtype, from_numpy
from graphwright.autograd import as_tensor
from graphwright.models.codegen.modules import form_of_groups
from graphwright.models.codegen.templates import CLASSES, HELPERS
from graphwright.ops import OPS, call
from graphwright.ops.emit import Source, appends, is_primary

SCOPE: dict = {"torch": torch, "F": F, "nn": torch.nn, "ALL_ATTENTION_FUNCTIONS": ALL_ATTENTION_FUNCTIONS}
exec("\n\n".join([*HELPERS.values(), *CLASSES.values()]), SCOPE)


class Run:
    """What texts read of a forward pass."""

    B, T, dtype, cache, attentions, tokens, past = 2, 4, torch.float32, None, None, None, 0


EMIT = {name: row.emit for name, row in OPS.items() if row.emit is not None}
MODULES = {name: row.torch_module for name, row in OPS.items() if row.torch_module is not None}


def test_every_op_has_source_text_or_a_reason():
    for name, row in OPS.items():
        assert (name in EMIT or name in MODULES) != bool(row.why.get("emit")), name
    several = [n for n in EMIT if len(_run(n, 0)[0]) > 1]
    assert set(several) == {n for n in EMIT if OPS[n].results}


def _run(name: str, seed: int):
    row = OPS[name]
    operands, attrs = row.sample(np.random.default_rng(seed))
    attrs = row.complete(attrs)
    arrays = [np.asarray(o) for o in operands]
    ours = call(name, *(as_tensor(from_numpy(a)) for a in arrays), **attrs)
    return (ours if isinstance(ours, tuple) else (ours,)), arrays, attrs


def evaluate(name: str, arrays: list[np.ndarray], attrs: dict):
    scope = {**SCOPE, "run": Run(), **{f"x{i}": torch.from_numpy(a.copy()) for i, a in enumerate(arrays)}}
    text = EMIT[name]([f"x{i}" for i in range(len(arrays))], attrs)
    assert text is not None
    found = eval(text, scope)
    return found if isinstance(found, tuple) else (found,)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", EMIT)
def test_generated_source_computes_the_op(name, seed):
    ours, arrays, attrs = _run(name, seed)
    if name == "rms_norm":  # exported norms take their statistics in float32, as the classes of transformers do
        arrays = [a.astype(np.float32) for a in arrays]
    theirs = evaluate(name, arrays, attrs)
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        a = a.data.to_numpy()
        assert a.shape == tuple(b.shape)
        rtol = 1e-5 if "float32" in (str(a.dtype), str(b.numpy().dtype)) else 1e-10
        np.testing.assert_allclose(b.numpy(), a, rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("name", "shape", "attrs"),
    [
        ("slice", (2, 7, 3), {"axis": -1, "start": 0, "size": 2, "step": 1}),
        ("slice", (2, 7, 3), {"axis": -2, "start": 1, "size": 3, "step": 2}),
        ("slice", (2, 7, 3), {"axis": 2, "start": 2, "size": 1, "step": 3}),
        ("last", (2, 7, 3), {"axis": -2}),
        ("sum", (2, 3), {"axes": (), "keepdims": False}),
        ("mean", (2, 3, 4), {"axes": (0, 2), "keepdims": True}),
        *(
            (name, (2, 3), {"axes": None, "keepdims": k})
            for name in ("sum", "prod", "amax", "all")
            for k in (False, True)
        ),
        ("full_like", (2, 3), {"value": float("-inf")}),
        ("full_like", (2, 3), {"value": float("nan")}),
        ("unflatten", (3, 6), {"axis": 1, "sizes": (6,)}),
        ("unflatten", (3, 6), {"axis": -1, "sizes": (3, 2)}),
        ("concat", (3, 6), {"axis": -1}),
        ("gelu", (3, 6), {"approximate": "none"}),
        ("cast", (3, 6), {"dtype": dtype("bfloat16")}),
    ],
)
def test_generated_source_of_special_attributes_matches_the_op(name, shape, attrs):
    array = np.random.default_rng(0).normal(size=shape)
    ours = call(name, as_tensor(from_numpy(array)), **attrs)
    theirs = evaluate(name, [array], OPS[name].complete(attrs))[0]
    np.testing.assert_allclose(theirs.double().numpy(), ours.data.to_numpy("float64"), rtol=1e-12)


def test_named_sizes_are_read_from_the_run():
    assert EMIT["reshape"](["x"], {"shape": ("B", "T", 6)}) == "x.reshape(run.B, run.T, 6)"
    assert EMIT["expand"](["x"], {"shape": ("B", 6)}) == "x.expand(run.B, 6)"


@pytest.mark.parametrize("attrs", [{"causal": False}, {"optional": ("key_mask",)}])
def test_attention_unsupported_by_generated_code_has_no_module(attrs):
    full, spec = OPS["sdpa"].complete({"scale": 1.0, **attrs}), Spec((2, 4, 3, 8), dtype("float32"))
    assert MODULES["sdpa"].args([spec] * (3 + len(full["optional"])), full) is None


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", MODULES)
def test_a_module_computes_its_op(name, seed):
    form, (ours, arrays, attrs) = MODULES[name], _run(name, seed)
    if OPS[name].traits.table is not None:
        return  # its module reads stored blocks: tests/models/export/test_pattern_exports.py runs it
    specs = [Spec(a.shape, dtype(str(a.dtype))) for a in arrays]
    if (args := form.args(specs, attrs)) is None:
        rare = {"rms_norm": ("cast_before_scale", "unit_offset"), "layer_norm": ("rank",)}[name]  # written as text
        assert all(attrs[a] > (a == "rank") for a in rare) or (name == "layer_norm" and len(arrays) == 1)
        return
    if (groups := OPS[name].groups) is not None:
        first, width = groups(attrs)
        kinds = ("weight", "bias")[: 1 + attrs.get("bias", False)]
        each = "qkvo" if OPS[name].traits.routed_heads else ["gate", "up", "down"][-(width // len(kinds)) :]
        names = [f"{n}.{kind}" for n in each for kind in kinds]
        keys = [f"at.{3 * e}.{n}" for e in range((len(arrays) - first) // width) for n in names]
        found = form_of_groups(form, args, first, keys, width)
        assert found is not None
        form, args = found[0], found[1].args
    module = eval(form.name, SCOPE)(*(eval(a, SCOPE) if isinstance(a, Source) else a for a in args))
    tensors = [torch.from_numpy(a.astype(np.float32) if a.dtype.kind == "f" else a) for a in arrays]
    weights = {key: tensors[i] for i, key in form.weights.items() if i < len(tensors)}
    module.load_state_dict(weights)
    given: list[object] = [t for i, t in enumerate(tensors) if i not in form.weights]
    run = Run()
    if OPS[name].traits.attention:
        queries, keys = (torch.arange(t.shape[2]) for t in tensors[:2])
        queries = queries[:, None] + len(keys) - len(queries)
        hidden = (keys > queries) | (keys <= queries - (attrs["window"] or len(keys)))
        run.masks = {attrs["window"]: torch.where(hidden, -torch.inf, 0.0)}  # pyright: ignore[reportAttributeAccessIssue]
        module.config = SimpleNamespace(_attn_implementation="eager")
    given += [run] if form.run else []
    with torch.no_grad():
        np.testing.assert_allclose(module(*given).numpy(), ours[0].data.to_numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", sorted(EMIT))
def test_is_primary_distinguishes_operators_from_primaries(name):
    _, arrays, attrs = _run(name, 0)
    text = EMIT[name]([f"x{i}" for i in range(len(arrays))], attrs)
    assert text is not None
    body = ast.parse(text, mode="eval").body
    assert isinstance(body, ast.BinOp | ast.UnaryOp | ast.Compare | ast.IfExp) != is_primary(text)
    assert appends(EMIT[name], len(arrays), attrs) == text.startswith(("x0.", "x0["))
