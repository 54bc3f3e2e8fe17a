"""Weight norm and spectral norm against torch: names, values, gradients, buffers, and in compiled steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import graphwright as gw
from graphwright.errors import UsageError

LAYERS: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    "Linear": ((4, 3), (2, 4)), "Conv2d": ((4, 3, 2), (2, 4, 5, 5)), "ConvTranspose2d": ((4, 3, 2), (2, 4, 5, 5)),
}  # fmt: skip
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("weight_norm", {}), ("weight_norm", {"dim": None}), ("weight_norm", {"dim": 1}), ("spectral_norm", {}),
    ("spectral_norm", {"n_power_iterations": 3}),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("kind", "options"), KINDS)
@pytest.mark.parametrize("layer", LAYERS)
def test_values_gradients_and_buffers_match_torch(layer: str, kind: str, options: dict[str, Any]) -> None:
    sizes, shape = LAYERS[layer]
    x = np.random.default_rng(0).standard_normal(shape).astype("f4")
    nets: list[Any] = [getattr(lib.nn.utils, kind)(getattr(lib.nn, layer)(*sizes), **options) for lib in (gw, torch)]
    mine, theirs = nets
    assert set(mine.state_dict()) == set(theirs.state_dict())
    mine.load_state_dict({n: v.numpy() for n, v in theirs.state_dict().items()})
    for step in range(3):
        if step == 2:
            mine.eval()
            theirs.eval()
        found = []
        for net, lib in ((mine, gw), (theirs, torch)):
            net.zero_grad()
            y = net(lib.tensor(x))
            (y * y).sum().backward()
            found.append([y.detach(), *(net.state_dict()[n] for n in theirs.state_dict())])
            found[-1] += [dict(net.named_parameters())[n].grad for n, _ in theirs.named_parameters()]
        for a, b in zip(*found, strict=True):
            np.testing.assert_allclose(np.asarray(a), b.detach().numpy(), rtol=2e-3, atol=2e-4)
    y = mine(gw.tensor(x)).detach().numpy()
    getattr(gw.nn.utils, f"remove_{kind}")(mine)
    assert set(mine.state_dict()) == {"weight", "bias"}
    np.testing.assert_allclose(mine(gw.tensor(x)).detach().numpy(), y, rtol=1e-5, atol=1e-6)


class Squares(gw.nn.Module):
    def __init__(self, net: Any) -> None:
        self.net = net

    def forward(self, x: Any) -> Any:
        return {"loss": (self.net(x) ** 2).mean()}


@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm"])
def test_a_compiled_step_equals_eager_steps(kind: str) -> None:
    x = gw.tensor(np.random.default_rng(0).standard_normal((4, 3)).astype("f4"))
    results = []
    for compiled in (False, True):
        gw.manual_seed(0)
        net: Any = getattr(gw.nn.utils, kind)(gw.nn.Linear(3, 2))
        opt = gw.optim.SGD(net.parameters(), lr=0.1)
        loss = Squares(net)
        step = gw.compile_step(gw.trace(loss, x), "loss", opt, {"x": (4, 3)}) if compiled else None
        for _ in range(3):
            if step is not None:
                step(x=x)
                continue
            opt.zero_grad()
            loss(x)["loss"].backward()
            opt.step()
        results.append([v.numpy() for v in net.state_dict().values()])
    for a, b in zip(*results, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_wrong_names_are_refused() -> None:
    with pytest.raises(UsageError, match=r"bias"):
        gw.nn.utils.weight_norm(gw.nn.Linear(1, 1), "kernel")
    with pytest.raises(UsageError, match="parametrization"):
        gw.nn.utils.remove_weight_norm(gw.nn.utils.spectral_norm(gw.nn.Linear(2, 2)))
    with pytest.raises(UsageError, match="iterations"):
        gw.nn.utils.spectral_norm(gw.nn.Linear(2, 2), n_power_iterations=0)
