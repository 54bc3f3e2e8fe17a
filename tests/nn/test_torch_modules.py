"""All modules that torch has too, against torch: signatures, states, results, gradients; eager, traced and compiled."""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.autograd import Tensor
from graphwright.errors import UsageError
from graphwright.testing.oracle import assert_close

R = np.random.default_rng(0)


def f(*shape: int) -> np.ndarray:
    return R.standard_normal(shape)


X, Y, Z = f(5, 4), f(5, 4), f(5, 4)
P, Q = (1 / (1 + np.exp(-v)) for v in (X, Y))
IDS, SIGN, W = np.array([0, 3, 1, 2, 3]), np.array([1, -1, 1, 1, -1]), np.array([0.5, 1.0, 2.0, 1.5])
LOGP, BITS = X - np.log(np.exp(X).sum(1, keepdims=True)), (Y > 0).astype(np.float64)
LINES, SHEETS, BODIES = f(2, 4, 7), f(2, 4, 6, 5), f(2, 4, 5, 6, 4)
SEQUENCE, STATE = f(5, 2, 4), f(2, 2, 3)
CONV: dict[str, Any] = {"in_channels": 4, "out_channels": 6, "kernel_size": 3, "stride": 2, "padding": 1, "groups": 2}
UP: dict[str, Any] = {**CONV, "output_padding": 1}
REC: dict[str, Any] = {"input_size": 4, "hidden_size": 3}
LAYER: dict[str, Any] = {"d_model": 8, "nhead": 2, "dim_feedforward": 6, "dropout": 0.0}
CAUSAL = np.triu(np.full((5, 5), -np.inf), 1)
HIDDEN = np.array([[False, False, True, False, True], [False] * 5])
QUERY, KEYS, VALUES = f(4, 2, 8), f(5, 2, 6), f(5, 2, 3)
SRC, TGT = f(5, 2, 8), f(4, 2, 8)


class Made(NamedTuple):
    """An argument that each library makes."""

    make: Callable[[Any], Any]


class Fixed(NamedTuple):
    """An operand without a gradient in torch."""

    value: np.ndarray


class Call(NamedTuple):
    """Operands by position and by name."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


def mha(*args: Any, **kwargs: Any) -> Call:
    return Call(args or (QUERY, f(5, 2, 8), f(5, 2, 8)), kwargs)


def stack(kind: str, **options: Any) -> dict[str, Any]:
    return {
        f"{kind.lower()}_layer": Made(lambda nn: getattr(nn, f"Transformer{kind}Layer")(**LAYER)),
        "num_layers": 2,
        "norm": Made(lambda nn: nn.LayerNorm(8)),
        **options,
    }


CASES: list[tuple[str, dict[str, Any], Any]] = [
    # losses and distances
    ("L1Loss", {}, (X, Y)),
    ("MSELoss", {"reduction": "sum"}, (X, Y)),
    ("SmoothL1Loss", {"beta": 0.5}, (X, Y)),
    ("HuberLoss", {"delta": 0.7}, (X, Y)),
    ("CrossEntropyLoss", {"weight": W, "ignore_index": 1, "label_smoothing": 0.1}, (X, IDS)),
    ("NLLLoss", {"weight": W}, (LOGP, IDS)),
    ("BCELoss", {"weight": W}, (P, Q)),
    ("BCEWithLogitsLoss", {"pos_weight": W}, (X, BITS)),
    ("KLDivLoss", {"reduction": "batchmean"}, (LOGP, Q)),
    ("PoissonNLLLoss", {"full": True}, (X, 4 * Q)),
    ("GaussianNLLLoss", {"full": True}, (X, Y, P)),
    ("CosineEmbeddingLoss", {"margin": 0.1}, (X, Y, SIGN)),
    ("MarginRankingLoss", {"margin": 0.1}, (X[:, 0], Y[:, 0], SIGN)),
    ("HingeEmbeddingLoss", {"margin": 0.5}, (X, np.where(BITS > 0, 1, -1))),
    ("SoftMarginLoss", {}, (X, Fixed(2 * BITS - 1))),
    ("MultiMarginLoss", {"p": 2, "weight": W}, (X, IDS)),
    ("MultiLabelMarginLoss", {}, (X, np.array([[3, 0, -1, 1], [1, -1, 0, 0], [0, 1, 2, 3], [2, 1, -1, -1], [-1] * 4]))),
    ("MultiLabelSoftMarginLoss", {}, (X, BITS)),
    ("TripletMarginLoss", {"swap": True}, (X, Y, Z)),
    ("TripletMarginWithDistanceLoss", {"distance_function": Made(lambda nn: nn.L1Loss()), "margin": 2.0}, (X, Y, Z)),
    ("CTCLoss", {"blank": 1}, (Fixed(f(6, 2, 4)), np.array([[0, 2, 2], [3, 0, 0]]), *map(np.array, ([6, 5], [3, 1])))),
    ("CosineSimilarity", {"dim": 0}, (X, Y)),
    ("PairwiseDistance", {"p": 1.0}, (X, Y)),
    # activations
    ("ReLU", {}, (X,)),
    ("LeakyReLU", {"negative_slope": 0.2}, (X,)),
    ("ELU", {"alpha": 0.7}, (X,)),
    ("SiLU", {}, (X,)),
    ("GELU", {}, (X,)),
    ("GELU", {"approximate": "tanh"}, (X,)),
    ("Softplus", {"beta": 2.0, "threshold": 1.0}, (X,)),
    ("Sigmoid", {}, (X,)),
    ("Tanh", {}, (X,)),
    ("LogSigmoid", {}, (X,)),
    ("ReLU6", {}, (4 * X,)),
    ("Hardtanh", {"min_val": -0.5}, (X,)),
    ("Hardsigmoid", {}, (4 * X,)),
    ("Hardswish", {}, (4 * X,)),
    ("SELU", {}, (X,)),
    ("CELU", {"alpha": 0.7}, (X,)),
    ("Mish", {}, (X,)),
    ("Softsign", {}, (X,)),
    ("Tanhshrink", {}, (X,)),
    ("Softshrink", {"lambd": 0.3}, (X,)),
    ("Hardshrink", {"lambd": 0.3}, (X,)),
    ("Threshold", {"threshold": 0.1, "value": 2.0}, (X,)),
    ("GLU", {"dim": 1}, (X,)),
    ("Softmin", {"dim": 1}, (X,)),
    ("Softmax", {"dim": 1}, (LINES,)),
    *(("Softmax", {}, (x,)) for x in (X[0].copy(), X, LINES, SHEETS)),
    ("LogSoftmax", {"dim": -1}, (LINES,)),
    ("Softmax2d", {}, (SHEETS,)),
    ("PReLU", {"num_parameters": 4}, (X,)),
    ("RReLU", {"lower": 0.2, "upper": 0.2}, (X,)),
    *((f"{kind}", {"p": 0.0}, (SHEETS,)) for kind in ("Dropout", "Dropout2d", "AlphaDropout", "FeatureAlphaDropout")),
    ("Dropout1d", {"p": 0.0}, (LINES,)),
    ("Dropout3d", {"p": 0.0}, (BODIES,)),
    # linear maps, tables, shapes
    ("Identity", {}, (X,)),
    ("Linear", {"in_features": 4, "out_features": 3}, (LINES.swapaxes(1, 2).copy(),)),
    ("Linear", {"in_features": 4, "out_features": 3, "bias": False}, (X,)),
    ("Bilinear", {"in1_features": 4, "in2_features": 3, "out_features": 2}, (X, f(5, 3))),
    ("Embedding", {"num_embeddings": 6, "embedding_dim": 3, "padding_idx": -2}, (np.array([[1, 1, 4], [0, 1, 3]]),)),
    ("Embedding", {"num_embeddings": 6, "embedding_dim": 3, "max_norm": 0.5}, (np.array([[1, 1, 4], [0, 1, 3]]),)),
    ("EmbeddingBag", {"num_embeddings": 6, "embedding_dim": 3, "padding_idx": 1}, (np.array([[1, 1, 4], [0, 1, 3]]),)),
    ("EmbeddingBag", {"num_embeddings": 6, "embedding_dim": 3, "mode": "sum"}, (np.array([1, 4, 0]), np.array([0, 2]))),
    ("Flatten", {}, (SHEETS,)),
    ("Flatten", {"start_dim": 1, "end_dim": 2}, (SHEETS,)),
    ("Unflatten", {"dim": 2, "unflattened_size": (3, -1)}, (SHEETS,)),
    # norms
    ("RMSNorm", {"normalized_shape": 5}, (SHEETS,)),
    ("RMSNorm", {"normalized_shape": (6, 5), "eps": 1e-3, "elementwise_affine": False}, (SHEETS,)),
    ("LayerNorm", {"normalized_shape": (6, 5), "eps": 1e-3}, (SHEETS,)),
    ("LayerNorm", {"normalized_shape": 5, "bias": False}, (SHEETS,)),
    ("LayerNorm", {"normalized_shape": 5, "elementwise_affine": False}, (SHEETS,)),
    ("GroupNorm", {"num_groups": 2, "num_channels": 4}, (SHEETS,)),
    ("GroupNorm", {"num_groups": 2, "num_channels": 4, "bias": False}, (SHEETS,)),
    ("BatchNorm1d", {"num_features": 4}, (X,)),
    ("BatchNorm1d", {"num_features": 4, "eps": 1e-3, "momentum": 0.3}, (LINES,)),
    ("BatchNorm2d", {"num_features": 4, "momentum": None}, (SHEETS,)),
    ("BatchNorm2d", {"num_features": 4, "track_running_stats": False}, (SHEETS,)),
    ("BatchNorm2d", {"num_features": 4, "bias": False}, (SHEETS,)),
    ("BatchNorm3d", {"num_features": 4, "affine": False}, (BODIES,)),
    ("InstanceNorm1d", {"num_features": 4}, (LINES,)),
    ("InstanceNorm1d", {"num_features": 4}, (LINES[0],)),
    ("InstanceNorm2d", {"num_features": 4, "affine": True, "track_running_stats": True}, (SHEETS,)),
    ("InstanceNorm3d", {"num_features": 4, "affine": True, "bias": False}, (BODIES,)),
    ("LocalResponseNorm", {"size": 3}, (SHEETS,)),
    # convolutions
    ("Conv1d", CONV, (LINES,)),
    ("Conv1d", {**CONV, "stride": 1, "padding": "same", "kernel_size": 4}, (LINES[0],)),
    ("Conv2d", {**CONV, "kernel_size": (3, 2)}, (SHEETS,)),
    ("Conv2d", {**CONV, "padding": (1, 0), "bias": False}, (SHEETS,)),
    ("Conv2d", {**CONV, "padding": (1, 2), "padding_mode": "reflect"}, (SHEETS,)),
    ("Conv2d", {**CONV, "padding_mode": "circular"}, (SHEETS,)),
    ("Conv2d", {**CONV, "stride": 1, "padding": "same", "padding_mode": "replicate", "dilation": 2}, (SHEETS,)),
    ("Conv3d", {**CONV, "padding": "valid"}, (BODIES,)),
    ("ConvTranspose1d", UP, (LINES,)),
    ("ConvTranspose1d", {**UP, "output_padding": 0}, Call((LINES,), {"output_size": [14]})),
    ("ConvTranspose2d", {**UP, "dilation": 2}, (SHEETS,)),
    ("ConvTranspose3d", {**UP, "padding": (1, 0, 1)}, (BODIES,)),
    # pools
    ("MaxPool1d", {"kernel_size": 3, "stride": 2, "padding": 1}, (LINES,)),
    ("MaxPool2d", {"kernel_size": (2, 3), "ceil_mode": True, "return_indices": True}, (SHEETS,)),
    ("MaxPool3d", {"kernel_size": 2, "stride": 1}, (BODIES,)),
    ("MaxUnpool1d", {"kernel_size": 2}, (f(2, 3), np.array([[0, 2, 5], [1, 3, 4]]))),
    ("MaxUnpool2d", {"kernel_size": 2}, (f(1, 2, 2), np.array([[[0, 2], [9, 11]]]))),
    ("MaxUnpool3d", {"kernel_size": 2}, (f(1, 1, 1, 2), np.array([[[[1, 6]]]]))),
    ("AvgPool1d", {"kernel_size": 3, "stride": 2, "padding": 1}, (LINES,)),
    ("AvgPool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}, (SHEETS,)),
    ("AvgPool2d", {"kernel_size": 3, "divisor_override": 2}, (SHEETS,)),
    ("AvgPool3d", {"kernel_size": 2, "ceil_mode": True}, (BODIES,)),
    ("LPPool1d", {"norm_type": 2.0, "kernel_size": 3}, (LINES,)),
    ("LPPool2d", {"norm_type": 2.0, "kernel_size": 2}, (SHEETS,)),
    ("LPPool3d", {"norm_type": 2.0, "kernel_size": 2}, (BODIES,)),
    ("AdaptiveAvgPool1d", {"output_size": 3}, (LINES,)),
    ("AdaptiveAvgPool2d", {"output_size": (None, 2)}, (SHEETS,)),
    ("AdaptiveAvgPool3d", {"output_size": 2}, (BODIES,)),
    ("AdaptiveMaxPool1d", {"output_size": 3}, (LINES,)),
    ("AdaptiveMaxPool2d", {"output_size": (1, 2), "return_indices": True}, (SHEETS,)),
    ("AdaptiveMaxPool3d", {"output_size": 2}, (BODIES,)),
    # padding, windows, resampling
    *(
        (f"{kind}Pad{rank}d", {"padding": width, **({"value": 0.5} if kind == "Constant" else {})}, (x,))
        for kind in ("Zero", "Constant", "Reflection", "Replication", "Circular")
        for rank, width, x in ((1, 2, LINES), (2, (1, 2, 0, 3), SHEETS), (3, (1, 0, 2, 1, 1, 2), BODIES))
    ),
    ("Upsample", {"scale_factor": 2}, (LINES,)),
    ("Upsample", {"size": (9, 7), "mode": "bilinear", "align_corners": True}, (SHEETS,)),
    ("UpsamplingNearest2d", {"scale_factor": 2}, (SHEETS,)),
    ("UpsamplingBilinear2d", {"size": (9, 7)}, (SHEETS,)),
    ("PixelShuffle", {"upscale_factor": 2}, (SHEETS,)),
    ("PixelUnshuffle", {"downscale_factor": 2}, (SHEETS[..., :4].copy(),)),
    ("ChannelShuffle", {"groups": 2}, (SHEETS,)),
    ("Unfold", {"kernel_size": 3, "stride": 2, "padding": 1}, (SHEETS,)),
    ("Fold", {"output_size": (4, 5), "kernel_size": 2}, (f(2, 8, 12),)),
    # recurrent
    *((name, {**REC, "bias": bias}, (f(2, 4), STATE[0])) for name in ("RNNCell", "GRUCell") for bias in (True, False)),
    ("RNNCell", {**REC, "nonlinearity": "relu"}, (f(4),)),
    ("LSTMCell", REC, (f(2, 4), (STATE[0], STATE[1]))),
    ("LSTMCell", {**REC, "bias": False}, (f(4),)),
    *((name, {**REC, "num_layers": 2}, (SEQUENCE, STATE)) for name in ("RNN", "GRU")),
    *((name, {**REC, "bidirectional": True}, (SEQUENCE, STATE)) for name in ("RNN", "GRU")),
    *((name, {**REC, "batch_first": True, "bias": False}, (SEQUENCE,)) for name in ("RNN", "GRU", "LSTM")),
    ("RNN", {**REC, "nonlinearity": "relu"}, (SEQUENCE[:, 0].copy(), STATE[0, :1].copy())),
    ("LSTM", {**REC, "num_layers": 2}, (SEQUENCE, (STATE, f(2, 2, 3)))),
    ("LSTM", {**REC, "num_layers": 2, "bidirectional": True, "proj_size": 2}, (SEQUENCE,)),
    ("LSTM", REC, (SEQUENCE[:, 0].copy(), (STATE[0, :1].copy(), STATE[1, :1].copy()))),
    # attention
    ("MultiheadAttention", {"embed_dim": 8, "num_heads": 2}, mha()),
    ("MultiheadAttention", {"embed_dim": 8, "num_heads": 2, "bias": False}, mha(SRC, SRC, SRC, need_weights=False)),
    ("MultiheadAttention", {"embed_dim": 8, "num_heads": 2}, mha(SRC[:, 0], SRC[:, 0], SRC[:, 0], HIDDEN[0])),
    (
        "MultiheadAttention",
        {"embed_dim": 8, "num_heads": 2, "kdim": 6, "vdim": 3},
        mha(QUERY, KEYS, VALUES, average_attn_weights=False),
    ),
    (
        "MultiheadAttention",
        {"embed_dim": 8, "num_heads": 2, "batch_first": True},
        mha(*3 * [SRC.swapaxes(0, 1).copy()], attn_mask=CAUSAL, is_causal=True, need_weights=False),
    ),
    ("MultiheadAttention", {"embed_dim": 8, "num_heads": 2}, mha(SRC, SRC, SRC, HIDDEN, False, CAUSAL < 0)),
    ("MultiheadAttention", {"embed_dim": 8, "num_heads": 2}, mha(SRC, SRC, SRC, attn_mask=f(4, 5, 5))),
    (
        "MultiheadAttention",
        {"embed_dim": 8, "num_heads": 2, "add_bias_kv": True, "add_zero_attn": True},
        mha(SRC, SRC, SRC, HIDDEN, attn_mask=CAUSAL < 0),
    ),
    ("TransformerEncoderLayer", LAYER, (SRC,)),
    (
        "TransformerEncoderLayer",
        {**LAYER, "norm_first": True, "activation": "gelu", "batch_first": True},
        Call((SRC.swapaxes(0, 1).copy(),), {"src_mask": CAUSAL, "is_causal": True}),
    ),
    ("TransformerEncoderLayer", {**LAYER, "bias": False}, Call((SRC,), {"src_mask": CAUSAL < 0})),
    ("TransformerDecoderLayer", LAYER, (TGT, SRC)),
    (
        "TransformerDecoderLayer",
        {**LAYER, "norm_first": True},
        Call((TGT, SRC), {"tgt_mask": CAUSAL[:4, :4], "memory_key_padding_mask": HIDDEN, "tgt_is_causal": True}),
    ),
    ("TransformerEncoder", stack("Encoder", mask_check=False), Call((SRC,), {"src_key_padding_mask": HIDDEN})),
    ("TransformerDecoder", stack("Decoder"), Call((TGT, SRC), {"tgt_mask": CAUSAL[:4, :4]})),
    (
        "Transformer",
        {**LAYER, "num_encoder_layers": 2, "num_decoder_layers": 1},
        Call((SRC, TGT), {"src_mask": CAUSAL, "tgt_mask": CAUSAL[:4, :4]}),
    ),
    # containers
    ("Sequential", {"": Made(lambda nn: [nn.Linear(4, 3), nn.Tanh(), nn.Sequential(nn.Linear(3, 2))])}, (X,)),
    ("Sequential", {"": Made(lambda nn: [{"in": nn.Linear(4, 3), "act": nn.Tanh(), "out": nn.Linear(3, 2)}])}, (X,)),
]  # fmt: skip
FLOAT32_CONSTANTS = {"Hardsigmoid", "CELU"}
"""Modules in which torch rounds a constant to float32 for float64 operands."""
HOST = {"CTCLoss", "EmbeddingBag", "MultiLabelMarginLoss"}
"""Modules with operands, or their number, that must be known outside traces."""


def built(library: Any, name: str, options: dict[str, Any]) -> Any:
    """Make a module in torch or here, in float64."""

    def of(value: Any) -> Any:
        if isinstance(value, Made):
            return value.make(library)
        return torch.from_numpy(value) if library is torch.nn and isinstance(value, np.ndarray) else value

    given = {key: of(value) for key, value in options.items()}
    listed = given.pop("", [])
    if library is torch.nn and listed and isinstance(listed[0], dict):
        listed = [OrderedDict(listed[0])]
    return getattr(library, name)(*listed, **given).double()


def pair(name: str, options: dict[str, Any]) -> tuple[Any, Any]:
    """Return our module and torch's, with the same random state."""
    theirs, mine = built(torch.nn, name, options), built(gw.nn, name, options)
    with torch.no_grad():
        for k, p in enumerate(theirs.parameters()):
            p.copy_(torch.from_numpy(np.random.default_rng(k).standard_normal(tuple(p.shape))))
    found = mine.load_state_dict(theirs.state_dict())
    assert found.missing_keys == found.unexpected_keys == []
    assert list(mine.state_dict()) == list(theirs.state_dict())
    return mine, theirs


def mapped(value: Any, make: Callable[[np.ndarray, bool], Any]) -> Any:
    """Apply `make(array, whether it gets a gradient)` to all arrays of nested operands."""
    if isinstance(value, Fixed):
        return make(value.value, False)
    if isinstance(value, np.ndarray):
        return make(value, value.dtype.kind == "f" and bool(np.isfinite(value).all()))
    if isinstance(value, dict):
        return {k: mapped(v, make) for k, v in value.items()}
    return tuple(mapped(v, make) for v in value) if isinstance(value, tuple) else value


def leaves(value: Any) -> Iterator[Any]:
    """Yield all tensors of nested values."""
    if isinstance(value, tuple | list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            yield from leaves(part)
    elif isinstance(value, Tensor | torch.Tensor):
        yield value


def loss(outputs: Any, cosines: Callable[[np.ndarray], Any]) -> Any:
    """Weigh all entries of the floating outputs by different factors."""
    total: Any = 0.0
    for k, y in enumerate(t for t in leaves(outputs) if "float" in str(t.dtype)):
        total = total + (y * y * cosines(np.cos(np.arange(y.numel()) + k).reshape(tuple(y.shape)))).sum()
    return total


def named(case: tuple[str, dict[str, Any], Any]) -> str:
    return case[0] + "".join(f"-{k}" for k in case[1] if k not in LAYER and k not in CONV and k not in REC)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True", "ignore:Using padding='same'", "ignore:Implicit dim")
@pytest.mark.parametrize(("name", "options", "operands"), CASES, ids=map(named, CASES))
def test_module_matches_torch(name: str, options: dict[str, Any], operands: Any) -> None:
    mine, theirs = pair(name, options)
    given = operands if isinstance(operands, Call) else Call(operands, {})
    scale = 1e3 if name in FLOAT32_CONSTANTS else 1.0

    def close(found: Any, expected: Any, what: str) -> None:
        for a, b in zip(leaves(found), leaves(expected), strict=True):
            assert_close(a.detach(), b.detach().numpy(), rtol=scale * 1e-9, atol=scale * 1e-11, what=what)

    def on_tensors(module: Any) -> Callable[..., Any]:
        """Return the module as a function of the flat list of its operands."""

        def run(*flat: Tensor) -> Any:
            following = iter(flat)
            args, kwargs = mapped(tuple(given), lambda x, wanted: next(following))
            return module(*args, **kwargs)

        return run

    for train in (True, False):
        mine.train(train)
        theirs.train(train)
        before = deepcopy(mine)
        xs = mapped(tuple(given), lambda x, wanted: gw.tensor(x, requires_grad=wanted))
        ts = mapped(tuple(given), lambda x, wanted: torch.tensor(x, requires_grad=wanted))
        flat = list(leaves(xs))
        y, expected = mine(*xs[0], **xs[1]), theirs(*ts[0], **ts[1])
        close(y, expected, "result")
        total, wanted = loss(y, gw.tensor), loss(expected, torch.from_numpy)
        if isinstance(wanted, torch.Tensor) and wanted.requires_grad:
            for p in (*mine.parameters(), *theirs.parameters()):
                p.grad = None
            total.backward()
            wanted.backward()
            for a, b in zip((*flat, *mine.parameters()), (*leaves(ts), *theirs.parameters()), strict=True):
                if b.grad is not None:
                    close([a.grad], [b.grad], "gradient")
        close(mine.state_dict(), theirs.state_dict(), "state")
        if name in HOST:
            continue
        close(gw.compile(on_tensors(before))(*flat), expected, "compiled result")
        close(before.state_dict(), theirs.state_dict(), "compiled state")
        if not train:
            program = gw.trace(on_tensors(mine), *flat)
            found = program(**dict(zip(program.input_names(), flat, strict=True)))
            close(found, expected, "traced result")


# -- signatures --------------------------------------------------------------------------------------------------------
MISSING = {
    "AdaptiveLogSoftmaxWithLoss", "Container", "CrossMapLRN2d", "DataParallel", "FractionalMaxPool2d",
    "FractionalMaxPool3d", "LinearCrossEntropyLoss", "NLLLoss2d", "RNNBase", "RNNCellBase", "SyncBatchNorm",
    *(f"Lazy{kind}{rank}d" for kind in ("BatchNorm", "Conv", "ConvTranspose", "InstanceNorm") for rank in (1, 2, 3)),
    "LazyLinear",
}  # fmt: skip
"""Modules of torch that do not exist here."""
SHARED = sorted(
    {n for n, c in vars(torch.nn).items() if inspect.isclass(c) and issubclass(c, torch.nn.Module)} - MISSING
)
DEPRECATED = {"device", "dtype", "size_average", "reduce", "min_value", "max_value"}
"""Arguments that do not exist here: where and what tensors are is for `to`, the others are torch's old spellings."""
OWN = {"name", "seed", "dim", "_freeze"}
"""Arguments by keyword that exist here only: where initial values come from, the classes' axis of losses."""
UNSEEN = {"Module", "ModuleDict", "ModuleList", "ParameterDict", "ParameterList"}
"""Modules that compute nothing."""


def test_all_modules_of_torch_exist_and_have_a_case() -> None:
    assert {n for n in SHARED if not hasattr(gw.nn, n)} == set()
    assert set(SHARED) - UNSEEN == {case[0] for case in CASES}


def arguments(made: Any) -> list[tuple[str, Any]]:
    """Return (name, default) of the arguments of a class in order, those by keyword last; functions by name."""
    given = [p for p in inspect.signature(made).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    keyword_only = [p for p in given if p.kind is p.KEYWORD_ONLY]
    pairs = [(p.name, p.default) for p in given if p not in keyword_only] + [(p.name, p.default) for p in keyword_only]
    return [(n, getattr(d, "__name__", d)) for n, d in pairs if n not in DEPRECATED]


@pytest.mark.parametrize("name", SHARED)
def test_arguments_have_the_names_order_and_defaults_of_torch(name: str) -> None:
    mine, theirs = arguments(getattr(gw.nn, name)), arguments(getattr(torch.nn, name))
    if not theirs:  # torch has *args there
        return
    extra = [n for n, _ in mine if n not in dict(theirs)]
    assert set(extra) <= OWN
    assert [pair for pair in mine if pair[0] not in extra] == theirs


def test_recurrent_layers_have_the_arguments_of_torch() -> None:
    base = [pair for pair in arguments(torch.nn.RNNBase) if pair[0] != "mode"]
    for kind in ("RNN", "GRU", "LSTM"):
        mine = [pair for pair in arguments(getattr(gw.nn, kind)) if pair[0] not in OWN]
        if kind == "RNN":
            assert mine.pop(3) == ("nonlinearity", "tanh")
        assert mine == (base if kind == "LSTM" else base[:-1])


def test_layers_of_a_stack_have_weights_and_names_of_their_own() -> None:
    layer, x = gw.nn.TransformerEncoderLayer(**LAYER).double(), gw.tensor(SRC)
    layer(x)
    stack = gw.nn.TransformerEncoder(layer, 2)
    assert set(gw.trace(stack, x).weight_keys()) >= set(stack.state_dict())
    assert len({id(p) for p in (*layer.parameters(), *stack.parameters())}) == 3 * len(list(layer.parameters()))


# -- refusals ----------------------------------------------------------------------------------------------------------
MADE: dict[str, Callable[[Any], Any]] = {
    "groups": lambda nn: nn.Conv1d(3, 4, 3, groups=2),
    "padding": lambda nn: nn.Conv2d(2, 3, 3, padding="full"),
    "same with a stride": lambda nn: nn.Conv2d(2, 3, 3, stride=2, padding="same"),
    "padding mode": lambda nn: nn.Conv2d(2, 3, 3, padding_mode="mirror"),
    "padding mode of a transpose": lambda nn: nn.ConvTranspose2d(2, 3, 3, padding_mode="reflect"),
    "probability": lambda nn: nn.Dropout2d(1.5),
    "group norm": lambda nn: nn.GroupNorm(2, 5),
    "padding_idx": lambda nn: nn.Embedding(3, 2, padding_idx=3),
    "table": lambda nn: nn.Embedding(3, 2, _weight=(torch if nn is torch.nn else gw).zeros(2, 2)),
    "heads": lambda nn: nn.MultiheadAttention(8, 3),
    "projection": lambda nn: nn.LSTM(3, 4, proj_size=4),
    "dropout of layers": lambda nn: nn.GRU(3, 4, dropout=-0.1),
    "size": lambda nn: nn.GRU(3, 0),
}
F8 = f(5, 2, 8)
RUN: dict[str, tuple[Callable[[Any], Any], tuple[np.ndarray, ...], dict[str, Any]]] = {
    "output_size": (lambda nn: nn.ConvTranspose2d(2, 3, 3, stride=2), (f(1, 2, 4, 4),), {"output_size": [20, 20]}),
    "mask shape": (lambda nn: nn.MultiheadAttention(8, 2), (F8, F8, F8), {"attn_mask": np.zeros((3, 3))}),
    "mask dtype": (lambda nn: nn.MultiheadAttention(8, 2), (F8, F8, F8), {"attn_mask": np.zeros((5, 5), int)}),
    "is_causal": (lambda nn: nn.MultiheadAttention(8, 2), (F8, F8, F8), {"is_causal": True}),
    "axes": (lambda nn: nn.MultiheadAttention(8, 2), (F8, F8[0], F8), {}),
    "batches": (lambda nn: nn.Transformer(8, 2, 1, 1, 4), (F8, f(4, 3, 8)), {}),
    "size": (lambda nn: nn.Transformer(8, 2, 1, 1, 4), (F8, f(4, 2, 6)), {}),
    "batch norm": (lambda nn: nn.BatchNorm2d(3), (f(2, 3, 4),), {}),
    "softmax": (lambda nn: nn.Softmax2d(), (X,), {}),
    "state": (lambda nn: nn.GRU(8, 4), (F8, f(2, 2, 4)), {}),
}
ERRORS = (AssertionError, IndexError, RuntimeError, TypeError, ValueError)


@pytest.mark.parametrize("name", MADE)
def test_arguments_that_torch_refuses_are_refused(name: str) -> None:
    with pytest.raises(ERRORS):
        MADE[name](torch.nn)
    with pytest.raises(UsageError):
        MADE[name](gw.nn)


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize("name", RUN)
def test_operands_that_torch_refuses_are_refused(name: str) -> None:
    make, args, kwargs = RUN[name]
    of = lambda value, tensor: tensor(value) if isinstance(value, np.ndarray) else value  # noqa: E731
    for nn, tensor, errors in ((torch.nn, torch.tensor, ERRORS), (gw.nn, gw.tensor, UsageError)):
        module = make(nn).double()
        given = {k: of(v, tensor) for k, v in kwargs.items()}
        with pytest.raises(errors):
            module(*(of(v, tensor) for v in args), **given)
