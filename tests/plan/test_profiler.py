"""The profiler of eager code: what it records, what it writes, and that it restores all functions."""

from __future__ import annotations

import ast
import json
import sys
import threading
from importlib import import_module
from pathlib import Path

import numpy as np
import pytest

import graphwright as gw
from graphwright.errors import ShapeError, UsageError
from graphwright.plan import profiler


def loss_of(net, x):
    return (net(x) ** 2).mean()


@pytest.fixture
def net():
    gw.manual_seed(0)
    return gw.nn.Sequential(gw.nn.Linear(8, 16), gw.nn.Tanh(), gw.nn.Linear(16, 3))


def test_each_op_has_its_calls_costs_and_phase(net):
    x = gw.rand(32, 8)
    with gw.profile() as prof:
        for _ in range(3):
            loss_of(net, x).backward()
    rows = {(r.name, r.category): r for r in prof.rows()}
    linear, vjp = rows["linear", "forward"], rows["linear (vjp)", "backward"]
    assert (linear.calls, vjp.calls, rows["tanh", "forward"].calls) == (6, 6, 3)
    # 2·m·n·k for the products, and what the op table counts for the bias
    expected = [gw.ops.OPS["linear"].cost(ins, outs, {}) for ins, outs in linear_specs()]
    assert linear.flops == 3 * sum(c.flops for c in expected) >= 3 * 2 * 32 * (8 * 16 + 16 * 3)
    assert linear.nbytes == 3 * sum(c.read + c.write for c in expected)
    assert vjp.flops > linear.flops  # two products, one of which is not needed for x
    assert linear.total > 0
    assert linear.mean == pytest.approx(linear.total / 6)
    assert not any(name == "matmul" for name, _ in rows)  # it is in the vjp of linear
    inner = [e for e in prof.events if e.name == "matmul"]
    assert inner
    assert all(e.inner and e.category == "backward" for e in inner)


def linear_specs():
    f32 = gw.float32
    for k, n in ((8, 16), (16, 3)):
        yield (spec(32, k, f32), spec(n, k, f32), spec(n, dtype=f32)), (spec(32, n, f32),)


def spec(*shape, dtype=None):
    *sizes, kind = (*shape, dtype) if dtype is not None else shape
    return gw.array.Spec(tuple(sizes), kind)


def test_optimizers_accumulation_and_in_place_writes_are_recorded(net):
    x, opt = gw.rand(4, 8), gw.optim.Adam(net.parameters(), lr=1e-3)
    loss_of(net, x).backward()
    with gw.profile() as prof:
        loss_of(net, x).backward()
        opt.step()
        x.mul_(2.0)
        gw.ops.call("exp", x.data)
    rows = {(r.name, r.category) for r in prof.rows()}
    assert {("adam_step", "forward"), ("mul", "forward"), ("exp", "forward"), ("add", "backward")} <= rows


def test_the_trace_file_has_nested_events_with_shapes_and_threads(net, tmp_path):
    x = gw.rand(32, 8)
    compiled = gw.compile(net)
    compiled(x)
    with gw.profile() as prof:
        loss_of(net, x).backward()
        other = threading.Thread(target=lambda: gw.rand(5).exp())
        other.start()
        other.join()
        compiled(x)
    prof.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    timed = [e for e in events if e["ph"] == "X"]
    assert len(timed) == len(prof.events)
    assert all(e["ts"] >= 0 and e["dur"] > 0 and {"pid", "tid", "cat", "args"} <= e.keys() for e in timed)
    assert {e["tid"] for e in timed} == {0, 1} == {e["tid"] for e in events if e["ph"] == "M"}
    (exp,) = (e for e in timed if e["name"] == "exp")
    assert exp["tid"] == 1
    assert exp["args"]["results"] == ["f32[5]"]
    first = next(e for e in timed if e["name"] == "linear")
    assert first["args"]["operands"] == ["f32[32, 8]", "f32[16, 8]", "f32[16]"]
    assert first["args"]["path"] == "0"
    assert first["args"]["bytes"] > 4 * (32 * 8 + 16 * 8 + 16 + 32 * 16) - 1
    (backward,) = (e for e in timed if e["name"] == "backward")
    inside = [e for e in timed if e["cat"] == "backward" and e is not backward]
    assert inside
    assert all(backward["ts"] <= e["ts"] <= backward["ts"] + backward["dur"] for e in inside)
    assert [e["name"] for e in timed if e["cat"] == "plan"] == ["plan Sequential"]


def test_the_profile_of_a_plan_is_written_too(net, tmp_path):
    x = gw.rand(32, 8)
    plan = gw.trace(net, x).compile(x=(32, 8))
    found = plan.profile({"x": x}, n=1)
    found.save(tmp_path / "plan.json")
    events = [e for e in json.loads((tmp_path / "plan.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert [e["name"] for e in events] == [t.op for t in found.timings]
    assert events[-1]["ts"] + events[-1]["dur"] == pytest.approx(1e6 * found.seconds, abs=0.01)
    assert events[0]["args"]["operands"]


def test_all_functions_are_restored(net):
    owners = [(import_module(m), name) for m, name in profiler._HOOKS]
    before = [getattr(owner, name) for owner, name in owners]
    with pytest.raises(ShapeError), gw.profile() as prof:
        _ = gw.rand(2, 3) @ gw.rand(2, 3)
    assert [getattr(owner, name) for owner, name in owners] == before  # code outside of a profiler runs as without
    count = len(prof.events)
    gw.rand(3).exp()
    assert len(prof.events) == count
    with gw.profile(), pytest.raises(UsageError, match="running already"), gw.profile():
        pass
    with gw.profile() as again:
        gw.rand(3).exp()
    assert [r.name for r in again.rows() if r.name == "exp"] == ["exp"]


def test_results_do_not_change(net):
    x = gw.rand(4, 8)
    loss = loss_of(net, x)
    with gw.profile():
        other = loss_of(net, x)
    assert np.array_equal(loss.numpy(), other.numpy())


def test_every_name_by_which_tensors_run_ops_is_hooked():
    found = set()
    for module in {name.rpartition(".")[0] for name, _ in profiler._HOOKS}:
        folder = Path(sys.modules[module].__file__ or "").parent
        for file in folder.glob("*.py"):
            tree = ast.parse(file.read_text("utf-8"))
            names = {a.name for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) for a in n.names}
            defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
            if "compute" in names | defined and file.stem not in ("__init__", "support"):
                found.add((f"{module}.{file.stem}", "compute"))
    assert found == {hook for hook in profiler._HOOKS if hook[1] == "compute"}


def test_the_table_lists_the_slowest_first(net):
    with gw.profile() as prof:
        loss_of(net, gw.rand(4, 8)).backward()
    rows = prof.rows()
    assert [r.total for r in rows] == sorted((r.total for r in rows), reverse=True)
    head, first, *_ = str(prof).splitlines()
    assert head.split()[:3] == ["name", "category", "calls"]
    assert first.startswith(rows[0].name)
