"""A tiny Qwen-class model written once against `xp`, run on PyTorch and on Graphwright: the same logits and gradients.

Grouped-query attention with normed heads, rotary positions, SwiGLU, RMS norms, tied embeddings, next-token loss; all in
float64. `python examples/one_model_two_libraries.py` prints how far the two are apart, and what the trace looks like.
"""

import argparse
from typing import Any

import numpy as np
import torch

import graphwright as gw


def rms_norm(x: Any, weight: Any) -> Any:
    return x * ((x * x).mean(-1, True) + 1e-6).rsqrt() * weight


def turn(xp: Any, x: Any, cos: Any, sin: Any) -> Any:
    """Rotary positions on halves of the head: x [B, H, T, D]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return xp.cat([a * cos - b * sin, b * cos + a * sin], -1)


def attention(xp: Any, x: Any, w: dict[str, Any], at: str, tables: dict[str, Any], heads: int, groups: int) -> Any:
    batch, length, dim = x.shape
    size = dim // heads

    def split(name: str, n: int) -> Any:
        return (x @ w[f"{at}.{name}"].T).reshape(batch, length, n, size).transpose(1, 2)

    q, k = rms_norm(split("q", heads), w[f"{at}.q_norm"]), rms_norm(split("k", groups), w[f"{at}.k_norm"])
    q, k = (turn(xp, t, tables["cos"], tables["sin"]) for t in (q, k))
    k, v = (t.repeat_interleave(heads // groups, 1) for t in (k, split("v", groups)))
    scores = xp.where(tables["seen"], q @ k.transpose(2, 3) * size**-0.5, -1e30)
    mixed = scores.softmax(-1) @ v
    return mixed.transpose(1, 2).reshape(batch, length, dim) @ w[f"{at}.out"].T


def model(xp: Any, ids: Any, w: dict[str, Any], tables: dict[str, Any], layers: int, heads: int, groups: int) -> Any:
    """Logits [B, T, V] of ids [B, T]."""
    x = w["embed"][ids]
    for i in range(layers):
        x = x + attention(xp, rms_norm(x, w[f"{i}.norm1"]), w, f"{i}", tables, heads, groups)
        h = rms_norm(x, w[f"{i}.norm2"])
        gate = h @ w[f"{i}.gate"].T
        x = x + (gate * gate.sigmoid() * (h @ w[f"{i}.up"].T)) @ w[f"{i}.down"].T
    return rms_norm(x, w["norm"]) @ w["embed"].T


def loss_of(xp: Any, logits: Any, targets: Any) -> Any:
    """Mean of -log softmax(logits)[target]."""
    return -logits.log_softmax(-1).gather(-1, targets).mean()


def weights(vocab: int, dim: int, hidden: int, layers: int, heads: int, groups: int) -> dict[str, np.ndarray]:
    rng, size = np.random.default_rng(0), dim // heads
    shapes = {"embed": (vocab, dim), "norm": (dim,)}
    for i in range(layers):
        shapes |= {f"{i}.norm{n}": (dim,) for n in (1, 2)} | {f"{i}.{n}_norm": (size,) for n in "qk"}
        shapes |= {f"{i}.q": (dim, dim), f"{i}.k": (groups * size, dim), f"{i}.v": (groups * size, dim)}
        shapes |= {
            f"{i}.out": (dim, dim),
            f"{i}.gate": (hidden, dim),
            f"{i}.up": (hidden, dim),
            f"{i}.down": (dim, hidden),
        }
    return {n: rng.normal(1 if "norm" in n else 0, 0.1 if "norm" in n else s[-1] ** -0.5, s) for n, s in shapes.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two layers of width 16")
    quick = parser.parse_args().quick
    layers, heads, groups, dim = (2, 4, 2, 16) if quick else (4, 6, 2, 96)
    vocab, length, size = 64, 12, dim // heads

    angle = np.arange(length)[:, None] * 10000.0 ** (-2 * np.arange(size // 2) / size)
    tables = {"cos": np.cos(angle), "sin": np.sin(angle), "seen": np.tril(np.ones((length, length), bool))}
    start = weights(vocab, dim, 3 * dim, layers, heads, groups)
    text = np.random.default_rng(1).integers(0, vocab, (3, length + 1))
    ids, targets = np.ascontiguousarray(text[:, :-1]), np.ascontiguousarray(text[:, 1:, None])

    found = {}
    for name, xp, tensor in (("torch", torch, torch.tensor), ("graphwright", gw, gw.tensor)):
        w = {n: tensor(v, requires_grad=True) for n, v in start.items()}
        made = {n: tensor(v) for n, v in tables.items()}
        logits = model(xp, tensor(ids), w, made, layers, heads, groups)
        loss = loss_of(xp, logits, tensor(targets))
        loss.backward()
        found[name] = logits.detach().numpy(), {n: t.grad.numpy() for n, t in w.items()}
        print(f"{name:<12} loss {loss.item():.12f}")

    (one, one_grads), (two, two_grads) = found.values()
    apart = np.abs(one - two).max()
    worst = max(start, key=lambda n: np.abs(one_grads[n] - two_grads[n]).max())
    grads_apart = np.abs(one_grads[worst] - two_grads[worst]).max()
    print(f"logits apart by {apart:.1e}, gradients of {len(start)} weights by {grads_apart:.1e} (at most, in {worst})")
    assert apart < 1e-10
    assert grads_apart < 1e-8

    w, made = ({n: gw.tensor(v) for n, v in values.items()} for values in (start, tables))
    program = gw.trace(lambda ids: model(gw, ids, w, made, layers, heads, groups), ids)
    assert np.allclose(program(ids=ids)["out"].numpy(), two, rtol=1e-12, atol=1e-12)
    print(f"the same function traced: {len(program.nodes())} nodes, equal logits")


if __name__ == "__main__":
    main()
