"""Attention over patterns in ONNX: windows, masks of blocks, planes, rows without keys, caches, refusals."""

from __future__ import annotations

import checkpoints
import numpy as np
import onnx
import pytest

import graphwright as gw
from block_edges import edges_of
from graphwright import attention as at
from graphwright.models import ExportError
from graphwright.models.onnx import run_cached, run_onnx, save_onnx
from graphwright.program import Value
from seeds import some

TOKENS = 48


def patterns() -> dict[str, at.Pattern]:
    star = at.star(TOKENS, global_tokens=3, window=9, block=4)
    star.cut(star.edges()[star.pairs()[:, 1] == 4])  # a block of queries without keys
    star.connect(9, 2)
    random = at.random_blocks(TOKENS, 2, block=5, planes=6) | at.block_local(TOKENS, 0, block=5, planes=6)
    random.cut(random.edges()[(random.pairs()[:, 0] == 2) & (random.pairs()[:, 2] == 1)])
    groups = at.sliding_window(TOKENS, 11, block=4, planes=2)
    groups.cut(edges_of(groups, (7, 6, 1)))
    window = at.sliding_window(TOKENS, 11, block=4)
    return {"star": star, "heads": random, "groups": groups, "window": window}


@pytest.mark.parametrize("name", patterns())
@pytest.mark.parametrize("opset", some([23, 20], 2))
def test_patterns_become_masks(made, tmp_path, name, opset):
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.*.attn", patterns()[name])
    before = m.program.hash()
    file = save_onnx(m.program, tmp_path / "model.onnx", opset=opset)
    assert m.program.hash() == before
    for shape in ((1, 1), (2, 7), (2, TOKENS)):
        ids = checkpoints.some_ids(shape, seed=shape[1])
        feed = {"ids": ids, "positions": np.broadcast_to(np.arange(shape[1]), shape).copy()}
        (run,) = run_onnx(file, [feed])
        assert checkpoints.relative(run["logits"], m.logits(ids)) <= 1e-5
    stored = [t for t in onnx.load(file).graph.initializer if t.data_type == onnx.TensorProto.BOOL and len(t.dims) == 3]
    assert len(stored) == (name != "window")  # layers share one mask


@pytest.mark.parametrize("name", ["star", "groups", "window"])
def test_patterns_are_read_through_a_cache(made, tmp_path, name):
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.*.attn", patterns()[name])
    file = save_onnx(m.program, tmp_path / "model.onnx", cache=True)
    ids = checkpoints.some_ids((2, 40), seed=2)
    for cuts in ((), (1, 17, 18, 39)):
        assert checkpoints.relative(run_cached(file, ids, cuts), m.logits(ids)) <= 1e-5


def test_a_softcap_is_applied_before_the_mask(made, tmp_path):
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.*.attn", patterns()["star"])
    ids = checkpoints.some_ids((2, 40), seed=2)
    before = m.logits(ids)
    with m.program.edit("softcap") as e:
        for node in m.program.of_traits(attention=True):
            e.set_attr(node, softcap=0.05)
    assert checkpoints.relative(m.logits(ids), before) > 1e-3
    file = save_onnx(m.program, tmp_path / "model.onnx")
    (run,) = run_onnx(file, [{"ids": ids, "positions": np.broadcast_to(np.arange(40), ids.shape).copy()}])
    assert checkpoints.relative(run["logits"], m.logits(ids)) <= 1e-5


def test_what_a_mask_cannot_express_is_refused(made, tmp_path):
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.1.attn", patterns()["star"])
    node = m.program.node("layers.1.attn.sdpa")
    with m.program.edit("read the log-sum-exp") as e:
        e.set_outputs(logits=m.program.output("logits"), lse=Value(node, 1))
    with pytest.raises(ExportError, match=r"layers\.1\.attn\.sdpa.*(?s:.)*log-sum-exp"):
        save_onnx(m.program, tmp_path / "model.onnx")
    m = gw.open(made("llama").path)
    at.sparsify(m, "layers.1.attn", at.star(20000, global_tokens=3, window=64))
    with pytest.raises(ExportError, match="400,000,000 entries"):
        save_onnx(m.program, tmp_path / "model.onnx")
