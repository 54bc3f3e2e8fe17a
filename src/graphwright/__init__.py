"""Graphwright: open a neural network as a graph, edit it while it runs, export it with proof.

>>> import graphwright as gw
>>> model = gw.open("bundled")
>>> with model.program.edit("drop a branch") as e:
...     e.cut("layers.1.mlp.down -> layers.1.out")
>>> model.program.undo()
"""

from __future__ import annotations

import logging
from importlib import import_module
from math import e, inf, nan, pi
from typing import Any

from graphwright.errors import GraphwrightError

__version__ = "0.1.0.dev0"

_PUBLIC = {
    "amp": "autocast",
    "array": (
        "Device NDArray bfloat16 bool_ cuda finfo float16 float32 float64 float8_e4m3fn float8_e5m2 "
        "get_num_threads iinfo int16 int32 int64 int8 set_num_threads uint8"
    ),
    "autograd": (
        "Function Generator Parameter Tensor arange as_tensor asarray bernoulli bincount cat dropout einsum empty "
        "empty_like enable_grad eye fork_rng from_numpy full full_like func gather get_default_dtype get_rng_state "
        "grad gumbel index_add index_put index_select inference_mode initial_seed is_grad_enabled linalg linspace "
        "logspace manual_seed matmul mode multinomial no_grad nonzero normal one_hot ones ones_like pad rand "
        "rand_like randint randint_like randn randn_like randperm repeat_interleave rng scalar_tensor scatter "
        "scatter_add seed set_grad_enabled set_rng_state stack tensor topk tril triu vmap where zeros zeros_like"
    ),
    "autograd.top": (
        "abs absolute acos acosh add addbmm addcdiv addcmul addmm addmv addr adjoint all allclose amax amin aminmax "
        "angle any arccos arccosh arcsin arcsinh arctan arctan2 arctanh argmax argmin argsort argwhere asin asinh "
        "atan atan2 atanh atleast_1d atleast_2d atleast_3d baddbmm bitwise_and bitwise_left_shift bitwise_not "
        "bitwise_or bitwise_right_shift bitwise_xor block_diag bmm bool broadcast_shapes broadcast_tensors "
        "broadcast_to bucketize can_cast cartesian_prod cdist ceil chain_matmul cholesky cholesky_inverse "
        "cholesky_solve chunk clamp clamp_max clamp_min clip clone column_stack combinations concat concatenate "
        "copysign corrcoef cos cosh cosine_similarity count_nonzero cov cross cummax cummin cumprod cumsum "
        "cumulative_trapezoid deg2rad det detach device diag diag_embed diagflat diagonal diagonal_scatter diff "
        "digamma dist div divide dot double dsplit dstack dtype eq equal erf erfc erfinv exp exp2 expm1 fix flatten "
        "flip fliplr flipud float float_power floor floor_divide fmax fmin fmod frac gcd ge ger greater greater_equal "
        "gt half heaviside histc hsplit hstack hypot i0 index_copy index_fill index_reduce inner int inverse "
        "is_complex is_floating_point is_nonzero is_same_size is_signed is_tensor isclose isfinite isin isinf isnan "
        "isneginf isposinf kron kthvalue lcm ldexp le lerp less less_equal lgamma log log10 log1p log2 log_softmax "
        "logaddexp logaddexp2 logcumsumexp logdet logical_and logical_not logical_or logical_xor logit logsumexp long "
        "lt masked_fill masked_scatter masked_select matrix_exp matrix_power max maximum mean median meshgrid min "
        "minimum mm moveaxis movedim msort mul multiply mv mvlgamma nan_to_num nanmean nanmedian nanquantile nansum "
        "narrow ne neg negative nextafter norm not_equal numel outer pairwise_distance pdist permute pinverse "
        "positive pow prod promote_types put qr quantile rad2deg ravel reciprocal relu remainder renorm reshape "
        "result_type roll rot90 round rsqrt rsub scatter_reduce searchsorted select select_scatter sgn short sigmoid "
        "sign signbit sin sinc sinh slice_scatter slogdet softmax sort split sqrt square squeeze std std_mean sub "
        "subtract sum svd swapaxes swapdims t take take_along_dim tan tanh tensor_split tensordot tile transpose "
        "trapezoid trapz tril_indices triu_indices true_divide trunc unbind unflatten unique unique_consecutive "
        "unravel_index unsqueeze vander var var_mean vdot vsplit vstack xlogy"
    ),
    "graph": "Graph",
    "models": "Model open",
    "models.importing.onnx_files": "from_onnx",
    "models.importing.torch_modules": "from_torch",
    "nn": "summary",
    "nn.functional": (
        "adaptive_avg_pool1d adaptive_max_pool1d avg_pool1d bilinear celu channel_shuffle conv1d conv2d conv3d "
        "conv_transpose1d conv_transpose2d conv_transpose3d group_norm hardshrink layer_norm max_pool1d max_pool2d "
        "max_pool3d pixel_shuffle pixel_unshuffle prelu rms_norm rrelu selu threshold"
    ),
    "ops": "op",
    "optim": "compile_step load_state save_state",
    "plan": "Plan compile profile",
    "program": "Builder Program State replay tape trace",
    "program.files.values": "load save",
    "surgery": "attribute rewrite",
}
"""Folder -> its names that the package exports; `__init__.pyi` says the same to type checkers."""
_HOME = {name: folder for folder, names in _PUBLIC.items() for name in names.split()}
_FOLDERS = [
    "amp",
    "attention",
    "data",
    "distributed",
    "distributions",
    "evolve",
    "experts",
    "lifecycle",
    "metrics",
    "models",
    "nn",
    "optim",
    "program",
    "structure",
    "surgery",
    "workers",
]
_OTHER_FOLDERS = "array autograd graph ops plan testing".split()  # noqa: SIM905

__all__ = ["GraphwrightError", "__version__", "e", "inf", "nan", "pi", *_FOLDERS, *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Import a subpackage or a public name when it is first used, so that inspecting a model imports no torch."""
    if name in _FOLDERS or name in _OTHER_FOLDERS:
        return import_module(f"graphwright.{name}")
    if name in _HOME:
        value = getattr(import_module(f"graphwright.{_HOME[name]}"), name)
        globals()[name] = value
        return value
    raise AttributeError(f"module 'graphwright' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_OTHER_FOLDERS])


logging.getLogger(__name__).addHandler(logging.NullHandler())  # the application chooses what is shown
