"""Complex numbers in imported modules: rotary embedding as Llama's reference code has it, Fourier transforms."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import fft, nn

import graphwright as gw
from graphwright.models.errors import CaptureError, UnsupportedOperator


class After(nn.Module):
    """A function of the result of a linear layer."""

    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.linear(x))


def _pair(h: torch.Tensor) -> torch.Tensor:
    return torch.complex(h, 1 - 2 * h)


FUNCTIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "two axes": lambda h: fft.fftn(h.to(torch.complex64), dim=(1, 2)).real,
    "real and back": lambda h: fft.irfft(fft.rfft(h, dim=1) * 2.0, n=h.shape[1], dim=1),
    "orthonormal": lambda h: torch.view_as_real(fft.rfft2(h, norm="ortho")),
    "filter": lambda h: fft.irfft(fft.rfft(h) * torch.polar(torch.ones(5), torch.arange(5.0)), n=8),
    "long convolution": lambda h: fft.irfft(fft.rfft(h, n=16) * fft.rfft(torch.arange(8.0), n=16), n=16)[..., :8],
    "odd length": lambda h: fft.irfft2(fft.rfft2(h[..., :7]), s=(h.shape[1], 7)),
    "imaginary unit": lambda h: fft.ifft(fft.fft(h, dim=1) * 1j + 3, dim=1, norm="forward").imag,
    "spectrum": lambda h: fft.fftshift(fft.fft(h), dim=-1).abs(),
    "conjugate": lambda h: (fft.fft(h).conj() * fft.fft(h)).real,
    "quotient": lambda h: torch.abs((_pair(h) - 1) / (_pair(h + 3) * 2)),
    "quotient by a number": lambda h: (2 / (_pair(h) + 5j) / 3).imag,
    "exponential": lambda h: torch.exp(_pair(h) * 0.1).angle(),
    "product": lambda h: (_pair(h) @ _pair(h * h).transpose(1, 2)).imag.sum(-1),
    "chosen": lambda h: torch.view_as_real(torch.where(h > 0, _pair(h), 2.0)),
    "joined": lambda h: torch.cat([_pair(h)[:, :1], fft.fft(h)], 1).flip(2).sum(2).real,
    "padded": lambda h: nn.functional.pad(_pair(h), (1, 2)).imag,
}


class All(nn.Module):
    """All functions of the result of one linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {name: function(self.linear(x)) for name, function in FUNCTIONS.items()}


@pytest.mark.deep
def test_complex_numbers_match_torch():
    module = All().eval()
    p = gw.from_torch(module, (torch.randn(2, 5, 8),), sizes={"x": ("B", "T", 8)}, share=False)
    for shape in ((2, 5), (1, 1), (3, 12)):
        x = torch.randn(*shape, 8)
        made, want = p(x=x.numpy()), module(x)
        for name in FUNCTIONS:
            np.testing.assert_allclose(made[name].numpy(), want[name].detach(), rtol=1e-4, atol=2e-5, err_msg=name)
    for name in FUNCTIONS:
        for weight in p.weights.values():
            weight.grad = None
        made, want = p(x=x.numpy())[name], module(x)[name]
        made.square().sum().backward()
        found = torch.autograd.grad(want.square().sum(), list(module.parameters()))
        for (key, _), grad in zip(module.named_parameters(), found, strict=True):
            own, scale = p.weights[key].grad, max(float(grad.abs().max()), 1e-3)
            assert own is not None
            np.testing.assert_allclose(own.numpy() / scale, grad / scale, atol=2e-5, err_msg=f"{name}, {key}")


class Rotated(nn.Module):
    """Rotary embedding by complex factors, which are a plain attribute or a buffer."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.query = nn.Linear(8, 8, bias=False)
        factors = torch.polar(torch.ones(32, 2), torch.outer(torch.arange(32.0), torch.tensor([1.0, 0.1])))
        if how == "attribute":
            self.factors = factors
        else:
            self.register_buffer("factors", factors, persistent=how == "persistent")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = torch.view_as_complex(self.query(x).float().reshape(*x.shape[:2], 2, 2, 2))
        rotated = torch.view_as_real(q * self.factors[: x.shape[1], None])
        return rotated.flatten(2).type_as(x)


@pytest.mark.parametrize("how", ["attribute", "buffer", "persistent"])
def test_rotation_by_complex_factors_matches_torch(how):
    module = Rotated(how).eval()
    p = gw.from_torch(module, (torch.randn(2, 5, 8),), sizes={"x": ("B", "T", 8)})
    x = torch.randn(3, 20, 8)
    np.testing.assert_allclose(p(x=x.numpy())["out"].numpy(), module(x).detach(), rtol=1e-5, atol=1e-6)
    assert list(p.as_module().state_dict()) == ["query.weight"]


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.randn(4, dtype=torch.complex64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x * self.factor).real


def test_complex_parameters_and_inputs_are_refused():
    with pytest.raises(CaptureError, match="factor"):
        gw.from_torch(Trained(), (torch.randn(2, 4),))
    with pytest.raises(CaptureError, match="input"):
        gw.from_torch(nn.Identity(), (torch.randn(2, 4, dtype=torch.complex64),))
    with pytest.raises(CaptureError, match="output 0"):
        gw.from_torch(After(fft.fft), (torch.randn(2, 8),))
    with pytest.raises(UnsupportedOperator, match="of complex numbers"):
        gw.from_torch(After(lambda h: torch.linalg.inv(_pair(h)).real), (torch.randn(8, 8),))
