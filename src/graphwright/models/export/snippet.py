"""Source that loads an export with transformers, with the options that its files need."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphwright.models.stacks import divide
from graphwright.ops import get
from graphwright.program.axes.solve_axes import origin
from graphwright.safetensors import Checkpoint

if TYPE_CHECKING:
    from graphwright.models.model import Model

ALIGNED = 16
"""Bytes of which a row of a matrix must have a multiple in `torch.nn.functional.grouped_mm` (torch 2.13)."""
EAGER = {"experts_implementation": "eager"}
UNALIGNED = (
    f"rows of experts are no multiples of {ALIGNED} bytes, which transformers' default, grouped_mm, refuses: "
    'load the files with experts_implementation="eager"'
)


def loading_options(written: Model, directory: Path, runs_code: bool) -> dict[str, Any]:
    """Return the options of `from_pretrained` for a directory that has the weights of `written`.

    `runs_code` tells that the directory has modeling code, which has its own implementation of experts.
    """
    if runs_code:
        return {"trust_remote_code": True}
    p, rows = written.program, set[int]()
    with divide(Checkpoint(directory), written.arch, written.config_dims) as files:
        for node in p.of_traits(mixture=True):
            groups = get(p.op(node)).groups
            assert groups is not None
            stored = (origin(p, v) for v in p.operands(node)[groups(p.attrs(node))[0] :])
            infos = [files.info(p.key(n)) for n in stored if n is not None]
            rows |= {info.nbytes // info.shape[0] for info in infos if len(info.shape) == 2 and info.shape[0]}
    return EAGER if any(nbytes % ALIGNED for nbytes in rows) else {}


def snippet(name: str, options: Mapping[str, Any], made_by: str = "AutoModelForCausalLM") -> str:
    """Return source that loads the directory `name` from its parent folder, by the class `made_by` of transformers.

    `options` are those of `from_pretrained`.
    """
    extra = "".join(f", {key}={json.dumps(v) if isinstance(v, str) else v}" for key, v in options.items())
    load = f"model = {made_by}.from_pretrained({json.dumps(f'./{name}')}{extra})"
    return f"from transformers import {made_by}\n\n{load}\n"
