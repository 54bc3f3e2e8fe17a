"""What cannot be imported: errors that name the line of the module's code and a way out; the module stays as it was."""

from __future__ import annotations

import hashlib
import inspect
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.models.errors import CaptureError, UnsupportedOperator
from values import grad_of


class OnValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.sum() > 0 else x * 3


class OnItem(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x[: int(x[0, 0].item())] * float(x.max().item() > 1 and 2)


class Cached(nn.Module):
    def forward(self, x: torch.Tensor, cache: Any = None) -> torch.Tensor:
        return cache.update(x)


class OnNumpy(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(np.sort(x.detach().numpy())) * x


class OnShapeOfValues(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x[i] for i in range(int((x > 0).sum()))])


@pytest.mark.parametrize("kind", [OnValues, OnItem, Cached, OnNumpy, OnShapeOfValues])
def test_modules_without_a_graph_are_refused_with_their_line(kind, capfd):
    first = inspect.getsourcelines(kind.forward)[1]
    with pytest.raises(CaptureError) as caught:
        gw.from_torch(kind(), (torch.ones(3, 4),))
    assert caught.value.where == f"test_refusals.py:{first + 1}", caught.value
    assert "wrap the module" in str(caught.value.fix)
    assert capfd.readouterr() == ("", "")  # torch prints the graph that it gave up


class OnSizes(nn.Module):
    def forward(self, x: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        first, second = x.split(counts.tolist())
        return torch.cat([first * 2, second])


def test_values_that_are_sizes_are_refused_with_their_line():
    first = inspect.getsourcelines(OnSizes.forward)[1]
    with pytest.raises(CaptureError, match="sizes of a split") as caught:
        gw.from_torch(OnSizes(), (torch.ones(3, 4), torch.tensor([1, 2])))
    assert str(caught.value.where).endswith(f"test_refusals.py:{first + 1}")


def test_a_text_as_an_argument_is_an_error():
    with pytest.raises((CaptureError, UsageError)):
        gw.from_torch(nn.Linear(3, 2), ("text",))


class ThreeUnknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.special.bessel_j0(self.inner(x))
        x = torch.special.bessel_j1(x) + torch.special.bessel_j1(x * 2)
        return torch.special.airy_ai(x)


def test_all_unknown_operators_are_named_at_once_with_line_and_count():
    with pytest.raises(UnsupportedOperator) as caught:
        gw.from_torch(ThreeUnknown(), (torch.ones(3, 4),))
    first = inspect.getsourcelines(ThreeUnknown.forward)[1]
    found = {name.partition(".")[0].removeprefix("special_").rpartition("::")[2]: lines
             for name, lines in caught.value.operators.items()}  # fmt: skip
    assert {name: len(lines) for name, lines in found.items()} == {"bessel_j0": 1, "bessel_j1": 2, "airy_ai": 1}
    (last,) = found["airy_ai"]
    assert last.endswith(f"test_refusals.py:{first + 3}")


def state(module: nn.Module) -> tuple[Any, ...]:
    """Bytes, modes, gradients and hooks of a module."""
    digest = hashlib.sha256()
    for key, tensor in module.state_dict().items():
        digest.update(key.encode() + tensor.numpy().tobytes())
    modes = [part.training for part in module.modules()]
    grads = [None if p.grad is None else p.grad.numpy().tobytes() for p in module.parameters()]
    hooks = [(len(part._forward_hooks), len(part._backward_hooks)) for part in module.modules()]
    flags = [(p.requires_grad, p.dtype, p.data_ptr()) for p in module.parameters()]
    return digest.hexdigest(), modes, grads, hooks, flags, sorted(map(str, module.__dict__))


@pytest.mark.parametrize("train", [False, True])
def test_a_module_stays_bit_for_bit_as_it_was(train):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), nn.Flatten(), nn.Linear(64, 2))
    module[1].eval()
    module(torch.randn(2, 3, 6, 6)).sum().backward()
    module[0].register_forward_hook(lambda m, i, o: None)
    before = state(module)
    program = gw.from_torch(module, (torch.randn(2, 3, 6, 6),), sizes={"input": ("B", 3, 6, 6)}, train=train)
    x = torch.randn(4, 3, 6, 6)
    program(input=gw.tensor(x.numpy()))["out"].sum().backward()
    assert state(module) == before
    with pytest.raises(CaptureError):
        gw.from_torch(OnValues(), (torch.ones(2, 2),))


def test_batch_statistics_are_states_that_follow_torch_over_20_steps():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()).double()
    program = gw.from_torch(module, (torch.randn(2, 3, 6, 6).double(),), sizes={"input": ("B", 3, 6, 6)}, train=True)
    for step in range(20):
        x = torch.randn(2 + step % 3, 3, 6, 6).double()
        found = program(input=gw.tensor(x.numpy()))["out"]
        np.testing.assert_allclose(found.numpy(), module(x).detach().numpy(), rtol=1e-10, atol=1e-12)
    for key, buffer in module.named_buffers():
        np.testing.assert_allclose(program.weights[key].numpy(), buffer.numpy(), rtol=1e-10, err_msg=key)


def test_dropout_in_training_scales_what_it_keeps():
    program = gw.from_torch(nn.Dropout(0.25), (torch.ones(4, 5),), sizes={"input": ("B", 5)}, train=True)
    gw.manual_seed(0)
    found = program(input=gw.ones(4000, 5))["out"].numpy()
    assert set(np.unique(found.round(5))) == {0.0, np.float32(1 / 0.75).round(5)}
    assert abs((found == 0).mean() - 0.25) < 0.02


def test_modules_called_twice_and_tied_weights_are_one_param():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.inner, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.inner(torch.relu(self.inner(self.embed(ids)))))

    module, ids = Twice(), torch.randint(0, 7, (2, 3))
    program = gw.from_torch(module, (ids,), sizes={"ids": ("B", "T")})
    assert len(program.params()) == 3
    found = program(ids=gw.tensor(ids.numpy()))["out"]
    found.sum().backward()
    module(ids).sum().backward()
    for key in ("embed.weight", "inner.weight", "inner.bias"):
        own = {key, "head.weight"} if key == "embed.weight" else {key}
        (variable,) = {id(program.weights[k]): program.weights[k] for k in own if k in program.weights}.values()
        wanted = grad_of(module.get_parameter(key)).numpy()
        np.testing.assert_allclose(grad_of(variable).numpy(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_where_torch_rounds(dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 8), nn.Softmax(-1)).to(dtype)
    x = torch.randn(5, 16, dtype=dtype)
    program = gw.from_torch(module, (x,), sizes={"input": ("B", 16)})
    found = program(input=gw.tensor(x.float().numpy()).to(str(dtype).removeprefix("torch.")))["out"]
    assert found.dtype.name == str(dtype).removeprefix("torch.")
    want = module(x).detach().float().numpy()
    ulp = np.spacing(np.abs(want).astype("f4")) * (2 ** (16 if dtype is torch.bfloat16 else 13))
    assert (np.abs(found.float().numpy() - want) <= ulp).all()
