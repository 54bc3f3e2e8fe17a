"""A model from a config alone, with fresh weights: what training from scratch starts with."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from graphwright.array import NDArray, dtype, from_numpy, random
from graphwright.autograd import Parameter
from graphwright.models.architectures.architecture import find
from graphwright.models.architectures.config import Config
from graphwright.models.model import Model
from graphwright.models.tokenizer import ByteTokenizer
from graphwright.program import Builder


def create(config: Config, *, seed: int = 0, compute: str = "float32") -> Model:
    """A model of a config's family with weights N(0, `initializer_range`²), norms 1 and biases 0, all float32.

    Each weight draws from the Philox stream of its name. A vocabulary of 256 gets the byte tokenizer.
    Raises: ConfigError, UnsupportedArchitecture.
    """
    family = find(config)
    dims = family.read(config)
    std = config.number("initializer_range", 0.02)
    b = Builder(config.path.parent.name)
    params, keys = {}, {}
    for path, key, shape, _ in family.weights(dims):
        params[path] = b.param(path, Parameter(_initial(path, shape, std, seed), True, key), key=key)
        keys[path] = key
    family.build(b, dims, params, dtype(compute))
    tokenizer = ByteTokenizer() if dims.vocab == 256 else None
    return Model(b.build(), family, dims, config, None, config.path.parent, keys, tokenizer, compute)


def _initial(path: str, shape: tuple[int, ...], std: float, seed: int) -> NDArray:
    if path.endswith(".bias"):
        return from_numpy(np.zeros(shape, np.float32))
    if len(shape) == 1:
        return from_numpy(np.ones(shape, np.float32))
    values = random.normal(int(np.prod(shape)), seed=seed, stream=random.stream_of(path)).reshape(shape)
    return from_numpy(values * np.float32(std))


def config_from(fields: dict, path: str | Path = "config.json") -> Config:
    """A config from fields that were not read from a file."""
    return Config(fields, (json.dumps(fields, indent=2) + "\n").encode(), Path(path))
