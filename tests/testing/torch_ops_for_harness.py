"""A small torch reference for the tests of the harness itself."""

from __future__ import annotations

import torch


def torch_grads(name, arrays, seeds, mask):
    leaves = [torch.from_numpy(x.copy()).requires_grad_(want) for x, want in zip(arrays, mask, strict=True)]
    found = iter(
        torch.autograd.grad(
            getattr(torch, name)(*leaves), [t for t in leaves if t.requires_grad], torch.from_numpy(seeds[0])
        )
    )
    return [next(found).numpy() if want else None for want in mask]
