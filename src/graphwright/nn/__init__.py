"""Modules written with tensors: parameters by dotted name, the same code eager, traced and compiled."""

from __future__ import annotations

from graphwright.autograd import Parameter
from graphwright.nn import functional, init
from graphwright.nn.as_module import as_module
from graphwright.nn.ensemble import Ensemble
from graphwright.nn.layers import (
    ELU,
    GELU,
    Activation,
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AvgPool1d,
    AvgPool2d,
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    Dropout,
    Embedding,
    Flatten,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    LayerNorm,
    LeakyReLU,
    Linear,
    LogSigmoid,
    LogSoftmax,
    MaxPool1d,
    MaxPool2d,
    ModuleDict,
    ModuleList,
    ReLU,
    Residual,
    RMSNorm,
    Sequential,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from graphwright.nn.module import Buffer, Module
from graphwright.nn.recurrent import GRU, LSTM, RNN, CfC, CfCCell, GRUCell, LSTMCell, Recurrent, RNNCell
from graphwright.nn.transformer import (
    MoE,
    MultiHeadAttention,
    RotaryEmbedding,
    SinusoidalEmbedding,
    SwiGLU,
    TransformerBlock,
    balance_loss,
    z_loss,
)

__all__ = [
    "ELU", "GELU", "GRU", "LSTM", "RNN", "Activation", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "AvgPool1d",
    "AvgPool2d", "BatchNorm1d", "BatchNorm2d", "Buffer", "CfC", "CfCCell", "Conv1d", "Conv2d", "ConvTranspose1d",
    "ConvTranspose2d", "Dropout", "Embedding", "Ensemble", "Flatten", "GRUCell", "GroupNorm", "InstanceNorm1d",
    "InstanceNorm2d", "LSTMCell", "LayerNorm", "LeakyReLU", "Linear", "LogSigmoid", "LogSoftmax", "MaxPool1d",
    "MaxPool2d", "MoE", "Module", "ModuleDict", "ModuleList", "MultiHeadAttention", "Parameter", "RMSNorm",
    "RNNCell", "ReLU", "Recurrent", "Residual", "RotaryEmbedding", "Sequential", "SiLU", "Sigmoid",
    "SinusoidalEmbedding", "Softmax", "Softplus", "SwiGLU", "Tanh", "TransformerBlock", "as_module", "balance_loss",
    "functional", "init", "z_loss",
]  # fmt: skip
