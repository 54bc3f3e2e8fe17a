"""Structures of vision networks: outputs beside torch, cut = masked on every free axis, in-place operators, state."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from vision_networks import BLOCKS, Network, conv

import graphwright as gw
from axis_samples import agree
from graphwright.program import FrozenAxis

FREE = {
    "residual": {"stem.0.channels", "block.channels"},
    "inverted": {"stem.0.channels", "block.up.0.weight:0", "block.squeeze.weight:0"},
    "responsenorm": {"stem.0.channels", "block.neurons"},
    "shuffled": {"stem.0.weight:0", "stem.0.weight:0'", "block.branch.channels"},
    "dense": {"stem.0.channels", *(f"block.layers.{i}.0.weight:0" for i in range(3)), "block.join.0.channels"},
    "grouped": {"stem.0.channels", "block.layers.channel_groups", "block.layers.0.0.weight:0",
                "block.layers.1.0.weight:0"},
    "scaled": {"block.neurons"},
    "windows": {"block.heads", "block.neurons"},
    "patches": {"block.attention.heads", "block.attention.head_dim", "block.neurons"},
}  # fmt: skip
"""Axes of which units can be removed, and then give what they give multiplied by 0."""


def opened(block: str, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(1)
    module = Network(BLOCKS[block]()).eval()
    return module, gw.from_torch(module, (torch.randn(2, 3, 4, 4),), sizes={"x": ("B", 3, 4, 4)}, **options)


def same(module: nn.Module, program: gw.Program, x: torch.Tensor) -> None:
    with torch.no_grad():
        want = module(x.clone())
    np.testing.assert_allclose(program(x=gw.tensor(x.numpy()))["out"].numpy(), want.numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", BLOCKS)
def test_structure_matches_torch_and_cut_is_masked_on_each_free_axis(block):
    module, p = opened(block)
    x = torch.randn(3, 3, 4, 4)
    same(module, p, x)
    free = {name for name, group in p.axes().items() if not group.frozen and not group.mixed}
    assert FREE[block] <= free
    for name in sorted(FREE[block]):
        group = p.axes()[name]
        agree(p, group.units([0, group.size - 1] if group.size > 2 else [0]), {"x": x.numpy()}, 1e-6)


@pytest.mark.deep
def test_entries_of_a_position_bias_that_a_reshape_arranges_cannot_be_removed():
    _, p = opened("windows")
    before = p.hash()
    with pytest.raises(FrozenAxis, match="index table"):
        p.axes()["block.table:0"].units([4]).prune()
    assert p.hash() == before


def test_blocks_in_a_list_of_stages_are_layers():
    torch.manual_seed(0)
    stage = lambda: nn.Sequential(conv(8, 8), BLOCKS["residual"](), BLOCKS["residual"]())  # noqa: E731
    module: Any = nn.Sequential(conv(3, 8), nn.Sequential(stage(), stage())).eval()
    wrapped = nn.Sequential()
    wrapped.add_module("stem", module[0])
    wrapped.add_module("stages", module[1])
    p = gw.from_torch(wrapped.eval(), (torch.randn(2, 3, 4, 4),), sizes={"input": ("B", 3, 4, 4)})
    units = p.select("stages.1.2.*").layers
    assert units.chosen == {"stages.1": (2,)}
    units.prune()
    module[1][1][2] = nn.ReLU()  # a residual block ends with an activation after its sum
    x = torch.randn(3, 3, 4, 4)
    with torch.no_grad():
        want = wrapped(x)
    np.testing.assert_allclose(p(input=gw.tensor(x.numpy()))["out"].numpy(), want.numpy(), rtol=1e-5, atol=1e-6)


# -- in-place operators ------------------------------------------------------------------------------------------------
class Written(nn.Module):
    """In-place operators on values that others share, by name of the case."""

    def __init__(self, case: str) -> None:
        super().__init__()
        self.case, self.linear = case, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        match self.case:
            case "after":  # the reader after the write sees it
                z = y.relu_()
                return y + z
            case "before":  # the reader before the write does not
                z = y * 2
                y.relu_()
                return y + z
            case "view":  # a view from before the write sees it
                z = y[:, :2]
                y.relu_()
                return y.sum(1, keepdim=True) + z
            case "through":  # a write through a view
                y[:, :2].relu_()
                return y
            case "transposed":
                y.T.relu_()
                return y
            case "dropout":  # in evaluation, dropout returns its operand
                z = nn.functional.dropout(y, 0.5, training=False)
                z.relu_()
                return y
            case "twice":
                y.add_(x).relu_()
                return y.mul_(y)
            case "itself":
                return y.add_(y)
            case "input":
                x.mul_(2)
                return self.linear(x)
            case "promoted":  # an in-place sum keeps the dtype
                return y.add_(x.double())
            case "reshaped":  # a reshape returns a view where it can
                z = y.reshape(-1)
                z.relu_()
                return y
            case _:
                raise NotImplementedError


CASES = ("after", "before", "view", "through", "transposed", "dropout", "twice", "itself", "input", "promoted",
         "reshaped")  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_in_place_operators_are_seen_by_whom_torch_lets_see_them(case):
    torch.manual_seed(0)
    module = Written(case).eval()
    p = gw.from_torch(module, (torch.randn(3, 4),), sizes={"x": ("B", 4)})
    same(module, p, torch.randn(5, 4))


def test_a_network_with_in_place_activations_is_captured_once():
    for block in ("residual", "inverted", "shuffled"):
        _, p = opened(block)
        assert "batch_norm" in p.imported.operators  # a decomposition would split it
        assert not any(name.endswith("_") for name in p.imported.operators)


def test_statistics_of_a_batch_are_written_in_training():
    module, _ = opened("residual")
    x = torch.randn(4, 3, 4, 4)
    p = gw.from_torch(module, (x,), train=True)
    module.train()
    module.drop.p = 0.0
    net = p.as_module()
    assert net.state_dict().keys() == module.state_dict().keys()
    for _ in range(3):
        module(x)
        net(x)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(net.state_dict()[key], value, rtol=1e-5, atol=1e-6)


# -- back in torch -----------------------------------------------------------------------------------------------------
class Stateful(nn.Module):
    """Buffers of all kinds, a tied weight, and tensors that the forward pass does not read."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.unread = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(2, 2)
        self.two.weight = self.one.weight
        self.convolved = conv(1, 3)
        self.register_buffer("order", torch.tensor([2, 0, 3, 1]))
        self.register_buffer("shift", torch.randn(4))
        self.register_buffer("hidden", torch.randn(4), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.two(self.one(x) + self.shift + self.hidden)[:, self.order]
        return self.convolved(y.view(-1, 1, 2, 2)).flatten(1)


@pytest.mark.parametrize("share", [True, False])
def test_as_module_has_the_state_of_the_module(share):
    torch.manual_seed(2)
    module, x = Stateful().eval(), torch.randn(3, 4)
    p = gw.from_torch(module, (x,), sizes={"x": ("B", 4)})
    for program in (p, p.fork()):
        net = program.as_module(share=share)
        assert net.state_dict().keys() == module.state_dict().keys()
        assert [n for n, _ in net.named_parameters()] == [n for n, _ in module.named_parameters()]
        for key, value in module.state_dict().items():
            assert torch.equal(net.state_dict()[key], value), key
        with torch.no_grad():
            torch.testing.assert_close(net(x), module(x))


@pytest.mark.parametrize("share", [True, False])
def test_as_module_loads_the_state_of_another_module(share):
    torch.manual_seed(3)
    other: Any = Stateful().eval()
    module, x = Stateful().eval(), torch.randn(3, 4)
    other.hidden.copy_(module.hidden)  # it is not in the state
    other.convolved[1].num_batches_tracked += 7
    other.order.copy_(torch.tensor([1, 1, 0, 2]))
    p = gw.from_torch(module, (x,), sizes={"x": ("B", 4)})
    before, state = p.hash(), {k: v.clone() for k, v in module.state_dict().items()}
    net = p.as_module(share=share)
    with torch.no_grad():
        net(x)  # a plan that has read the old values
        net.load_state_dict(other.state_dict(), strict=True)
        torch.testing.assert_close(net(x), other(x))
    assert net.state_dict()["convolved.1.num_batches_tracked"] == 7
    assert (p.hash() == before) == (not share)
    for key, value in module.state_dict().items():
        assert torch.equal(value, state[key]), key  # the module is left as it was


def test_as_module_of_a_pruned_program_has_the_remaining_buffers():
    module, p = opened("residual")
    p.axes()["block.channels"].units([0, 4]).prune()
    net = p.as_module()
    assert net.state_dict().keys() == module.state_dict().keys()
    assert net.state_dict()["block.one.1.running_mean"].shape == (4,)
