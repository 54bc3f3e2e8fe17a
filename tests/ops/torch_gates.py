"""Gates in torch, from the table of kinds: hard gates are straight-through, so that autograd gives the slopes."""

from __future__ import annotations

from collections.abc import Sequence
from math import log
from typing import Any

import numpy as np
import torch

from graphwright.array.formulas.gates import KINDS, MODES, STATES
from graphwright.array.random import philox


def noise(row: np.ndarray, run: np.ndarray) -> float:
    """The uniform number of an element by the published Philox rounds, on counters that no other op uses."""
    _, _, _, slot, generation, element, _ = (int(n) for n in row)
    seed, step, _ = (int(n) for n in run)
    counter = np.array([[element, (slot + 2**31) % 2**32, generation, step % 2**32]], np.uint32)
    word = philox(counter, (seed % 2**32, seed % 2**64 >> 32))[0, 0]
    return float(np.clip((float(word >> np.uint32(8)) + 0.5) * 2.0**-24, 1e-6, 1 - 1e-6))


def straight_through(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    return hard.to(soft.dtype) + soft - soft.detach()


def value(z: torch.Tensor, row: np.ndarray, t: torch.Tensor, run: np.ndarray) -> torch.Tensor:
    """One gate other than a choice."""
    kind, state, mode = KINDS[row[0]], STATES[row[2]], MODES[run[2]]
    if state in ("closed", "free"):
        return z.detach() * 0
    if state == "open" or mode == "open":
        return z.detach() * 0 + 1
    if state == "frozen":
        return value(z.detach(), np.array([row[0], *row[1:2], 0, *row[3:]]), t.detach(),
                     np.array([*run[:2], 0 if mode == "train" else run[2]]))  # fmt: skip
    if kind == "scale":
        return straight_through(torch.where(z.abs() < 1e-3, 0.0, z), z) if mode == "hard" else z
    if kind in ("sigmoid", "ste", "bernoulli"):
        p = torch.sigmoid(z / t)
        if mode == "soft" or (kind == "sigmoid" and mode != "hard"):
            return p
        return straight_through(p > noise(row, run) if kind == "bernoulli" and mode == "train" else z > 0, p)
    train = mode == "train"
    u = noise(row, run) if train else 0.5
    y = torch.sigmoid((z + log(u) - log(1 - u)) / (t if train else 1.0))
    soft = torch.clamp(1.2 * y - 0.1, 0, 1) if kind == "hard_concrete" else y
    if mode == "hard" or (kind == "concrete_st" and mode != "soft"):
        return straight_through(y > 0.5, soft)
    return soft


def choice(z: torch.Tensor, rows: np.ndarray, t: torch.Tensor, run: np.ndarray) -> torch.Tensor:
    mode = MODES[run[2]]
    there = torch.tensor([STATES[r[2]] in ("soft", "open", "frozen") for r in rows])
    g = torch.tensor([-log(-log(noise(r, run))) if mode == "train" else 0.0 for r in rows], dtype=z.dtype)
    y = torch.softmax(((z + g) / (t if mode == "train" else 1.0)).masked_fill(~there, -torch.inf), 0)
    return straight_through(torch.nn.functional.one_hot(y.argmax(), len(z)), y) if mode == "hard" else y


def gate(ins: Sequence[torch.Tensor], attrs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    logits, table, temperature, run = ins
    wide = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    heat = temperature.to(wide.dtype)
    rows, at, found = table.numpy(), 0, []
    for n in attrs["sizes"]:
        part, mine, t = wide[at : at + n], rows[at : at + n], heat[rows[at, 1]]
        if KINDS[mine[0, 0]] == "choice" and MODES[int(run[2])] != "open":
            whole = choice(part, mine, t, run.numpy())
        else:
            each = [value(z, r, heat[r[1]], run.numpy()) for z, r in zip(part, mine, strict=True)]
            whole = torch.stack(each)
        found.append((whole + 0 * part + 0 * heat.sum()).to(logits.dtype))  # every part hangs on both operands
        at += n
    return tuple(found)


def gate_grad(ins: Sequence[torch.Tensor], attrs: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    logits, temperature = (t.detach().clone().requires_grad_() for t in (ins[0], ins[2]))
    values = gate([logits, ins[1], temperature, ins[3]], {"sizes": attrs["sizes"]})
    pairs = zip([v for v, there in zip(values, attrs["given"], strict=True) if there], ins[4:], strict=True)
    total = sum(((v * g).sum() for v, g in pairs), (logits * 0).sum() + (temperature * 0).sum())
    return torch.autograd.grad(total, [logits, temperature])
