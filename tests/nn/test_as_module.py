"""Modules and programs inside torch: torch's values, gradients and optimizers, memory shared or copied."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright import nn
from graphwright.autograd import Tensor, tensor
from graphwright.errors import UsageError
from values import array_of, grad_of

X = np.random.default_rng(0).normal(size=(5, 4)).astype("f4")


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


def reference(net: Net) -> torch.nn.Sequential:
    """The same in torch, with the same values."""
    made = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3, bias=False))
    values = [torch.from_numpy(p.numpy().copy()) for p in net.parameters()]
    with torch.no_grad():
        for p, v in zip(made.parameters(), values, strict=True):
            p.copy_(v)
    return made


def targets() -> dict[str, Any]:
    net = Net()
    return {"module": net, "program": gw.trace(net, X)}


@pytest.mark.parametrize("kind", ["module", "program"])
@pytest.mark.parametrize("share", [True, False])
def test_training_matches_a_torch_module(kind: str, share: bool) -> None:
    both = targets()
    net = both["module"]
    start = [p.numpy().copy() for p in net.parameters()]
    theirs, ours = reference(net), nn.as_module(both[kind], share=share)
    assert [n for n, _ in ours.named_parameters()] == ["up.weight", "up.bias", "down.weight"]
    tail = [torch.nn.Linear(3, 2) for _ in range(2)]
    tail[1].load_state_dict(tail[0].state_dict())
    pairs = list(zip((ours, theirs), tail, strict=True))
    optimizers = [torch.optim.SGD([*m.parameters(), *t.parameters()], lr=0.1) for m, t in pairs]
    for _ in range(4):
        seen = []
        for (m, t), optimizer in zip(pairs, optimizers, strict=True):
            x = torch.tensor(X, requires_grad=True)
            optimizer.zero_grad()
            loss = (t(m(x * 1.5)) ** 2).mean()  # torch before and after it
            loss.backward()
            seen.append([loss.detach(), grad_of(x), *(grad_of(p).clone() for p in m.parameters())])
            optimizer.step()
        for a, b in zip(*seen, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert all(p.grad is None for p in net.parameters())  # torch's gradients are torch's
    for before, mine, other in zip(start, net.parameters(), theirs.parameters(), strict=True):
        if share:
            np.testing.assert_allclose(mine.numpy(), other.detach().numpy(), rtol=1e-5, atol=1e-6)
        else:
            assert np.array_equal(mine.numpy(), before)


@pytest.mark.parametrize("kind", ["module", "program"])
def test_torch_and_graphwright_train_shared_memory(kind: str) -> None:
    both = targets()
    net, m = both["module"], nn.as_module(both[kind])
    x = torch.from_numpy(X)
    plan = gw.compile(gw.trace(net, X), freeze=True)
    m(x).sum().backward()
    torch.optim.SGD(m.parameters(), lr=0.5).step()
    version = net.up.weight.data.storage.version
    m.written()
    assert net.up.weight.data.storage.version > version  # plans with folded weights are invalidated
    expected = net(tensor(X)).numpy()
    np.testing.assert_allclose(plan(x=X)["out"].numpy(), expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(m(x).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    net(tensor(X)).sum().backward()
    with gw.no_grad():
        for p in net.parameters():
            p.sub_(grad_of(p) * 0.1)
    np.testing.assert_allclose(m(x).detach().numpy(), net(tensor(X)).numpy(), rtol=1e-6)


def test_the_torch_module_follows_an_edit_and_undo() -> None:
    p = targets()["program"]
    m = nn.as_module(p)
    key = "up.weight"
    before = p.weights[key].data.tobytes()
    with p.edit("halve") as e:
        e.set_weight(key, lambda w: 0.5 * w)
    half = m(torch.from_numpy(X))
    np.testing.assert_allclose(half.detach().numpy(), p(x=X)["out"].numpy(), rtol=1e-6)
    half.sum().backward()
    torch.optim.SGD(m.parameters(), lr=1.0).step()
    p.undo()
    assert p.weights[key].data.tobytes() == before


def test_frozen_operands_get_no_gradient_and_no_grad_runs_the_plan() -> None:
    both = targets()
    net = both["module"]
    net.up.weight.requires_grad = False
    m = nn.as_module(net)
    assert [p.requires_grad for p in m.parameters()] == [False, True, True]
    m(torch.from_numpy(X)).sum().backward()
    assert m.get_parameter("up.weight").grad is None
    assert m.get_parameter("down.weight").grad is not None
    assert not net.up.weight.requires_grad
    planned = nn.as_module(both["program"])
    with torch.no_grad():
        out = planned(torch.from_numpy(X))
    assert not out.requires_grad
    (expected,) = both["program"](x=X).values()
    np.testing.assert_allclose(out.numpy(), expected.numpy(), rtol=1e-6)


def test_named_inputs_several_outputs_and_integer_inputs_work() -> None:
    b = gw.Builder()
    ids, w = b.input("ids", ("B",), "int64"), b.input("scale", (), "float32")
    rows = b.op("embedding", b.param("table", np.arange(12, dtype="f4").reshape(4, 3)), ids)
    b.output(b.op("mul", rows, w), "rows")
    b.output(b.op("argmax", rows, axis=-1), "best")
    m = nn.as_module(b.build())
    scale = torch.tensor(2.0, requires_grad=True)
    out = m(scale=scale, ids=torch.tensor([2, 0, 2]))
    assert set(out) == {"rows", "best"}
    assert (out["best"].dtype, out["best"].requires_grad) == (torch.int64, False)
    out["rows"].sum().backward()
    assert m.table.grad.tolist() == [[2.0] * 3, [0.0] * 3, [4.0] * 3, [0.0] * 3]
    assert scale.grad == 6 + 7 + 8 + 0 + 1 + 2 + 6 + 7 + 8
    for wrong in ({"ids": torch.tensor([1])}, {"ids": torch.tensor([1]), "scale": scale, "more": scale}):
        with pytest.raises(TypeError, match="ids, scale"):
            m(**wrong)

    class Two(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2.0, x.sum()

    for two in (Two(), gw.trace(Two(), np.ones(3, "f4"))):
        double, total = nn.as_module(two)(torch.ones(3))
        assert (double.tolist(), total.item()) == ([2, 2, 2], 3)
    with pytest.raises(UsageError):
        nn.as_module(torch.nn.Linear(1, 1))  # pyright: ignore[reportArgumentType]


def test_unused_outputs_and_16_bit_weights_have_correct_gradients() -> None:
    class Low(nn.Module):
        def __init__(self) -> None:
            self.weight = nn.Parameter(array_of(tensor(np.ones((3, 4))).to("bfloat16")))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return gw.ops.call("linear", x, self.weight), x * 3.0

    m = nn.as_module(Low())
    assert m.weight.dtype == torch.bfloat16
    x = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    m(x)[0].sum().backward()
    assert (m.weight.grad.dtype, m.weight.grad.unique().tolist()) == (torch.bfloat16, [2.0])
    assert x.grad is not None
    with pytest.raises(RuntimeError):
        torch.autograd.grad(torch.autograd.grad((m(x)[0] ** 2).sum(), x, create_graph=True)[0].sum(), x)


def test_a_module_in_inference_mode_can_be_trained() -> None:
    net = gw.trace(Net(), X)
    with torch.inference_mode():
        m = nn.as_module(net)
        m(torch.from_numpy(X))
    m(torch.from_numpy(X)).sum().backward()
    assert all(p.grad is not None for p in m.parameters())


def test_nested_results_and_none_keep_their_structure() -> None:
    x = torch.randn(3, 2, 4)
    for name, arguments, operands in (("LSTM", (4, 5, 2), 1), ("MultiheadAttention", (4, 2), 3)):
        mine = getattr(nn, name)(*arguments)
        theirs = getattr(torch.nn, name)(*arguments)
        mine.load_state_dict(theirs.state_dict())
        wrapped = nn.as_module(mine)
        for found, wanted in zip(wrapped(*operands * [x]), theirs(*operands * [x]), strict=True):
            for a, b in zip(*((v if isinstance(v, tuple) else (v,)) for v in (found, wanted)), strict=True):
                torch.testing.assert_close(a, b)
        wrapped(*operands * [x])[0].sum().backward()
        theirs(*operands * [x])[0].sum().backward()
        for a, b in zip(wrapped.parameters(), theirs.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_a_call_leaks_no_memory() -> None:
    m = nn.as_module(Net())
    gc.disable()
    try:
        x = torch.ones(5, 4, requires_grad=True)
        out = m(x)
        held = weakref.ref(out.grad_fn)
        out.sum().backward()
        del out
        assert held() is None
    finally:
        gc.enable()


def test_torch_tensors_convert_both_ways() -> None:
    theirs = torch.arange(3.0)
    shared = gw.autograd.as_tensor(theirs)
    theirs[0] = 7
    assert shared.tolist() == [7, 1, 2]
    assert torch.from_dlpack(shared).data_ptr() == theirs.data_ptr()
    assert gw.tensor(theirs).numpy().ctypes.data != theirs.data_ptr()
    assert gw.tensor(torch.ones(2, dtype=torch.bfloat16)).dtype is gw.bfloat16
    with pytest.raises(BufferError, match="detach"):
        torch.from_dlpack(gw.tensor([1.0], requires_grad=True))
