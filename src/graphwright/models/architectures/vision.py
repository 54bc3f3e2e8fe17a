"""The template of image encoders: patches by a convolution, a class token, learnt positions, blocks of `encoder`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphwright.array import DType, float32
from graphwright.models.architectures.architecture import Config, WeightKey
from graphwright.models.architectures.encoder import Encoder, EncoderBuilder, Head, affine, read_encoder

if TYPE_CHECKING:
    from graphwright.program.builder import Builder
    from graphwright.program.op_graph import Value


@dataclass(frozen=True, slots=True)
class VisionEncoder(Encoder):
    """Dimensions of an image encoder.

    Attributes:
        channels, image_height, image_width: of an image.
        patch_height, patch_width: of a patch.
        pooled, projected: sizes of the result of the pooler, and of its projection.
        gated: whether the MLP has a gate.
        pooler: whether a learnt query reads the hidden states.
        one, two: factors of sizes in the files.
    """

    channels: int = 3
    image_height: int = 0
    image_width: int = 0
    patch_height: int = 0
    patch_width: int = 0
    pooled: int = 0
    projected: int = 0
    gated: bool = False
    pooler: bool = True
    one: int = 1
    two: int = 2

    @property
    def plain(self) -> bool:
        """True if the MLP has no gate."""
        return not self.gated


VISION_FIELDS = {"hidden": "hidden_size", "layers": "num_hidden_layers", "heads": "num_attention_heads",
                 "mlp": "intermediate_size", "eps": "layer_norm_eps"}  # fmt: skip
"""Dimension -> config field."""
_SIZES = {"hidden": 768, "layers": 12, "heads": 12, "mlp": 3072}


def read_vision(
    config: Config, *, eps: float, patch: int, activation: str, classes: int = 1,
    fields: tuple[str, ...] = tuple(_SIZES), **more: Any,
) -> VisionEncoder:  # fmt: skip
    """Read dimensions from a config.

    Args:
        config: the config.
        eps, patch, activation: the family's defaults for absent fields; those of sizes are equal in all families.
        classes: number of tokens before the patches.
        fields: dimensions that the config has; `more` are further fields of the result.
    Raises: ConfigError.
    """
    high, wide = _pair(config, "image_size", 224)
    down, across = _pair(config, "patch_size", patch)
    if down > high or across > wide:
        raise config.invalid("patch_size", f"at most the image's {high} x {wide}", config.get("patch_size"))
    shape = {"image_height": high, "image_width": wide, "patch_height": down, "patch_width": across}
    given = {"positions": (high // down) * (wide // across) + classes, "vocab": 0, "tied": False, **shape, **more}
    return read_encoder(config, VISION_FIELDS, {name: _SIZES[name] for name in fields}, eps=eps,
                        activation=("hidden_act", activation), make=VisionEncoder,
                        channels=config.size("num_channels", 3), **given)  # fmt: skip


def _pair(config: Config, name: str, default: int) -> tuple[int, int]:
    """Return the height and width of a field that is one number for both, or a list of the two. Raises: ConfigError."""
    value = config.get(name)
    if isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value):
        return value[0], value[1]
    size = config.size(name, default, most=1 << 20)
    return size, size


def patch_keys(key: str, bias: str | None = "") -> tuple[WeightKey, ...]:
    """Return the rows of the convolution that makes patches, without a bias if `bias` is None."""
    return affine("embed.patch", key, "hidden", "channels", "patch_height", "patch_width", bias=bias)


class VisionBuilder(EncoderBuilder):
    """Adds the ops of one image encoder to a builder."""

    def image(self) -> Value:
        """Add the input and return the embeddings of its class token, if there is one, and its patches."""
        b, d = self.b, self.dims
        assert isinstance(d, VisionEncoder)
        kind = float32 if self.compute.is_low else self.compute
        pixels = b.input("pixel_values", ("B", d.channels, d.image_height, d.image_width), kind)
        if kind is not self.compute:
            pixels = b.cast(pixels, dtype=self.compute, name="pixels")
        operands = [pixels, self.weight("embed.patch.weight")]
        if "embed.patch.bias" in self.params:
            operands.append(self.weight("embed.patch.bias"))
        grid = b.conv(*operands, stride=(d.patch_height, d.patch_width), padding=(0, 0), dilation=(1, 1), groups=1,
                      name="embed.patch")  # fmt: skip
        x = b.permute(b.flatten(grid, start=2, end=3, name="embed.grid"), axes=(0, 2, 1), name="embed.patches")
        if "embed.class" in self.params:
            x = b.concat(self.each("embed.class"), x, axis=1, name="embed.tokens")
        x = b.add(x, self.weight("embed.positions"), name="embed.sum")
        return self.norm(x, "embed.norm")

    def each(self, path: str) -> Value:
        """Return a learnt token for each image, [B, 1, hidden]."""
        token = self.weight(path)
        if len(self.b.spec(token).shape) == 1:
            token = self.b.unsqueeze(token, axes=(0, 1), name=f"{path}.row")
        return self.b.expand(token, shape=("B", 1, self.dims.hidden), name=f"{path}.each")


def build_vision_encoder(
    b: Builder, dims: VisionEncoder, params: Mapping[str, Value], compute: DType, head: Head
) -> None:
    """Build the graph from `pixel_values` [B, channels, height, width]."""
    block = VisionBuilder(b, dims, params, compute)
    head(block, block.layers(block.image()))


def first_feature(block: EncoderBuilder, x: Value) -> None:
    """Output the hidden states and the first of them, after the pooler's norm if there is one."""
    block.b.output(x, "last_hidden_state")
    block.b.output(block.norm(block.first(x, "first"), "pooler.norm"), "pooler_output")
