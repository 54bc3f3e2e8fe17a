"""Residual paths that one of several blocks of equal structure lacks, however the code writes sums and names blocks."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright import nn
from graphwright.surgery import diagnose

pytestmark = pytest.mark.usefixtures("young_heap")

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(5, 8)).astype("f4")
IMAGES = RNG.normal(size=(2, 3, 8, 8)).astype("f4")
TOKENS = RNG.normal(size=(2, 6, 8)).astype("f4")


class Branch(nn.Module):
    def __init__(self) -> None:
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return self.down(self.up(self.norm(x)).relu())


class Block(Branch):
    def __init__(self, *, bypass: bool = True) -> None:
        super().__init__()
        self.bypass = bypass

    def forward(self, x):
        made = super().forward(x)
        return x + made if self.bypass else made


class Named(nn.Module):
    """Blocks with names of their own; each contains its sum."""

    def __init__(self, bypass: tuple[bool, ...]) -> None:
        self.first, self.second, self.third = (Block(bypass=b) for b in bypass)

    def forward(self, x):
        return self.third(self.second(self.first(x)))


class Outside(nn.Module):
    """Sums outside of the blocks."""

    def __init__(self, bypass: tuple[bool, ...]) -> None:
        self.first, self.second, self.third = Branch(), Branch(), Branch()
        self.bypass = bypass

    def forward(self, x):
        for module, bypass in zip((self.first, self.second, self.third), self.bypass, strict=True):
            x = x + module(x) if bypass else module(x)
        return x


class Layer(nn.Module):
    """A pre-norm block of two branches, without a residual around the first or the second if so told."""

    def __init__(self, *, without: str = "") -> None:
        self.attention, self.norm = nn.MultiHeadAttention(8, 2), nn.LayerNorm(8)
        self.mlp, self.without = Branch(), without

    def forward(self, x):
        a = self.attention(self.norm(x))
        x = a if self.without == "attention" else x + a
        m = self.mlp(x)
        return m if self.without == "mlp" else x + m


def missing(p: gw.Program) -> list[str]:
    return [f.where for f in diagnose(p, kinds=["missing_residual"])]


def summed(bypass: tuple[bool, ...]) -> gw.Program:
    """The blocks of `Named`, written op by op with sums of two operands."""
    b = gw.Builder("summed")
    x = b.input("x", ("B", 8))
    for name, has in zip(("first", "second", "third"), bypass, strict=True):
        w = b.param(f"{name}.w", RNG.normal(size=(8, 8)).astype("f4"))
        h = b.tanh(b.linear(x, w, name=f"{name}.fc"), name=f"{name}.act")
        x = b.add(x, h, name=f"{name}.sum") if has else h
    b.output(x, "y")
    return b.build()


PLANTED = {
    "first": (lambda: gw.trace(Named((False, True, True)), ROWS), "first.down.linear"),
    "last": (lambda: gw.trace(Named((True, True, False)), ROWS), "third.down.linear"),
    "outside": (lambda: gw.trace(Outside((True, False, True)), ROWS), "second.down.linear"),
    "summed": (lambda: summed((True, False, True)), "second.act"),
    "two blocks": (lambda: gw.trace(nn.Sequential(Block(), Block(bypass=False)), ROWS), "1.down.linear"),
    "attention": (lambda: gw.trace(nn.Sequential(Layer(), Layer(without="attention"), Layer()), TOKENS), "1.attention"),
    "mlp": (lambda: gw.trace(nn.Sequential(Layer(), Layer(without="mlp"), Layer()), TOKENS), "1.mlp.down.linear"),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_block_without_a_sum_gets_a_gated_junction(name):
    make, where = PLANTED[name]
    p = make()
    (found,) = diagnose(p, kinds=["missing_residual"])
    assert found.where.startswith(where), found
    feeds = {"x": ROWS if p.spec("x").shape[-1:] == (8,) and len(p.spec("x").shape) == 2 else TOKENS}
    before, count = p.run(feeds)[p.output_names()[0]].to_numpy(), len(p.junctions())
    assert found.fixes[0].keeps_function
    diagnose(p, kinds=["missing_residual"]).fix_all()
    assert np.array_equal(p.run(feeds)[p.output_names()[0]].to_numpy(), before)
    assert len(p.junctions()) == count + 1
    assert len(p.gates()) == 1
    assert not missing(p)
    p.undo()
    assert missing(p) == [found.where]


def test_the_plain_edge_makes_the_block_equal_to_its_siblings():
    net = Named((True, False, True))
    p = gw.trace(net, ROWS)
    (found,) = diagnose(p, kinds=["missing_residual"])
    with p.edit("the plain edge") as e:
        found.fixes[1].apply(e)
    net.second.bypass = True
    expected = net(gw.tensor(ROWS)).numpy()
    np.testing.assert_allclose(p.run(x=ROWS)["out"].to_numpy(), expected, rtol=1e-5, atol=1e-6)


def test_an_edge_that_was_cut_is_found_in_blocks_without_numbers():
    p = gw.trace(Named((True, True, True)), ROWS)
    with p.edit("no path around the second") as e:
        e.cut("first.out -> second.out")
    (found,) = diagnose(p, kinds=["missing_residual"])
    assert found.where == "second.out"
    diagnose(p).fix_all()
    assert not missing(p)
    assert len(p.junctions()) == 3


# -- networks without a defect -----------------------------------------------------------------------------------------
class ConvBlock(nn.Module):
    def __init__(self, channels: int, out: int, stride: int = 1, *, project: bool = False) -> None:
        self.conv1, self.norm1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.norm2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.project = nn.Conv2d(channels, out, 1, stride, bias=False) if project else None

    def forward(self, x):
        made = self.norm2(self.conv2(self.norm1(self.conv1(x)).relu()))
        return ((x if self.project is None else self.project(x)) + made).relu()


class ResNet(nn.Module):
    def __init__(self) -> None:
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.layer1 = nn.Sequential(ConvBlock(4, 4, project=True), ConvBlock(4, 4), ConvBlock(4, 4))
        self.layer2 = nn.Sequential(ConvBlock(4, 8, 2, project=True), ConvBlock(8, 8), ConvBlock(8, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.layer2(self.layer1(self.stem(x))).mean((2, 3)))


class Mlp(nn.Module):
    """Linear maps of one size, some of them in residual sums."""

    def __init__(self) -> None:
        self.fc1, self.fc2, self.fc3, self.fc4 = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        x = self.fc1(x).relu()
        x = x + self.fc2(x)
        x = x + self.fc3(x)
        return self.fc4(x)


class Cross(nn.Module):
    """q from x; k and v from the memory."""

    def __init__(self) -> None:
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x, memory):
        scores = self.q(x) @ self.k(memory).transpose(-1, -2)
        return self.o(scores.softmax(-1) @ self.v(memory))


class DecoderLayer(nn.Module):
    def __init__(self) -> None:
        self.attention, self.cross, self.mlp = Cross(), Cross(), Branch()

    def forward(self, x, memory):
        x = x + self.attention(x, x)
        x = x + self.cross(x, memory)
        return x + self.mlp(x)


class EncoderDecoder(nn.Module):
    def __init__(self) -> None:
        self.encoder = nn.Sequential(Layer(), Layer())
        self.decoder = nn.ModuleList([DecoderLayer() for _ in range(3)])

    def forward(self, x, y):
        memory = self.encoder(x)
        for layer in self.decoder:
            y = layer(y, memory)
        return y


class Additive(nn.Module):
    """An autoencoder whose sums skip from encoder to decoder, except around the innermost blocks."""

    def __init__(self) -> None:
        self.down, self.up = (nn.ModuleList([Branch() for _ in range(3)]) for _ in range(2))

    def forward(self, x):
        kept = []
        for block in self.down:
            kept.append(x := block(x))
        for i, block in enumerate(self.up):
            x = block(x)
            x = x + kept[1 - i] if i < 2 else x
        return x


def transformer() -> gw.Program:
    blocks = [nn.TransformerBlock(nn.MultiHeadAttention(8, 2), nn.SwiGLU(8, 16), 8) for _ in range(3)]
    return gw.trace(nn.Sequential(*blocks), TOKENS)


VALID = {
    "resnet": lambda: gw.trace(ResNet().eval(), IMAGES),
    "training resnet": lambda: gw.trace(ResNet(), IMAGES),
    "mlp": lambda: gw.trace(Mlp(), ROWS),
    "plain blocks": lambda: gw.trace(Named((False, False, False)), ROWS),
    "blocks": lambda: gw.trace(Named((True, True, True)), ROWS),
    "layers": lambda: gw.trace(nn.Sequential(Layer(), Layer(), Layer()), TOKENS),
    "transformer": transformer,
    "encoder-decoder": lambda: gw.trace(EncoderDecoder(), TOKENS, TOKENS),
    "additive skips": lambda: gw.trace(Additive(), ROWS),
}


@pytest.mark.parametrize("name", VALID)
def test_networks_without_a_defect_have_no_missing_residual(name):
    assert not missing(VALID[name]())


def test_gated_edges_of_one_block_are_no_defect():
    p = gw.trace(nn.Sequential(Layer(), Layer(), Layer()), TOKENS)
    with p.edit("gates") as e:
        e.gate("1.mlp.down.linear -> 1.out", "scale", init=0.5)
        e.gate("2.mid -> 2.out", "scale", init=0.5)
    assert not missing(p)


@pytest.mark.parametrize("bypass", [True, False])
def test_an_op_after_the_branch_of_one_block_does_not_hide_its_bypass(bypass):
    p = gw.open("bundled").program
    with p.edit("an activation after the branch", check=False) as e:
        e.insert("layers.1.mlp.down -> layers.1.out", "tanh", name="layers.1.after")
        if not bypass:
            e.cut("layers.1.mid -> layers.1.out")
    assert missing(p) == ([] if bypass else ["layers.1.out"])
