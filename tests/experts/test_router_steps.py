"""Terms in compiled steps against the eager loop."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright import experts as ex
from graphwright import nn, optim
from graphwright.autograd import no_grad
from graphwright.models.tokenizer import need_tokenizer
from graphwright.nn import ThresholdRouter

E, C, N = 6, 8, 40


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def topk_model() -> nn.Module:
    blocks = [nn.MoE(C, 4, E, 2, kind="mlp", act="gelu", normalize=k == 0, name=f"{k}.", seed=0) for k in range(2)]
    router = ThresholdRouter(C, E, 2)
    blocks.insert(1, nn.MoE(C, 4, E, kind="mlp", act="gelu", router=router, name="b.", seed=0))
    m = nn.Sequential(*map(nn.Residual, blocks))
    with no_grad():
        ex.calibrate(m, gw.tensor(normal(N, C, seed=50)), 2)
    return m


def model() -> nn.Module:
    blocks = []
    for name in ("a.", "b."):
        router = ThresholdRouter(C, E, 2, null=name == "b.")
        blocks.append(nn.Residual(nn.MoE(C, 4, E, kind="mlp", act="gelu", router=router, name=name, seed=0)))
    m = nn.Sequential(*blocks)
    with no_grad():
        ex.calibrate(m, gw.tensor(normal(N, C, seed=50)), 2)  # no cosine of a test is a threshold
    return m


def terms(opt: optim.Optimizer) -> list[ex.RouterTerm]:
    return [
        ex.sdl(target=2),
        ex.ghost(r=2),
        ex.surprise_min(weight=0.01),
        ex.long_surprise(optimizer=opt),
        ex.surprise(),
    ]


def loss_of(out: Any, target: Any) -> Any:
    return (out - target).square().mean()


def test_a_compiled_step_trains_routers_as_the_eager_loop_does():
    eager, traced = model(), model()
    mine, other = (optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in (eager, traced))
    program = gw.trace(traced, gw.tensor(normal(N, C)))
    step = gw.compile_step(program, loss_of, other, {"x": (N, C), "target": normal(N, C)}, also=terms(other))
    also = terms(mine)
    for k in range(4):
        x, target = normal(N, C, seed=k), normal(N, C, seed=100 + k)
        with ex.observe(eager) as layers:
            loss = loss_of(eager(gw.tensor(x)), gw.tensor(target))
            mine.zero_grad()
            loss.backward()
        sum((term.loss(layers) for term in also[1:-1]), also[0].loss(layers)).backward()
        also[-1].loss(layers)
        mine.step()
        assert step(x=x, target=target).item() == pytest.approx(loss.item(), rel=1e-5)
        for name in ("soft_count", "k"):
            figure = also[0].figures[f"1.inner.router.{name}"].item()
            assert float(step.reports[f"sdl.1.inner.router.{name}"].numpy()) == pytest.approx(figure, rel=1e-5)
        seen = step.reports["surprise.0.inner.router.surprise"].numpy()
        np.testing.assert_allclose(seen, also[-1].figures["0.inner.router.surprise"].numpy(), rtol=1e-3, atol=1e-6)
    for (name, p), q in zip(eager.named_parameters(), traced.parameters(), strict=True):
        np.testing.assert_allclose(p.numpy(), q.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)


def test_ghosts_of_topk_routers_train_them_in_a_compiled_step_as_in_the_eager_loop():
    """Also beside a threshold router, and after an edit of the experts and of k."""
    eager, traced = topk_model(), topk_model()
    mine, other = (optim.Adam(m.parameters(), lr=1e-2, eps=1e-3) for m in (eager, traced))
    program = gw.trace(traced, gw.tensor(normal(N, C)))
    also, theirs = ([ex.ghost(r=2, weight=0.5), ex.surprise(r=1)] for _ in range(2))
    step = gw.compile_step(program, loss_of, other, {"x": (N, C), "target": normal(N, C)}, also=theirs)
    start = {name: p.numpy().copy() for name, p in eager.named_parameters()}
    for k in range(3):
        x, target = normal(N, C, seed=k), normal(N, C, seed=100 + k)
        with ex.observe(eager) as layers:
            loss = loss_of(eager(gw.tensor(x)), gw.tensor(target))
            mine.zero_grad()
            loss.backward()
        assert [type(layer) for layer in layers] == [ex.TopKLayer, ex.ThresholdLayer, ex.TopKLayer]
        also[0].loss(layers).backward()
        also[1].loss(layers)
        mine.step()
        assert step(x=x, target=target).item() == pytest.approx(loss.item(), rel=1e-5)
        for i in range(3):
            seen = step.reports[f"surprise.{i}.inner.router.evaluated"].numpy()
            np.testing.assert_array_equal(seen, also[1].figures[f"{i}.inner.router.evaluated"].numpy())
    for (name, p), q in zip(eager.named_parameters(), traced.parameters(), strict=True):
        np.testing.assert_allclose(p.numpy(), q.numpy(), rtol=2e-4, atol=2e-5, err_msg=name)
        assert (p.numpy() != start[name]).any()
    with program.edit("fewer experts, one per token") as e:
        e.cut_units(program.axes()["2.inner.experts"].units([1, 4]))
        ex.set_k(e, "2.inner", 1)
    before = program.weights["2.inner.router.weight"].numpy().copy()
    step(x=normal(N, C), target=normal(N, C, seed=1))
    assert before.shape == (4, C)
    assert (program.weights["2.inner.router.weight"].numpy() != before).any()


def test_ghosts_train_the_router_of_an_opened_mixture():
    model = ex.upcycle(gw.open("bundled"), 4, 2, layers=["layers.1.mlp", "layers.2.mlp"], std=0.5)
    p, ids = model.program, np.array(need_tokenizer(model).encode("The following table lists"))[None]
    feeds = {"ids": ids, "positions": np.arange(ids.shape[1])[None]}
    term = ex.ghost(weight=10.0, layers="layers.2.*")

    def loss(logits: Any, ids: Any) -> Any:
        return nn.functional.cross_entropy(logits[:, :-1], ids[:, 1:], dim=-1)

    found = []
    for also in ([], [term]):
        q = p.fork()
        gw.compile_step(q, loss, optim.SGD(q, lr=1.0), feeds, also=also)(**feeds)
        found.append({q.path(n): q.weights.array(q.key(n)).to_numpy("float32") for n in q.params()})
    moved = {path for path, value in found[0].items() if (value != found[1][path]).any()}
    assert moved == {"layers.2.mlp.router.weight"}


def test_terms_follow_an_edit_that_removes_experts():
    m = model()
    opt = optim.Adam(m.parameters(), lr=1e-2)
    p = gw.trace(m, gw.tensor(normal(N, C)))
    step = gw.compile_step(p, loss_of, opt, {"x": (N, C), "target": normal(N, C)}, also=[ex.sdl(target=2), ex.ghost()])
    x, target = normal(N, C), normal(N, C, seed=1)
    step(x=x, target=target)
    kept = p.weights["0.inner.experts.3.prototype"]
    with p.edit("retire two") as e:
        e.cut_units(p.axes()["0.inner.experts"].units([1, 4]))
    before = kept.numpy().copy()
    step(x=x, target=target)
    assert (kept.numpy() != before).any()
    assert step.program.spec("0.inner.router.mask").shape == (N, 4)


@pytest.mark.parametrize("r", [0, 4])
def test_ghosts_leave_the_result_as_it_is(r):
    losses = []
    for also in ([], [ex.ghost(r=r, weight=0.5)]):
        m = model()
        p = gw.trace(m, gw.tensor(normal(N, C)))
        opt = optim.SGD(m.parameters(), lr=0.1)
        step = gw.compile_step(p, loss_of, opt, {"x": (N, C), "target": normal(N, C)}, also=also)
        losses.append(step(x=normal(N, C), target=normal(N, C, seed=1)).numpy())
    np.testing.assert_array_equal(*losses)


def test_a_program_whose_thresholds_are_all_equal_warns():
    m = nn.MoE(C, 4, E, router=ThresholdRouter(C, E, 2))
    p = gw.trace(m, gw.tensor(normal(N, C)))
    opt = optim.SGD(m.parameters(), lr=0.1)
    step = gw.compile_step(p, loss_of, opt, {"x": (N, C), "target": normal(N, C)}, also=[ex.sdl()])
    with pytest.warns(ex.Uncalibrated, match="calibrate"):
        step(x=normal(N, C), target=normal(N, C))
