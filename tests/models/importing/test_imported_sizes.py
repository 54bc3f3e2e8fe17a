"""Named sizes of imported modules: derived, with examples of 1 or equal ones, fixed, and under conditions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import graphwright as gw
from graphwright.errors import ShapeError
from graphwright.models.importing.capture import capture
from graphwright.models.importing.report import Imported
from graphwright.program.errors import FeedError
from seeds import some


class Run(nn.Module):
    """A module of one function, with the layers that it uses."""

    def __init__(self, function: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self, x)


def _stack() -> nn.Module:
    first = nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2, 1, 1)
    return nn.Sequential(*first, nn.Conv2d(4, 6, 3, padding=1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 2))


IMAGE, ROWS = ("B", 3, "H", "W"), ("B", "T", 6)
IMAGES = [(2, 3, 16, 20), (1, 3, 9, 11), (3, 3, 24, 16)]
LENGTHS = [(2, 8, 6), (1, 5, 6), (3, 12, 6)]
MODULES: dict[str, tuple[Callable[[], nn.Module], Sequence[Any], list[tuple[int, ...]]]] = {
    "stack": (_stack, IMAGE, IMAGES),
    "patches": (lambda: Run(lambda m, x: m.p(x).flatten(2).transpose(1, 2), p=nn.Conv2d(3, 8, 4, 4)), IMAGE, IMAGES),
    "pooling": (lambda: Run(lambda m, x: F.avg_pool2d(x, 3, 2, 1) + F.max_pool2d(x, 3, 2, 1)), IMAGE, IMAGES),
    "interpolation": (
        lambda: Run(lambda m, x: F.interpolate(x, scale_factor=2, mode="bilinear")), IMAGE, IMAGES,
    ),
    "sizes of another": (
        lambda: Run(lambda m, x: F.interpolate(m.c(x), size=x.shape[2:], mode="nearest"), c=nn.Conv2d(3, 3, 2, 2)),
        IMAGE, IMAGES,
    ),
    "T + 1": (lambda: Run(lambda m, x: m.f(torch.cat([x.new_zeros(x.shape[0], 1, 6), x], 1)), f=nn.Linear(6, 3)),
              ROWS, LENGTHS),
    "T // 2": (lambda: Run(lambda m, x: x[:, : x.shape[1] // 2].cumsum(1)), ROWS, LENGTHS),
    "every other": (lambda: Run(lambda m, x: x[:, ::2] * 2), ROWS, LENGTHS),
    "4 T": (lambda: Run(lambda m, x: x.repeat(1, 4, 1).sum(0)), ROWS, LENGTHS),
    "B H": (lambda: Run(lambda m, x: m.f(x.reshape(x.shape[0] * x.shape[1], -1)).view(*x.shape[:2], -1),
                        f=nn.Linear(6, 4)), ROWS, LENGTHS),
    "reshape -1": (lambda: Run(lambda m, x: x.reshape(x.shape[0], -1, 3)), ROWS, LENGTHS),
    "mask": (lambda: Run(lambda m, x: (x @ x.transpose(1, 2)).masked_fill(
        torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e9).softmax(-1)), ROWS, LENGTHS),
    "bags": (lambda: Run(lambda m, x: m.e(x[..., 0].to(torch.int64) % 9), e=nn.EmbeddingBag(9, 4)), ROWS, LENGTHS),
    "mean": (lambda: Run(lambda m, x: x.sum(1) / x.shape[1]), ROWS, LENGTHS),
}  # fmt: skip


def opened(module: nn.Module, example: torch.Tensor, sizes: Sequence[Any]) -> gw.Program:
    (name,) = inspect.signature(module.forward).parameters
    return gw.from_torch(module.eval(), (example,), sizes={name: sizes})


def agree(program: gw.Program, module: nn.Module, x: torch.Tensor) -> None:
    found = program(**{program.input_names()[0]: gw.tensor(x.numpy())})["out"]
    np.testing.assert_allclose(found.numpy(), module(x).detach().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", MODULES)
def test_one_program_is_right_for_three_sizes(name):
    torch.manual_seed(0)
    make, sizes, shapes = MODULES[name]
    module = make()
    program = opened(module, torch.randn(shapes[0]), sizes)
    assert {n for n in program.spec(program.inputs()[0]).shape if isinstance(n, str)} == {
        n for n in sizes if isinstance(n, str)
    }
    for shape in shapes:
        agree(program, module, torch.randn(shape))


def _skips(m: Any, x: torch.Tensor) -> torch.Tensor:
    """A U-Net: halves twice, doubles twice, joined with what it had at that size."""
    first = m.a(x)
    second = m.b(F.max_pool2d(first, 2))
    third = m.c(F.max_pool2d(second, 2))
    up = torch.cat([m.up(third), second], 1)
    return m.out(torch.cat([F.interpolate(up, scale_factor=2, mode="nearest"), first], 1) + x.mean(1, keepdim=True))


def test_sizes_that_must_be_equal_are_equal():
    torch.manual_seed(0)
    convs = {n: nn.Conv2d(i, o, 3, padding=1) for n, i, o in (("a", 3, 4), ("b", 4, 4), ("c", 4, 6), ("out", 12, 2))}
    module = Run(_skips, **convs, up=nn.ConvTranspose2d(6, 4, 2, 2))
    program = opened(module, torch.randn(2, 3, 16, 20), IMAGE)
    assert program.spec(program.inputs()[0]).shape == IMAGE
    assert program.spec(program.node("out.conv")).shape == ("B", 2, "H", "W")
    for shape in ((1, 3, 8, 12), (3, 3, 24, 4)):
        agree(program, module, torch.randn(shape))
    with pytest.raises(ShapeError, match="H"):
        program(x=gw.tensor(torch.randn(2, 3, 18, 20).numpy()))


def test_a_recurrent_layer_fixes_its_number_of_steps():
    torch.manual_seed(0)
    layer = nn.GRU(6, 4, batch_first=True, bidirectional=True)
    module = Run(lambda m, x: m.r(x)[0].mean(1), r=layer)
    program = opened(module, torch.randn(2, 5, 6), ROWS)
    assert program.spec(program.inputs()[0]).shape == ("B", 5, 6)
    report: Any = program.imported
    assert report.fixed["T"].startswith("5,")
    agree(program, module, torch.randn(3, 5, 6))


def test_examples_of_size_1_and_of_equal_sizes_stay_named():
    torch.manual_seed(0)
    module = _stack()
    program = opened(module, torch.randn(1, 3, 16, 16), IMAGE)
    assert program.spec(program.inputs()[0]).shape == IMAGE
    for shape in IMAGES:
        agree(program, module, torch.randn(shape))


def test_a_size_that_the_code_fixes_is_a_number_and_named():
    module = Run(lambda m, x: sum(x[:, i] * i for i in range(x.shape[1])))
    captured = capture(module, (torch.randn(2, 5, 6),), {}, {"x": ROWS}, False)
    assert captured.sizes == {"x": ("B", 5, 6)}
    assert captured.fixed["T"].startswith("5,")
    program = opened(module, torch.randn(2, 5, 6), ROWS)
    agree(program, module, torch.randn(4, 5, 6))
    with pytest.raises(FeedError, match=r"4, 5, 6"):
        program(x=gw.zeros(4, 7, 6))


BRANCHES: dict[str, tuple[Callable[..., torch.Tensor], list[int], list[int]]] = {
    "T > 8": (lambda m, x: x * 2 if x.shape[1] > 8 else x * 3, [9, 12, 40], [8, 1]),
    "T != 1": (lambda m, x: x * 2 if x.shape[1] == 1 else x * 3, [2, 12], [1]),
    "T != 5": (lambda m, x: x * 2 if x.shape[1] == 5 else x * 3, [1, 4, 6, 12], [5]),
    "T % 4": (lambda m, x: x * 2 if x.shape[1] % 4 == 0 else x * 3, [4, 8, 12], [3, 9]),
    "6": (lambda m, x: x[:, : min(x.shape[1], 15)] * 2, [1, 12, 15], [16, 20]),
}  # fmt: skip


@pytest.mark.parametrize("name", BRANCHES)
def test_sizes_beyond_the_branch_that_was_captured_are_refused(name):
    function, valid, refused = BRANCHES[name]
    module = Run(function)
    program = opened(module, torch.randn(2, 12, 6), ROWS)
    for length in valid:
        agree(program, module, torch.randn(2, length, 6))
    for length in refused:
        x = np.zeros((2, length, 6), "f4")
        for run in (program.run, program, gw.compile(program)):
            with pytest.raises(ShapeError, match=r"do not meet the condition .*T"):
                run(x=x)


def test_two_inputs_are_compared():
    class Longer(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x.sum(1) + y.sum(1) if x.shape[1] > y.shape[1] else x.mean(1)

    program = gw.from_torch(Longer(), (torch.randn(2, 9), torch.randn(2, 4)), sizes={"x": ("B", "T"), "y": ("B", "S")})
    found = program(x=gw.ones(3, 6), y=gw.ones(3, 5))["out"]
    assert found.tolist() == [11.0] * 3
    with pytest.raises(ShapeError, match="T > S"):
        program(x=gw.ones(3, 6), y=gw.ones(3, 6))


def test_conditions_survive_saving(tmp_path):
    program = opened(Run(BRANCHES["T > 8"][0]), torch.randn(2, 12, 6), ROWS)
    program.save(tmp_path / "saved")
    with pytest.raises(ShapeError, match="T > 8"):
        gw.load(tmp_path / "saved").run({"x": np.zeros((2, 8, 6), "f4")})


class Masked(nn.Module):
    """Transformer layers of torch with a mask that is not said to be causal, cut from a larger one or made in place."""

    def __init__(self, longest: int | None) -> None:
        super().__init__()
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)
        if longest is not None:
            self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(longest))
        self.longest = longest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        steps = x.shape[1]
        if self.longest is None:
            mask = nn.Transformer.generate_square_subsequent_mask(steps)
        else:
            mask = self.get_buffer("mask")[:steps, :steps]
        return self.decoder(self.layers(x, mask=mask), x, tgt_mask=mask)


@pytest.mark.parametrize("longest", some([12, None], 2))
def test_masks_of_transformer_layers_are_found_to_be_causal(longest, capfd):
    module = Masked(longest).eval()
    p = gw.from_torch(module, (torch.randn(2, 5, 8),), sizes={"x": ("B", "T", 8)})
    kinds = [p.attrs(node)["causal"] for node in p.select(op="sdpa").nodes]
    assert sorted(kinds) == [False, True, True, True]  # the first one reads the encoder's rows
    for rows in (1, 3, 12):
        x = torch.randn(3, rows, 8)
        np.testing.assert_allclose(p(x=x.numpy())["out"].numpy(), module(x).detach(), rtol=1e-5, atol=1e-6)
    if longest is not None:
        assert isinstance(p.imported, Imported)
        assert any("T <= 12" in text for text in p.imported.fixed)
        with pytest.raises(ShapeError, match="T <= 12"):
            p(x=np.zeros((1, 13, 8), "f4"))
    assert capfd.readouterr().err == ""
