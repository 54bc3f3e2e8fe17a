"""What a trace holds, how it names its inputs, and what it refuses to bake in."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.autograd import TraceError
from graphwright.program import BadName, NameTaken

pytestmark = pytest.mark.usefixtures("young_heap")

X = np.ones((2, 3), "f4")


class Residual(gw.nn.Module):
    def __init__(self) -> None:
        self.fc = gw.nn.Linear(3, 3)

    def forward(self, hidden, scale):
        return hidden + self.fc(hidden) * scale


def names(p: gw.Program) -> list[str]:
    return [p.path(n) for n in p.inputs()]


def test_inputs_of_a_traced_module_have_the_names_of_forward():
    p = gw.trace(Residual(), X, X)
    assert (p.name, names(p)) == ("Residual", ["hidden", "scale"])
    assert p.path(p.params()[0]).startswith("fc.")


def test_inputs_of_a_traced_function_have_its_parameter_names_or_numbers():
    assert names(gw.trace(lambda a, *rest: a + rest[0] + rest[1], X, X, X)) == ["a", "x0", "x1"]
    assert names(gw.trace(lambda x0, *rest: x0 + rest[0] + rest[1], X, X, X)) == ["x0", "x1", "x2"]
    assert names(gw.trace(lambda x: -x, X, names=("given",))) == ["given"]


def test_duplicate_input_names_are_refused():
    with pytest.raises(NameTaken):
        gw.trace(lambda a, b: a + b, X, X, names=("a", "a"))
    with pytest.raises(BadName):
        gw.trace(lambda a: -a, X, names=("a..b",))


# -- what a trace holds ------------------------------------------------------------------------------------------------
def test_a_trace_equals_the_function_on_other_inputs():
    net = gw.nn.Sequential(gw.nn.Linear(3, 4), gw.nn.Tanh(), gw.nn.Linear(4, 2))
    shift = np.arange(2, dtype="f4")

    def f(x):
        h = net(x)
        for k in range(3):  # unrolled
            h = h + (h * k).exp() * gw.tensor(shift)
        return h

    p = gw.trace(f, X)
    assert [p.op(n) for n in p.order()].count("exp") == 3
    assert {p.key(n) for n in p.params()} == {f"{i}.{name}" for i in (0, 2) for name in ("weight", "bias")}
    for seed in range(3):
        x = np.random.default_rng(seed).normal(size=(2, 3)).astype("f4")
        assert p.run(x=x)[p.output_names()[0]].tobytes() == f(gw.tensor(x)).numpy().tobytes()
    assert p.weights["0.weight"] is net.variables()["0.weight"]


@pytest.mark.parametrize("collecting", [False, True])
def test_temporary_arrays_at_one_address_are_distinguished(collecting, monkeypatch):
    """Freed memory is reused at once: a trace that identified arrays by address would merge them."""
    import gc

    from graphwright.program import TraceRecorder

    if collecting:
        plain = TraceRecorder.record
        monkeypatch.setattr(TraceRecorder, "record", lambda *args: (gc.collect(0), plain(*args))[1])

    def f(x):
        for i in range(12):
            x = x + gw.tensor(np.full((2, 3), float(i), "f4"))
        return x

    p = gw.trace(f, X)
    y = p.output_names()[0]
    assert p.run(x=X)[y].to_numpy().tolist() == (X + sum(range(12))).tolist()
    assert p.compile(x=(2, 3)).hash == gw.trace(f, X).compile(x=(2, 3)).hash
    assert len(p.of_kind("const")) == 12


HOLES = {
    "float": lambda x: x * float(x.sum()),
    "bool": lambda x: x if x.sum() > 0 else -x,
    "item": lambda x: x * x.sum().item(),
    "numpy": lambda x: x * np.asarray(x).sum(),
    "a function of numpy": np.tanh,
    "an index": lambda x: x[int(x.sum()) - 6],
    "elements": lambda x: x * sum(float(v) for v in x[0]),
    "a list": lambda x: x * x.tolist()[0][0],
    "dlpack": lambda x: x + gw.tensor(np.from_dlpack(x)),
    "a mask": lambda x: x[x > 0],
    "indices": gw.nonzero,
}


@pytest.mark.parametrize("hole", HOLES)
def test_reading_values_while_tracing_is_refused(hole):
    for run in (lambda: gw.trace(HOLES[hole], X), lambda: gw.compile(HOLES[hole])(X)):
        with pytest.raises(TraceError):
            run()
    HOLES[hole](gw.tensor(X))  # and means something where there is a value


# -- nested arguments and results --------------------------------------------------------------------------------------
@pytest.mark.parametrize("layer", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers_are_traced_with_their_states(layer):
    net = getattr(gw.nn, layer)(3, 4, 2)
    x = np.random.default_rng(0).normal(size=(2, 5, 3)).astype("f4")
    out, states = net(gw.tensor(x))
    flat = {f"out_1.{k}": h for k, h in enumerate(states)} if layer == "LSTM" else {"out_1": states}
    p = gw.trace(net, x)
    assert p.output_names() == ("out", *flat)
    for name, wanted in {"out": out, **flat}.items():
        assert p.run(x=x)[name].tobytes() == wanted.data.tobytes()
    given = gw.trace(net, x, states)
    named = {name.replace("out_1", "hx"): h.numpy() for name, h in flat.items()}
    assert given.input_names() == ("x", *named)
    assert given.run({"x": x, **named})["out"].tobytes() == net(gw.tensor(x), states)[0].data.tobytes()


@pytest.mark.parametrize(("layer", "operands"), [
    (lambda: gw.nn.LSTM(3, 4, 2, bidirectional=True), 1),
    (lambda: gw.nn.GRU(3, 4), 1),
    (lambda: gw.nn.MultiheadAttention(3, 1), 3),
])  # fmt: skip
def test_results_that_nothing_reads_leave_no_ops(layer, operands):
    """States and attention weights are results that most callers ignore; an output keeps them."""
    net, x = layer(), np.ones((5, 2, 3), "f4")
    first = gw.trace(lambda *xs: net(*xs)[0], *operands * [x])
    assert set(first.reachable(first.outputs())) == set(first.nodes())
    assert first.validate().ok
    both = gw.trace(net, *operands * [x])
    assert len(both) > len(first)
    assert set(both.reachable(both.outputs())) == set(both.nodes())
    kept = gw.trace(lambda *xs: (net(*xs)[0], gw.ones(2) * 1.0), *operands * [x])
    assert "out_1" in kept.output_names()


def test_nested_results_and_arguments_have_paths_as_names():
    def fn(x, more):
        return {"a": x, "b": [more["k"] + 1.0, None, {"c": more["pair"][1] * 2.0}], "n": 2.0}

    p = gw.trace(fn, X, {"k": X, "pair": (None, X)})
    assert p.input_names() == ("x", "more.k", "more.pair.1")
    assert p.output_names() == ("a", "b.0", "b.2.c", "n")
    assert p.run({"x": X, "more.k": X, "more.pair.1": 3 * X})["b.2.c"].to_numpy().tolist() == (6 * X).tolist()
    assert gw.trace(lambda x: x, [[1, 2], [3, 4]]).spec("x").shape == (2, 2)
    assert gw.trace(lambda x, y, z: x + z, X, None, X).input_names() == ("x", "z")
    assert gw.trace(lambda x: None, X).output_names() == ()
    with pytest.raises(TraceError, match="same name"):
        gw.trace(lambda x: {"a": (x,), "a.0": x}, X)
    with pytest.raises(TraceError, match="unsupported result"):
        gw.trace(lambda x: (x, {"a": object()}), X)


@pytest.mark.parametrize("view", [lambda t: t.transpose(0, 1), lambda t: t[:1].expand(3, 3), lambda t: t[:, ::2]])
def test_views_of_arrays_are_constants_of_compiled_functions(view):
    constant = view(gw.tensor(np.arange(9, dtype="f4").reshape(3, 3)))
    x = np.ones((3, 1), "f4")
    assert np.array_equal(gw.compile(lambda x: x + constant)(x), x + np.asarray(constant))
