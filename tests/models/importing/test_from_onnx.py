"""ONNX files as programs: the function of the file, its names and sizes, edits, training, and refused files."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

import checkpoints
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data

import graphwright as gw
from graphwright import nn
from graphwright.errors import MissingExtra, ShapeError, UsageError
from graphwright.models.errors import ModelNotFound, OnnxFileError, UnsupportedOperator
from graphwright.models.onnx import run_onnx
from graphwright.nn import functional

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64


def value(name, dims, kind=FLOAT):
    return helper.make_tensor_value_info(name, kind, dims)


def model_of(nodes, inputs, outputs, tensors=(), opset=18, **options):
    graph = helper.make_graph(nodes, "net", inputs, outputs, list(tensors))
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10, **options)


def stored(name, array):
    return numpy_helper.from_array(np.asarray(array), name)


def drawn(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype("f4")


def residual_net():
    """Two blocks x + tanh(x W + b) and a head, over a dynamic batch, with names as torch's exporter writes them."""
    nodes, at = [], "x"
    tensors = [stored("head.weight", drawn(3, 4, seed=9))]
    for i in range(2):
        tensors += [stored(f"blocks.{i}.weight", drawn(4, 4, seed=i)), stored(f"blocks.{i}.bias", drawn(4, seed=i + 5))]
        nodes += [
            helper.make_node("MatMul", [at, f"blocks.{i}.weight"], [f"h{i}"], name=f"/blocks.{i}/MatMul"),
            helper.make_node("Add", [f"h{i}", f"blocks.{i}.bias"], [f"a{i}"], name=f"/blocks.{i}/Add"),
            helper.make_node("Tanh", [f"a{i}"], [f"t{i}"], name=f"/blocks.{i}/Tanh"),
            helper.make_node("Add", [at, f"t{i}"], [f"x{i}"], name=f"/blocks.{i}/Add_1"),
        ]
        at = f"x{i}"
    nodes.append(helper.make_node("Gemm", [at, "head.weight"], ["y"], name="/head/Gemm", transB=1))
    return model_of(nodes, [value("x", ["batch", 4])], [value("y", ["batch", 3])], tensors)


def by_runtime(model, feeds):
    source = model.SerializeToString() if isinstance(model, onnx.ModelProto) else str(model)
    (result,) = onnxruntime.InferenceSession(source, providers=["CPUExecutionProvider"]).run(None, feeds)
    return np.asarray(result)


# -- a file made in the test -----------------------------------------------------------------------------------------
def test_names_weights_and_dynamic_sizes_are_those_of_the_file():
    model = residual_net()
    p = gw.from_onnx(model)
    assert p.name == "net"
    assert p.spec("x").shape == ("batch", 4)
    assert set(p.weights) == {t.name for t in model.graph.initializer}
    assert [p.path(n) for n in p.junctions()] == ["blocks.0.Add_1", "blocks.1.Add_1"]
    assert p.op(p.node("head.Gemm")) == "linear"
    for batch in (1, 2, 5):
        x = drawn(batch, 4, seed=batch)
        assert np.allclose(p.run({"x": x})["y"], by_runtime(model, {"x": x}), atol=1e-6)


def test_an_edit_and_its_undo():
    model = residual_net()
    p = gw.from_onnx(model)
    x = drawn(2, 4)
    before, digest = np.asarray(p.run({"x": x})["y"]), p.hash()
    with p.edit("one branch less") as e:
        e.cut("blocks.0.Tanh -> blocks.0.Add_1")
    weights = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    wanted = (x + np.tanh(x @ weights["blocks.1.weight"] + weights["blocks.1.bias"])) @ weights["head.weight"].T
    assert np.allclose(p.run({"x": x})["y"], wanted, atol=1e-6)
    p.undo()
    assert p.hash() == digest
    assert np.array_equal(p.run({"x": x})["y"], before)


def test_training_changes_the_program_and_not_the_file(tmp_path):
    path = tmp_path / "net.onnx"
    onnx.save(residual_net(), path, save_as_external_data=True, location="net.data", size_threshold=0)
    files = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    assert set(files) == {"net.onnx", "net.data"}
    p = gw.from_onnx(path)
    assert all(v.data.storage.readonly for v in p.weights.values())
    x, target = drawn(8, 4), drawn(8, 3, seed=1)
    optimizer = gw.optim.Adam(list(p.weights.values()), lr=0.05)
    losses = []
    for _ in range(5):
        optimizer.zero_grad()
        loss = ((p(x=x)["y"] - target) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == files
    again = gw.from_onnx(path)
    assert all(not np.array_equal(again.weights[k].numpy(), p.weights[k].numpy()) for k in p.weights)


def test_gradients_are_those_of_torch():
    torch = pytest.importorskip("torch")
    p, x = gw.from_onnx(residual_net()), drawn(3, 4)
    (p(x=x)["y"] ** 2).sum().backward()
    w = {k: torch.tensor(v.numpy().copy(), requires_grad=True) for k, v in p.weights.items()}
    at = torch.tensor(x)
    for i in range(2):
        at = at + torch.tanh(at @ w[f"blocks.{i}.weight"] + w[f"blocks.{i}.bias"])
    ((at @ w["head.weight"].T) ** 2).sum().backward()
    for key, theirs in w.items():
        ours = p.weights[key].grad
        assert ours is not None
        assert theirs.grad is not None
        assert np.allclose(ours.numpy(), theirs.grad.numpy(), rtol=1e-4, atol=1e-5)


def test_names_that_paths_cannot_have_are_cleaned():
    nodes = [helper.make_node("Relu", ["a*[0]"], ["b->c"], name=""),
             helper.make_node("Exp", ["b->c"], ["y"], name="//x..y/ Exp{1}")]  # fmt: skip
    p = gw.from_onnx(model_of(nodes, [value("a*[0]", ["batch size", 2])], [value("y", ["batch size", 2])]))
    assert p.input_names() == ("a__0]",)
    assert p.spec("a__0]").shape == ("batch_size", 2)
    assert [p.path(n) for n in p.order()] == ["a__0]", "b_c", "x.y._Exp_1_"]


# -- sizes -------------------------------------------------------------------------------------------------------------
def conv_net(dims):
    nodes = [
        helper.make_node("Conv", ["x", "w"], ["c"], pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Relu", ["c"], ["r"]),
        helper.make_node("Shape", ["r"], ["s"]),
        helper.make_node("Gather", ["s", "zero"], ["n"], axis=0),
        helper.make_node("Unsqueeze", ["n", "zeros"], ["n1"]),
        helper.make_node("Concat", ["n1", "rest"], ["shape"], axis=0),
        helper.make_node("Reshape", ["r", "shape"], ["y"]),
    ]
    tensors = [stored("w", drawn(4, 3, 3, 3)), stored("zero", np.int64(0)), stored("zeros", np.array([0])),
               stored("rest", np.array([4, -1]))]  # fmt: skip
    return model_of(nodes, [value("x", dims)], [value("y", None)], tensors)


def test_shape_arithmetic_is_computed_at_import():
    model = conv_net(["N", 3, 8, 8])
    p = gw.from_onnx(model)
    assert {p.op(n) for n in p.nodes()} == {"input", "param", "conv", "relu", "reshape"}
    assert p.spec("y").shape == ("N", 4, 16)
    for batch in (1, 3):
        x = drawn(batch, 3, 8, 8)
        assert np.allclose(p.run({"x": x})["y"], by_runtime(model, {"x": x}), atol=1e-5)


def test_sizes_names_and_fixes_what_the_file_leaves_open():
    p = gw.from_onnx(conv_net(["N", 3, "H", "W"]), sizes={"x": ("B", None, 8, "W")})
    assert p.spec("x").shape == ("B", 3, 8, "W")
    assert gw.from_onnx(conv_net(["N", 3, "H", "W"]), sizes={"x": (2, 3, 8, 8)}).spec("y").shape == (2, 4, 16)
    with pytest.raises(UsageError, match="open and without a name") as error:
        gw.from_onnx(conv_net([None, 3, 8, 8]))
    assert error.value.fix == "pass sizes={'x': ('N', 3, 8, 8)}"
    with pytest.raises(UsageError, match="rank of an input"):
        gw.from_onnx(conv_net(None))
    with pytest.raises(UsageError, match="fixed in the file"):
        gw.from_onnx(conv_net(["N", 3, 8, 8]), sizes={"x": ("N", 4, 8, 8)})
    with pytest.raises(UsageError, match="unknown input"):
        gw.from_onnx(conv_net(["N", 3, 8, 8]), sizes={"z": ("N", 3, 8, 8)})
    with pytest.raises(UsageError, match="do not match the file"):
        gw.from_onnx(conv_net(["N", 3, 8, 8]), sizes={"x": ("N", 3, 8)})


def test_two_names_that_must_be_equal_are_named():
    model = model_of([helper.make_node("Add", ["a", "b"], ["y"], name="sum")],
                     [value("a", ["S", 2]), value("b", ["T", 2])], [value("y", None)])  # fmt: skip
    with pytest.raises(ShapeError) as error:
        gw.from_onnx(model)
    assert "sum" in str(error.value)
    assert any("sizes=" in note for note in error.value.__notes__)
    assert gw.from_onnx(model, sizes={"b": ("S", 2)}).spec("sum").shape == ("S", 2)


@pytest.mark.parametrize("kind", [np.float64, np.float16])
def test_numbers_keep_the_dtype_of_the_file(kind):
    number = helper.np_dtype_to_tensor_dtype(np.dtype(kind))
    nodes = [helper.make_node("Where", ["c", "third", "zero"], ["w"]),
             helper.make_node("Max", ["third", "w"], ["m"]),
             helper.make_node("Mul", ["m", "x"], ["y"])]  # fmt: skip
    tensors = [stored("third", kind(1 / 3)), stored("zero", kind(0))]
    model = model_of(nodes, [value("c", [2], TensorProto.BOOL), value("x", [2], number)], [value("y", [2], number)],
                     tensors)  # fmt: skip
    feeds = {"c": np.array([True, False]), "x": np.array([1, -3], kind)}
    found = np.asarray(gw.from_onnx(model).run(feeds)["y"])
    assert found.dtype == kind
    assert np.array_equal(found, np.array([kind(1 / 3), kind(1 / 3) * kind(-3)]))


def test_programs_are_saved_loaded_and_drawn(tmp_path):
    p = gw.from_onnx(residual_net())
    p.save(tmp_path / "saved")
    again = gw.load(tmp_path / "saved")
    assert again.hash() == p.hash()
    assert "blocks.0.Tanh" in p.to_dot()


# -- our own files -----------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.conv1, self.norm = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, groups=2)

    def forward(self, x):
        return functional.relu(x + self.conv2(functional.relu(self.norm(self.conv1(x)))))


class ConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.block, self.head = nn.Conv2d(3, 4, 3, stride=2), Block(4), nn.Linear(4, 5)

    def forward(self, x):
        return self.head(functional.max_pool2d(self.block(self.stem(x)), 2).mean((2, 3)))


def mlp():
    return nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.LayerNorm(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2))


def encoder():
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


OWN = {
    "cnn": (ConvNet, (2, 3, 17, 17), ("B", 3, 17, 17), (4, 3, 17, 17)),
    "mlp": (mlp, (2, 6), ("B", 6), (5, 6)),
    "encoder": (encoder, (2, 5, 8), ("B", "T", 8), (3, 9, 8)),
}


@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("name", OWN)
def test_files_of_to_onnx_come_back_as_the_same_function(tmp_path, name, opset):
    make, shape, sizes, other = OWN[name]
    gw.manual_seed(0)
    p = gw.trace(make().eval(), drawn(*shape), names=("x",), sizes={"x": sizes})
    q = gw.from_onnx(p.to_onnx(tmp_path / "net.onnx", opset=opset))
    params = {p.key(n) for n in p.params()}
    assert params == {q.key(n) for n in q.params()}
    for size in (shape, other):
        x = drawn(*size, seed=3)
        ours, theirs = (np.asarray(z.run({"x": x})["out"]) for z in (p, q))
        assert np.abs(ours - theirs).max() <= 1e-6 * max(np.abs(ours).max(), 1.0)
    found = []
    for z in (p, q):
        for key in params:
            z.weights[key].grad = None
        (z(x=drawn(*shape))["out"] ** 2).sum().backward()
        grads = {key: z.weights[key].grad for key in params}
        found.append({key: g.numpy().copy() for key, g in grads.items() if g is not None})
    assert found[0].keys() == found[1].keys() == params
    for key in params:
        assert np.abs(found[0][key] - found[1][key]).max() <= 1e-5 * max(np.abs(found[0][key]).max(), 1.0), key
    again = q.to_onnx(tmp_path / "again.onnx", opset=opset)
    (result,) = run_onnx(again, [{"x": drawn(*shape)}])
    assert np.abs(result["out"] - np.asarray(p.run({"x": drawn(*shape)})["out"])).max() <= 1e-5


def test_the_bundled_model_comes_back(tmp_path):
    model = gw.open("bundled")
    ids = np.array([[84, 104, 101, 32, 99]])
    feeds = {"ids": ids, "positions": np.arange(5)[None]}
    q = gw.from_onnx(model.program.to_onnx(tmp_path / "model.onnx", opset=23))
    kept = {"rms_norm": 9, "rope": 8, "sdpa": 4, "linear": 29, "junction": 8}
    assert {op: sum(q.op(n) == op for n in q.nodes()) for op in kept} == kept
    ours, theirs = (np.asarray(p.run(feeds)["logits"]) for p in (model.program, q))
    assert np.abs(ours - theirs).max() <= 1e-6 * np.abs(ours).max()
    assert q.spec("ids").shape == ("B", "T")


FAMILIES = ["llama", "mistral-window", "qwen2-windows", "qwen3-tied", "rope-dynamic", "rope-yarn", "llama-gelu-tanh"]


@pytest.mark.deep
@pytest.mark.parametrize("opset", [20, 23])
@pytest.mark.parametrize("name", FAMILIES)
def test_files_of_families_come_back(made, tmp_path, name, opset):
    p = gw.open(made(name).path).program
    q = gw.from_onnx(p.to_onnx(tmp_path / "model.onnx", opset=opset))
    for shape in ((1, 1), (2, 7), (3, 40)):
        feeds = {"ids": checkpoints.some_ids(shape, seed=shape[1])}
        feeds["positions"] = np.broadcast_to(np.arange(shape[1]), shape).copy()
        ours, theirs = (np.asarray(z.run(feeds)["logits"]) for z in (p, q))
        assert np.abs(ours - theirs).max() <= 1e-5 * np.abs(ours).max()


def test_a_file_with_a_cache_comes_back(tmp_path):
    model = gw.open("bundled")
    path = model.program.to_onnx(tmp_path / "model.onnx", opset=23, cache=True)
    q = gw.from_onnx(path)
    rng = np.random.default_rng(0)
    for past, new in ((4, 1), (3, 5)):
        feeds = {"ids": rng.integers(0, 256, (2, new)), "positions": np.arange(past, past + new)[None].repeat(2, 0)}
        for name in q.input_names()[2:]:
            sizes = {"B": 2, "past": past, "T": new}
            feeds[name] = rng.normal(size=q.spec(name).bind(sizes).sizes).astype("f4")
        (wanted,), found = run_onnx(path, [feeds]), q.run(feeds)
        for name, array in wanted.items():
            assert np.abs(array - np.asarray(found[name])).max() <= 1e-5 * max(np.abs(array).max(), 1.0), name


def test_units_of_an_imported_network_are_cut_as_in_the_original(tmp_path):
    gw.manual_seed(0)
    p = gw.trace(ConvNet().eval(), drawn(2, 3, 17, 17), names=("x",))
    q = gw.from_onnx(p.to_onnx(tmp_path / "net.onnx"))
    x = drawn(2, 3, 17, 17, seed=4)
    masked = {k: v.numpy().copy() for k, v in q.weights.items()}
    for z in (p, q):
        with z.edit("channels") as e:
            e.cut_units(z.select("stem*", units="channels")[[0, 2]])
    assert q.weights["stem.weight"].shape == (2, 3, 3, 3)
    assert masked["stem.weight"].shape == (4, 3, 3, 3)
    assert np.allclose(p.run({"x": x})["out"], q.run({"x": x})["out"], atol=1e-6)


# -- quantised ---------------------------------------------------------------------------------------------------------
def test_quantised_weights_are_dequantised_exactly():
    rng = np.random.default_rng(0)
    codes, scale = rng.integers(-128, 128, (3, 4)).astype(np.int8), np.array([0.1, 0.02, 0.5], "f4")
    nodes = [helper.make_node("DequantizeLinear", ["w", "scale", "zero"], ["d"], axis=0),
             helper.make_node("Gemm", ["x", "d"], ["y"], transB=1)]  # fmt: skip
    tensors = [stored("w", codes), stored("scale", scale), stored("zero", np.array([0, 3, -5], np.int8))]
    model = model_of(nodes, [value("x", ["B", 4])], [value("y", ["B", 3])], tensors)
    p = gw.from_onnx(model)
    assert not p.params()
    x = drawn(2, 4)
    assert np.allclose(p.run({"x": x})["y"], by_runtime(model, {"x": x}), atol=1e-5)


# -- files that are refused --------------------------------------------------------------------------------------------
def test_all_unsupported_operators_are_named_at_once():
    graph = helper.make_graph([], "inside", [], [value("o", [2])])
    nodes = [
        helper.make_node("If", ["c"], ["i"], name="branch", then_branch=graph, else_branch=graph),
        helper.make_node("Relu", ["x"], ["r"]),
        helper.make_node("Magic", ["r"], ["m"], name="a/magic", domain="com.example"),
        helper.make_node("StringNormalizer", ["m"], ["n"], name="text"),
        helper.make_node("Reshape", ["r", "s"], ["y"], name="late"),
    ]
    inputs = [
        value("x", [2]),
        value("c", [], TensorProto.BOOL),
        value("s", [1], INT),
        value("u", [1], TensorProto.UINT64),
    ]
    with pytest.raises(UnsupportedOperator) as error:
        gw.from_onnx(model_of(nodes, inputs, [value("y", [2])]))
    assert error.value.operators == {
        "If": ("branch",), "StringNormalizer": ("text",), "com.example.Magic": ("a/magic",),
        "Reshape (input 1 is computed in a run)": ("late",), "tensor of UINT64": ("u",),
    }  # fmt: skip


def test_an_attribute_that_is_unknown_is_refused_unless_it_is_the_default():
    node = helper.make_node("Relu", ["x"], ["y"], name="r", slope=0.5)
    with pytest.raises(UnsupportedOperator, match="attribute slope"):
        gw.from_onnx(model_of([node], [value("x", [2])], [value("y", [2])]))


@pytest.mark.parametrize("version", [8, 11, 12])
def test_older_opsets_are_converted(version, tmp_path):
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="/up/MatMul"),
        helper.make_node("Unsqueeze", ["h"], ["u"], name="/Unsqueeze", axes=[1]),  # an operand from opset 13 on
        helper.make_node("Softmax", ["u"], ["s"], name="/Softmax", axis=2),
        helper.make_node("ReduceSum", ["s"], ["y"], name="/ReduceSum", axes=[1], keepdims=0),
    ]
    model = model_of(nodes, [value("x", ["batch", 4])], [value("y", ["batch", 3])], [stored("w", drawn(4, 3))], version)
    model.ir_version = 5
    whole = onnx.ModelProto.FromString(model.SerializeToString())
    onnx.save(model, tmp_path / "old.onnx", save_as_external_data=True, size_threshold=0)
    x = drawn(5, 4, seed=1)
    ((want,),) = (found.values() for found in run_onnx(tmp_path / "old.onnx", [{"x": x}]))
    for source in (whole, tmp_path / "old.onnx"):
        p = gw.from_onnx(source)
        np.testing.assert_allclose(p(x=x)["y"].numpy(), want, rtol=1e-5, atol=1e-6)
        assert list(p.weights) == ["w"]


@pytest.mark.parametrize("version", [6, 99])
def test_other_opsets_are_refused(version):
    model = model_of([helper.make_node("Relu", ["x"], ["y"])], [value("x", [2])], [value("y", [2])], opset=version)
    with pytest.raises(OnnxFileError, match="version of the operator set"):
        gw.from_onnx(model)


def test_damaged_files(tmp_path):
    data = residual_net().SerializeToString()
    path = tmp_path / "cut.onnx"
    for length in (0, 1, 10, len(data) // 2, len(data) - 3):
        path.write_bytes(data[:length])
        with pytest.raises(OnnxFileError):
            gw.from_onnx(path)
    path.write_bytes(b"\xff" * 5000)
    with pytest.raises(OnnxFileError):
        gw.from_onnx(path)
    with pytest.raises(ModelNotFound):
        gw.from_onnx(tmp_path / "missing.onnx")
    with pytest.raises(OnnxFileError):
        gw.from_onnx(onnx.ModelProto())


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
@example([(0, 255)])
def test_files_with_changed_bytes_open_or_are_refused(changes):
    data = bytearray(residual_net().SerializeToString())
    for offset, byte in changes:
        data[offset % len(data)] = byte
    with TemporaryDirectory() as folder, suppress(gw.GraphwrightError):
        path = Path(folder) / "net.onnx"
        path.write_bytes(data)
        gw.from_onnx(path)


def wrong(change):
    model = residual_net()
    change(model.graph)
    return model


BROKEN = {
    "sizes and bytes": lambda g: g.initializer[0].dims.append(7),
    "negative sizes": lambda g: g.initializer[0].dims.__setitem__(0, -3),
    "huge sizes": lambda g: g.initializer[0].dims.__setitem__(0, 2**62),
    "declared otherwise": lambda g: g.value_info.append(value("blocks.0.weight", [4, 5])),
    "read before computed": lambda g: g.node[0].input.__setitem__(0, "x1"),
    "computed twice": lambda g: g.node[1].output.__setitem__(0, "h0"),
    "output missing": lambda g: g.output[0].__setattr__("name", "nothing"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_graphs_that_contradict_themselves(name):
    with pytest.raises(OnnxFileError):
        gw.from_onnx(wrong(BROKEN[name]))


def test_weights_that_do_not_fit_each_other_name_the_node():
    model = residual_net()
    model.graph.initializer[1].CopyFrom(stored("blocks.0.weight", drawn(5, 4)))
    with pytest.raises(ShapeError) as error:
        gw.from_onnx(model)
    assert "blocks.0.MatMul" in str(error.value)


def test_weights_outside_the_folder_are_refused(tmp_path):
    (tmp_path / "secret").write_bytes(bytes(64))
    home = tmp_path / "home"
    home.mkdir()
    (home / "link").symlink_to(tmp_path / "secret")
    (home / "short").write_bytes(bytes(8))
    for location in ("../secret", str(tmp_path / "secret"), "link", "missing", "short", ""):
        model = residual_net()
        tensor = model.graph.initializer[1]
        set_external_data(tensor, location, 0, 64)
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        (home / "net.onnx").write_bytes(model.SerializeToString())
        with pytest.raises(OnnxFileError):
            gw.from_onnx(home / "net.onnx")


@pytest.mark.parametrize(
    "node",
    [
        helper.make_node("ConstantOfShape", ["big"], ["y"]),
        helper.make_node("Expand", ["one", "big"], ["y"]),
        helper.make_node("Tile", ["grid", "big"], ["y"]),
        helper.make_node("Range", ["zero", "end", "step"], ["y"]),
    ],
    ids=lambda n: n.op_type,
)
def test_constants_of_hostile_sizes_are_refused(node):
    values = {"big": [2**20, 2**20], "one": np.ones(1, "f4"), "zero": 0, "end": 2**50, "step": 1, "grid": [[1]]}
    tensors = [stored(name, np.array(v)) for name, v in values.items()]
    with pytest.raises(gw.GraphwrightError, match="too large"):
        gw.from_onnx(model_of([node], [value("x", [1])], [value("y", None)], tensors))


def test_functions_of_the_file_are_inlined_unless_they_never_end():
    def function(name, calls):
        nodes = [helper.make_node(calls, ["a"], ["b"], domain="" if calls == "Relu" else "own")]
        return helper.make_function("own", name, ["a"], ["b"], nodes, [helper.make_opsetid("", 18),
                                                                       helper.make_opsetid("own", 1)])  # fmt: skip

    call = helper.make_node("F", ["x"], ["y"], domain="own")
    model = model_of([call], [value("x", [2])], [value("y", [2])], functions=[function("F", "Relu")])
    model.opset_import.append(helper.make_opsetid("own", 1))
    assert [gw.from_onnx(model).op(n) for n in gw.from_onnx(model).nodes()] == ["input", "relu"]
    model.functions[0].CopyFrom(function("F", "F"))
    with pytest.raises(OnnxFileError, match="calls itself"):
        gw.from_onnx(model)


def test_without_onnx_the_extra_is_named(monkeypatch):
    import sys

    for name in [
        n for n in sys.modules if n.split(".")[0] == "onnx" or n.endswith(("importing.onnx_files", "models.onnx"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    monkeypatch.delitem(vars(gw), "from_onnx", raising=False)
    with pytest.raises(MissingExtra):
        gw.from_onnx  # noqa: B018  # the name is resolved
