"""Summaries against torch: shapes by hooks, parameters, and its count of FLOPs of products and convolutions."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import graphwright as gw
from graphwright.errors import UsageError


def network(nn: Any) -> Any:
    """Products without biases and functions of a few FLOPs."""
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, bias=False))
    return nn.Sequential(body, nn.Flatten(), nn.Identity(), nn.Linear(32, 64, bias=False), nn.Linear(64, 5, bias=False))


X = np.zeros((2, 3, 8, 8), "f4")


def test_a_module_is_summarised_as_torch_runs_it() -> None:
    found, theirs = gw.summary(network(gw.nn), X), network(torch.nn)
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in theirs.named_modules():
        module.register_forward_hook(lambda m, args, out, path=path: shapes.setdefault(path, tuple(out.shape)) and None)
    with FlopCounterMode(display=False) as counter:
        theirs(torch.from_numpy(X))
    assert {row.path: row.outputs[0] for row in found.rows} == shapes
    modules = dict(theirs.named_modules())
    assert [(row.path, row.type) for row in found.rows] == [(n, type(m).__name__) for n, m in modules.items()]
    for row in found.rows:
        assert row.parameters == sum(p.numel() for p in modules[row.path].parameters())
    counts = counter.get_flop_counts()
    for row in found.rows:
        if row.type in ("Linear", "Conv2d"):
            assert row.flops == sum(counts[f"Sequential.{row.path}"].values())
    pooled = next(row.flops for row in found.rows if row.type == "MaxPool2d")
    assert found.flops == counter.get_total_flops() + pooled


def test_a_program_is_summarised_by_its_groups_at_the_sizes_of_the_inputs() -> None:
    net = network(gw.nn)
    program = gw.trace(net, X, sizes={"x": ("B", 3, 8, 8)})
    for batch in (1, 7):
        given = np.zeros((batch, 3, 8, 8), "f4")
        mine, wanted = gw.summary(program, given), gw.summary(net, given)
        rows = {row.path: row for row in mine.rows}
        assert (mine.parameters, mine.flops, mine.nbytes) == (wanted.parameters, wanted.flops, wanted.nbytes)
        for row in wanted.rows:
            if row.path in rows and row.path:
                assert (rows[row.path].outputs, rows[row.path].flops) == (row.outputs, row.flops)
    assert gw.summary(program).flops == gw.summary(program, X[:1]).flops
    assert [row.path for row in gw.summary(program, depth=1).rows] == ["", "0", "1", "3", "4"]
    with pytest.raises(UsageError, match="do not fit"):
        gw.summary(program, X[:, :2])


def test_figures_of_a_model_are_those_of_inspect() -> None:
    model = gw.open("bundled")
    found, look = gw.summary(model.program), model.inspect()
    assert (found.parameters, found.flops, found.nbytes) == (look.parameters, look.flops_per_token, look.nbytes)
    rows = {row.path: row for row in found.rows}
    up = rows["layers.0.mlp.up"]  # the path of an op too
    assert (up.type, up.outputs, up.parameters, up.flops) == ("linear", ((1, 1, 512),), 512 * 192, 2 * 512 * 192)


def test_text_json_and_results_of_several_tensors() -> None:
    net = gw.nn.LSTM(4, 5)
    net.get_parameter("bias_ih_l0").requires_grad = False
    found = gw.summary(net, np.zeros((6, 2, 4), "f4"))
    lines = str(found).splitlines()
    assert lines[0].split() == ["path", "type", "output", "parameters", "FLOP"]
    assert lines[1].startswith("(all)  LSTM  6x2x5, 1x2x5, 1x2x5")
    assert lines[-1].startswith("220 parameters, 200 of them trained, 880 B; ")
    assert json.loads(json.dumps(found.to_json()))["rows"][0]["outputs"] == [[6, 2, 5], [1, 2, 5], [1, 2, 5]]
    assert net(gw.tensor(np.zeros((6, 2, 4), "f4")))[0].shape == (6, 2, 5)  # no hook is left


def test_shared_modules_count_once_and_other_targets_are_refused() -> None:
    layer = gw.nn.Linear(3, 3)
    found = gw.summary(gw.nn.Sequential(layer, layer), np.zeros((1, 3), "f4"))
    assert (found.parameters, [row.path for row in found.rows]) == (12, ["", "0"])
    assert found.flops == 2 * gw.summary(layer, np.zeros((1, 3), "f4")).flops
    with pytest.raises(UsageError, match="Module or Program"):
        gw.summary(3)  # pyright: ignore[reportArgumentType]
