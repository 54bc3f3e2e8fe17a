"""Programs as ONNX: the checker takes the file, onnxruntime computes the same at sizes that were left open."""

from __future__ import annotations

import checkpoints
import numpy as np
import onnx
import onnxruntime
import pytest
from edits import cut_attention, link, narrow, skip

import graphwright as gw
from graphwright import evolve
from graphwright.errors import UsageError
from graphwright.files import DestinationExists, UnwritableTarget
from graphwright.models import ExportError, VerificationFailed
from graphwright.models import onnx as onnx_file
from graphwright.models.export.verify import LoaderOutput
from graphwright.models.onnx import check_onnx, run_cached, run_onnx, save_onnx

SHAPES = [(1, 1), (2, 7), (3, 40)]
FAMILIES = [
    *("llama", "mistral-window", "qwen2-windows", "qwen3-tied", "llama-mlp-bias"),
    *("rope-dynamic", "rope-yarn", "rope-longrope-long", "llama-gelu-tanh"),
]


def agree(p, path, feeds, tolerance=1e-4, opset=20):
    """Every output within a share of its largest entry; the checker has taken the file when it was written."""
    save_onnx(p, path, opset=opset)
    for feed, run in zip(feeds, run_onnx(path, feeds), strict=True):
        ours = p(**feed)
        outputs = ours if isinstance(ours, dict) else {p.output_names()[0]: ours}
        assert run.keys() == outputs.keys()
        for name, value in outputs.items():
            wanted = value.numpy()
            assert run[name].shape == wanted.shape
            assert np.abs(run[name] - wanted).max() <= tolerance * max(np.abs(wanted).max(), 1e-6)


def prompts():
    for shape in SHAPES:
        ids = checkpoints.some_ids(shape, seed=shape[1])
        yield {"ids": ids, "positions": np.broadcast_to(np.arange(shape[1]), shape).copy()}


@pytest.mark.parametrize("name", FAMILIES)
def test_exported_families_match_at_three_shapes(made, tmp_path, name):
    agree(gw.open(made(name).path).program, tmp_path / "model.onnx", list(prompts()))


WHOLE = {"RMSNormalization", "RotaryEmbedding", "Attention"}


@pytest.mark.parametrize("name", FAMILIES)
def test_exports_with_a_cache_run_a_text_in_pieces(made, tmp_path, name):
    m = gw.open(made(name).path)
    file = save_onnx(m.program, tmp_path / "model.onnx", opset=23, cache=True)
    assert {n.op_type for n in onnx.load(file).graph.node} >= WHOLE
    ids = checkpoints.some_ids((2, 24), seed=2)
    assert checkpoints.relative(run_cached(file, ids, []), m.logits(ids)) <= 1e-5
    cuts, cache = [9, 10, 16], m.new_cache(24, batch=2, kind="static")
    ours = np.stack([m.prefill(cache, part) for part in np.split(ids, cuts, axis=1)], axis=1)
    theirs = run_cached(file, ids, cuts)[:, [*(c - 1 for c in cuts), -1]]
    assert checkpoints.relative(theirs, ours) <= 1e-5


@pytest.mark.parametrize("opset", [20, 23])
def test_20_cached_steps_give_the_same_tokens(made, tmp_path, opset):
    m = gw.open(made("llama-attention-bias").path)
    cut_attention(m, 1)
    narrow(m, 2)
    skip(m, 0)
    m.select("layers.0.attn").heads[[0, 1, 3]].prune(ragged=True)
    file = save_onnx(m.program, tmp_path / "model.onnx", opset=opset, cache=True)
    session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    names = [o.name for o in session.get_outputs()]
    assert names == ["logits", *(f"present.{n}.{s}" for n in (0, 1) for s in ("key", "value"))]
    shapes = {i.name: i.shape for i in session.get_inputs()}
    rows = {n: np.zeros((1, s[1], 0, s[3]), "f4") for n, s in shapes.items() if n.startswith("past_key_values.")}
    ids, tokens, at = checkpoints.some_ids((1, 7)), [], 0
    for _ in range(20):
        feeds = {"ids": ids, "positions": np.arange(at, at + ids.shape[1])[None], **rows}
        made_ = dict(zip(names, map(np.asarray, session.run(names, feeds)), strict=True))
        rows = {n: made_[n.replace("past_key_values", "present")] for n in rows}
        at += ids.shape[1]
        tokens.append(int(made_["logits"][0, -1].argmax()))
        ids = np.array([[tokens[-1]]])
    assert all(r.shape[2] == 26 for r in rows.values())
    assert tokens == m.generate(checkpoints.some_ids((7,)), 20).ids


def test_fused_ops_with_other_attributes_match(tmp_path):
    """Rotation of neighbours and of a part, unit offset, attention over fewer queries than keys; and in float64."""
    rng = np.random.default_rng(3)
    for kind in ("f4", "f8"):
        b = gw.Builder("uses")
        dtype = {"f4": gw.float32, "f8": gw.float64}[kind]
        q, k, v = (b.input(n, ("B", h, t, 6), dtype=dtype) for n, h, t in (("q", 4, "T"), ("k", 2, "K"), ("v", 2, "K")))
        angle = [b.input(n, ("B", "T", 2), dtype=dtype) for n in ("cos", "sin")]
        rotated = b.rope(q, *angle, style="half" if kind == "f8" else "interleaved")
        x = b.rms_norm(rotated, b.param("w", weights(rng, 6).astype(kind)), eps=0.1, unit_offset=True)
        for n, options in enumerate(({"causal": False}, {}, {"window": 2})):
            b.output(b.sdpa(x, k, v, scale=0.4, **options), f"y{n}")
        feeds = []
        for queries, keys in ((1, 5), (4, 4), (3, 8)):
            shapes = {"q": (2, 4, queries, 6), "k": (2, 2, keys, 6), "v": (2, 2, keys, 6)}
            shapes |= dict.fromkeys(("cos", "sin"), (2, queries, 2))
            feeds.append({n: rng.normal(size=s).astype(kind) for n, s in shapes.items()})
        p = b.build()
        agree(p, tmp_path / f"{kind}.onnx", feeds, 1e-5, opset=23)
        used = {n.op_type for n in onnx.load(tmp_path / f"{kind}.onnx").graph.node}
        assert WHOLE & used == (WHOLE if kind == "f4" else set())


def test_unsupported_opsets_are_refused(made, tmp_path):
    with pytest.raises(UsageError, match="20 or 23"):
        gw.open(made("llama").path).program.to_onnx(tmp_path / "model.onnx", opset=21)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_weights_are_written_in_the_compute_dtype(made, tmp_path, dtype):
    p = gw.open(made("llama").path, dtype=dtype).program
    agree(p, tmp_path / "model.onnx", list(prompts()))
    tensors = onnx.load(tmp_path / "model.onnx").graph.initializer
    assert {t.name for t in tensors if not t.name.startswith("constant_")} >= {"model.norm.weight"}


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("read", [True, False])
def test_weights_may_be_outputs(tmp_path, dtype, read):
    b = gw.Builder("weights")
    x, w = b.input("x", ("B", 3)), b.param("w", np.arange(6, dtype=dtype).reshape(2, 3))
    b.output(b.linear(x, b.cast(w, dtype="float32")) if read else b.tanh(x), "y")
    b.output(w, "weight")
    p, x = b.build(), np.ones((2, 3), "f4")
    (got,) = run_onnx(save_onnx(p, tmp_path / "model.onnx"), [{"x": x}])
    assert np.array_equal(got["weight"], p.weights["w"])
    assert got["weight"].dtype == dtype
    np.testing.assert_allclose(got["y"], p.run(x=x)["y"], rtol=1e-6)


def test_weights_inputs_states_and_outputs_may_share_a_name(tmp_path):
    b = gw.Builder("names")
    x, w, v = b.input("x", (2, 3)), b.param("w", np.full(3, 2.0, "f4")), b.param("v", np.full(3, 3.0, "f4"))
    total = b.state("total", np.ones((2, 3), "f4"))
    y = b.add(b.mul(b.add(b.mul(x, w), v), b.const("half", np.float32(0.5))), total)
    b.assign(total, y)
    b.output(y, "half")
    b.output(v, "w")
    p = b.build()
    with p.edit("keys are the names of an input, of a state and of a constant of the file") as e:
        e.rename("w", "first", key="x")
        e.rename("v", "second", key="total.next")
        e.rename("total", "total", key="carried")
        e.rename("half", "third", key="total")
    check_onnx(p, save_onnx(p, tmp_path / "model.onnx"))


def test_a_batch_norm_adds_no_tensor_or_cast_that_it_does_not_need(tmp_path):
    """onnxruntime warns of each tensor that no node reads."""
    net = gw.nn.Sequential(gw.nn.Conv2d(1, 3, 3), gw.nn.BatchNorm2d(3)).eval()
    x = np.random.default_rng(0).normal(size=(2, 1, 5, 5)).astype("f4")
    agree(gw.trace(net, x), tmp_path / "net.onnx", [{"x": x}], 1e-5)
    graph = onnx.load(tmp_path / "net.onnx").graph
    assert {t.name for t in graph.initializer} <= {i for n in graph.node for i in n.input}
    assert [n.op_type for n in graph.node] == ["Conv", "BatchNormalization", "Identity"]


def test_a_file_that_onnxruntime_cannot_run_raises(made, tmp_path):
    m = gw.open(made("llama").path, dtype="bfloat16", compute="bfloat16")
    with pytest.raises(VerificationFailed, match=r'onnxruntime cannot run[^$]*compute="float32"'):
        run_onnx(save_onnx(m.program, tmp_path / "model.onnx"), list(prompts()))


def test_an_edited_model_is_exported_correctly(made, tmp_path):
    m = gw.open(made("llama").path)
    cut_attention(m, 1)
    narrow(m, 2)
    skip(m, 0)
    link(m, 0)
    m.select("layers.0.attn").heads[[0]].prune(ragged=True)
    agree(m.program, tmp_path / "model.onnx", list(prompts()))


def weights(rng, *shape):
    return rng.normal(0, 0.4, shape).astype(np.float32)


def test_a_manually_built_mlp_is_exported_correctly(tmp_path):
    rng = np.random.default_rng(0)
    b = gw.Builder("mlp")
    x = b.input("x", ("N", 5))
    h = b.gelu(b.linear(x, b.param("a", weights(rng, 9, 5)), b.param("b", weights(rng, 9))), approximate="none")
    h = b.layer_norm(h, b.param("g", weights(rng, 9)), b.param("c", weights(rng, 9)))
    b.output(b.log_softmax(b.linear(h, b.param("d", weights(rng, 3, 9)))), "scores")
    b.output(b.sum(h, axes=(1,), keepdims=False), "total")
    feeds = [{"x": weights(rng, n, 5)} for n in (1, 4, 33)]
    agree(b.build(), tmp_path / "mlp.onnx", feeds)


def test_a_manually_built_convolutional_net_is_exported_correctly(tmp_path):
    rng = np.random.default_rng(1)
    b = gw.Builder("cnn")
    x = b.input("image", ("N", 3, 16, 16))
    h = b.conv(x, b.param("k1", weights(rng, 8, 3, 3, 3)), b.param("b1", weights(rng, 8)), padding=1)
    h = b.batch_norm(h, b.const("mean", weights(rng, 8)), b.const("var", np.abs(weights(rng, 8)) + 0.5))
    h, _ = b.max_pool(b.relu(h), kernel=(2, 2))
    h = b.conv(h, b.param("k2", weights(rng, 8, 4, 3, 3)), groups=2, padding=1, stride=2)
    h = b.group_norm(h, b.param("g", weights(rng, 8)), b.param("c", weights(rng, 8)), groups=4)
    h = b.flatten(b.adaptive_avg_pool(h, sizes=(1, 1)), start=1, end=3)
    b.output(b.linear(h, b.param("w", weights(rng, 4, 8))), "scores")
    agree(b.build(), tmp_path / "cnn.onnx", [{"image": weights(rng, n, 3, 16, 16)} for n in (1, 2, 5)])


def test_an_evolved_champion_is_exported_correctly(tmp_path):
    run = evolve.Evolution(evolve.tasks.xor(), evolve.scalar(), evolve.NEAT(population=60), seed=7)
    champion = run.run(max_generations=12).best
    p = champion.program
    rng = np.random.default_rng(2)
    inputs = p.spec("x").shape[1]
    p.to_onnx(tmp_path / "champion.onnx")
    for n in (1, 4, 9):
        x = weights(rng, n, inputs)
        (found,) = run_onnx(tmp_path / "champion.onnx", [{"x": x}])
        np.testing.assert_allclose(found["y"], champion.predict(x), rtol=1e-4, atol=1e-5)


def test_one_error_lists_every_unsupported_op(tmp_path):
    b = gw.Builder("bad")
    x = b.input("x", (4,))
    indices = [b.nonzero(v, size=3, fill=0) for v in (x, b.relu(x))]
    b.output(b.add(*indices, name="sum"), "y")
    with pytest.raises(ExportError) as error:
        save_onnx(b.build(), tmp_path / "bad.onnx")
    assert str(error.value).count("(nonzero)") == 2
    assert list(tmp_path.iterdir()) == []


def test_export_can_write_onnx_and_compares_it(made, tmp_path, monkeypatch):
    from graphwright.models.export import export as exporting

    m = gw.open(made("llama").path)
    narrow(m, 1)
    monkeypatch.setattr(exporting, "transformers_installed", lambda: False)
    monkeypatch.setattr(exporting, "compute_there", lambda file, ids, **_: honest(ids))
    computed = exporting.compute_here

    def honest(ids):
        found = computed(m, ids)
        return LoaderOutput(found.outputs, found.greedy, {"missing_keys": [], "unexpected_keys": []})

    receipt = m.export(tmp_path / "out", onnx_cache=True, opset=23, prompts=[[1, 2, 3, 4]])
    assert receipt.check["onnx"]["max_rel"] <= 1e-4
    assert (receipt.check["onnx"]["opset"], receipt.check["onnx"]["cache"]) == (23, True)
    assert dict(receipt.summary())["model.onnx"].startswith("opset 23 with cache")
    assert "model.onnx" in {f["name"] for f in receipt.result["files"]}
    monkeypatch.setattr(onnx_file, "TOLERANCE", -1.0)
    with pytest.raises(VerificationFailed, match="onnxruntime"):
        m.export(tmp_path / "again", onnx=True, prompts=[[1, 2]])
    assert sorted(f.name for f in tmp_path.iterdir()) == ["out"]
    with pytest.raises(DestinationExists):
        save_onnx(m.program, tmp_path / "out/model.onnx")


RNG = np.random.default_rng(0)


def accumulator() -> gw.Program:
    b = gw.Builder("accumulator")
    x, n = b.input("x", ("N", 2)), b.state("n", np.float32(2))
    total = b.state("sums.total", np.zeros(2, "f4"))
    grown = b.add(total, b.sum(b.mul(x, n), axes=(0,), keepdims=False), name="grown")
    b.assign(total, grown)
    b.assign(b.state("unread", np.float32(1)), b.mul(n, n))
    b.output(b.tanh(total), "y")
    return b.build()


def test_an_assigned_state_is_an_input_and_an_output(tmp_path):
    """The file's next state is fed back; outputs read the state before the run. A state that stays is a weight."""
    p = accumulator()
    session = onnxruntime.InferenceSession(p.to_onnx(tmp_path / "a.onnx"), providers=["CPUExecutionProvider"])
    assert {i.name: i.shape for i in session.get_inputs()} == {"x": ["N", 2], "sums.total": [2], "unread": []}
    assert [o.name for o in session.get_outputs()] == ["y", "sums.total.next", "unread.next"]
    run, held = p.compile(x=(3, 2)), np.zeros(2, "f4")
    for _ in range(3):
        x = RNG.normal(size=(3, 2)).astype("f4")
        feeds = {"x": x, "sums.total": held, "unread": np.zeros((), "f4")}
        y, held, unread = map(np.asarray, session.run(None, feeds))
        np.testing.assert_allclose(y, run(x=x)["y"].to_numpy(), rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(held, p.weights["sums.total"].data.to_numpy(), rtol=1e-5, atol=1e-6)
        assert unread == 4
    assert held.any()


def test_an_output_with_the_name_of_a_next_state_is_refused():
    b = gw.Builder("clash")
    total = b.state("total", np.zeros(2, "f4"))
    b.assign(total, b.tanh(total))
    b.output(b.exp(total), "total.next")
    with pytest.raises(ExportError, match="next value"):
        onnx_file.to_model(b.build())


def test_modules_with_buffers_are_exported_in_evaluation(tmp_path):
    """Running statistics and rotary frequencies are states that no run assigns."""

    class Net(gw.nn.Module):
        def __init__(self) -> None:
            self.conv, self.norm, self.rotary = gw.nn.Conv2d(3, 4, 3), gw.nn.BatchNorm2d(4), gw.nn.RotaryEmbedding(8)

        def forward(self, x, positions):
            cos, sin = self.rotary(positions)
            return self.norm(self.conv(x)).relu(), cos, sin

    net = Net()
    for _, buffer in net.named_buffers():
        if buffer.dtype.is_float and buffer.shape == (4,):
            buffer.assign(gw.tensor(RNG.uniform(0.5, 1.5, 4).astype("f4")))
    x, positions = RNG.normal(size=(2, 3, 6, 6)).astype("f4"), np.arange(5)[None]
    for p in (gw.trace(net.eval(), x, positions), gw.trace(net.train(), x, positions).eval()):
        (found,) = run_onnx(p.to_onnx(tmp_path / f"{len(list(tmp_path.iterdir()))}.onnx"),
                            [{"x": x, "positions": positions}])  # fmt: skip
        run = p.run(x=x, positions=positions)
        assert found.keys() == {"out", "out_1", "out_2"}
        for name, array in found.items():
            np.testing.assert_allclose(array, run[name].to_numpy(), rtol=1e-5, atol=1e-5)
    with pytest.raises(ExportError, match=r"batch statistics belong to training; program.eval\(\)"):
        onnx_file.to_model(gw.trace(net.train(), x, positions))


def test_overwrite_replaces_a_file_and_only_a_file(tmp_path):
    path = tmp_path / "model.onnx"
    b = gw.Builder()
    b.output(b.op("relu", b.input("x", ("n",))), "y")
    program = b.build()
    path.write_bytes(b"old")
    with pytest.raises(DestinationExists) as kept:
        save_onnx(program, path)
    assert "overwrite=True" in str(kept.value.fix)
    assert path.read_bytes() == b"old"
    save_onnx(program, path, overwrite=True)
    onnx.checker.check_model(str(path))
    (tmp_path / "folder").mkdir()
    with pytest.raises(DestinationExists, match="a directory"):
        save_onnx(program, tmp_path / "folder", overwrite=True)


def test_a_target_that_cannot_be_written_is_a_typed_error(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(onnx_file.os, "replace", refuse)
    b = gw.Builder()
    b.output(b.op("relu", b.input("x", ("n",))), "y")
    with pytest.raises(UnwritableTarget, match="Permission denied") as caught:
        save_onnx(b.build(), tmp_path / "model.onnx")
    assert caught.value.where == tmp_path / "model.onnx"
    assert "choose a directory" in str(caught.value.fix)


def test_the_check_compares_a_file_with_its_program(tmp_path):
    """Small outputs too, and the next values of states; the program's states stay as they are."""
    p = accumulator()
    with p.edit("a start that is not zero") as e:
        e.set_weight("sums.total", np.array([0.5, -1], np.float32))
    path, before = p.to_onnx(tmp_path / "a.onnx"), p.hash()
    found = check_onnx(p, path)
    assert found["max_rel"] < 1e-5
    assert p.hash() == before
    with p.edit("other states than the file's") as e:
        e.set_weight("n", np.float32(3))
    with pytest.raises(VerificationFailed, match=r"sums\.total\.next"):
        check_onnx(p, path)
    b = gw.Builder("small")
    x, w = b.input("x", ("N", 4)), b.param("w", RNG.normal(size=(4, 4)).astype("f4"))
    b.output(b.mul(b.linear(x, w), b.param("scale", np.float32(1e-5))), "y")
    q = b.build()
    path = q.to_onnx(tmp_path / "small.onnx")
    assert check_onnx(q, path)["max_rel"] < 1e-5
    with q.edit("other weights than the file's") as e:
        e.set_weight("w", lambda values: 1.5 * values)
    with pytest.raises(VerificationFailed, match="differ"):
        check_onnx(q, path)


@pytest.mark.parametrize("kind", ["float32", "int32", "bool_"])
def test_sums_and_products_of_integers_and_bools(tmp_path, kind):
    x = np.array([[3, 0, 2], [1, 5, 4]]).astype(kind.rstrip("_"))

    def function(x):
        return x.sum(), x.sum(1), x.prod(0), x.cumsum(1), gw.count_nonzero(x)

    p = gw.trace(function, gw.from_numpy(x))
    (name,) = p.input_names()
    save_onnx(p, tmp_path / "sums.onnx")
    (run,) = run_onnx(tmp_path / "sums.onnx", [{name: x}])
    for made, wanted in zip(run.values(), function(gw.from_numpy(x)), strict=True):
        assert made.dtype == wanted.numpy().dtype
        assert np.array_equal(made, wanted.numpy())


def test_medians(tmp_path):
    x = np.array([[3.0, 1.0, 2.0], [1.0, 5.0, 4.0]], "f4")
    for i, function in enumerate((gw.median, gw.nanmedian, lambda x: gw.median(x, 1)[0])):
        p = gw.trace(function, gw.from_numpy(x))
        agree(p, tmp_path / f"{i}.onnx", [{p.input_names()[0]: x}])
