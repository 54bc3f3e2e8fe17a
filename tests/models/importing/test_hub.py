"""`gw.open` of transformers' classes without a template: outputs, the cache, tasks, wrong inputs, foreign code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as tf
from hub_models import MODELS, TEXT, saved

import graphwright as gw
from graphwright.errors import ShapeError, UsageError
from graphwright.models import TensorMismatch, UnsupportedArchitecture
from graphwright.models.errors import PromptError
from graphwright.models.generation.recomputed import RecomputedGeneration
from graphwright.models.importing import hub, scans, torch_modules
from graphwright.models.importing.report import Imported
from graphwright.program.errors import FeedError

ORDINARY = ("electra", "opt", "deit", "resnet", "mamba2")
SCANS = ("mamba", "mamba2", "falcon_mamba", "jamba", "zamba", "bamba", "falcon_h1", "zamba2", "nemotron_h",
         "granite_hybrid", "recurrent_gemma", "rwkv")  # fmt: skip
CASES = [pytest.param(name, marks=() if name in ORDINARY else pytest.mark.deep) for name in MODELS]
THEIRS = {"ids": "input_ids", "positions": "position_ids"}


@pytest.fixture(scope="module")
def imports(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An empty cache of captured classes."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder / "graphwright" / "imports"


def feeds(program: gw.Program, batch: int, length: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random inputs of a program, whose named sizes are `batch` for B and otherwise `length`."""
    rng, found = np.random.default_rng(seed), {}
    for node in program.inputs():
        name, spec = program.path(node), program.spec(node)
        sizes = {"B": batch, "H": 32, "W": 64, "N": 3, "L": 100 * length}
        shape = [n if isinstance(n, int) else sizes.get(n, length) for n in spec.shape]
        if spec.dtype.is_float:
            found[name] = rng.normal(size=shape).astype("f4")
        elif name == "attention_mask":
            found[name] = np.arange(length) < rng.integers(1, length + 1, (shape[0], 1))
            found[name] = found[name].astype(np.int64)
        elif name == "positions":
            found[name] = np.broadcast_to(np.arange(length), shape).copy()
        else:
            found[name] = rng.integers(3, 90, shape)
    return found


@pytest.mark.parametrize("name", CASES)
def test_outputs_match_transformers(name, imports, tmp_path):
    module = saved(name, tmp_path / name)
    model = gw.open(tmp_path / name, tokenizer=False)
    if name in SCANS:
        report: Any = model.program.imported
        assert not report.fixed
    for batch, length in ((2, 9), (1, 17), *(((1, 1), (3, 4)) if name in SCANS else ())):
        given = feeds(model.program, batch, length)
        theirs = {
            {"ids": "input_ids", "positions": "position_ids"}.get(n, n): torch.from_numpy(a) for n, a in given.items()
        }
        with torch.no_grad():
            expected = module(**theirs, return_dict=True)
        for output, found in model.outputs(**given).items():
            wanted = expected[output].numpy() if output in expected else None
            if wanted is not None:
                scale = np.abs(wanted).max()
                np.testing.assert_allclose(found / scale, wanted / scale, atol=1e-5, err_msg=output)
        assert "logits" in model.program.output_names() or model.task == "features"
        assert model.inspect().flops_per_token > 0


def test_second_opening_reads_the_cache_without_torch_or_transformers(imports, tmp_path):
    saved("electra", tmp_path / "electra")
    first = gw.open(tmp_path / "electra", tokenizer=False)
    code = f"""
import sys, graphwright as gw
model = gw.open({str(tmp_path / "electra")!r}, tokenizer=False)
print(model.program.hash(), sorted(m for m in ("torch", "transformers") if m in sys.modules))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[0] == first.program.hash()
    assert "transformers" not in done.stdout


@pytest.mark.deep
def test_numbers_that_json_does_not_have_are_read_and_written_as_transformers_does(imports, tmp_path):
    module = saved("mamba2", tmp_path / "mamba2")
    limit = json.loads((tmp_path / "mamba2" / "config.json").read_text())["time_step_limit"]
    assert limit == [0.0, {"__float__": "Infinity"}]
    model = gw.open(tmp_path / "mamba2", tokenizer=False)
    known = model.arch.known_fields(model.config)
    assert known["time_step_limit"] == limit
    model.export(tmp_path / "out", check="none")
    assert [*type(module.config).from_pretrained(tmp_path / "out").time_step_limit] == [0.0, float("inf")]


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=() if n == "mamba" else pytest.mark.deep) for n in SCANS]
)  # fmt: skip
def test_classes_with_scans_generate_as_transformers_does(name, imports, tmp_path):
    module = saved(name, tmp_path / name)
    model = gw.open(tmp_path / name, tokenizer=False)
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    expected = module.generate(ids, max_new_tokens=16, eos_token_id=2, **options)[0, 4:].tolist()
    with pytest.warns(RecomputedGeneration):
        assert model.generate([5, 6, 7, 8], 16).ids == expected


@pytest.mark.deep
def test_class_of_one_length_generates_up_to_it_as_transformers_does(monkeypatch, tmp_path):
    monkeypatch.setattr(scans, "LOOPS", {})  # as a class whose loop over time has no entry
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    module = saved("mamba", tmp_path / "mamba")
    model = gw.open(tmp_path / "mamba", tokenizer=False)
    length = int(model.program.spec("ids").shape[1])
    ids = torch.tensor([[5, 6, 7, 8]])
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False, "pad_token_id": 0}
    expected = module.generate(ids, max_new_tokens=length - 4, **options)[0, 4:].tolist()
    with pytest.warns(RecomputedGeneration, match="one length"):
        assert model.generate([5, 6, 7, 8], length - 4).ids == expected
    with pytest.raises(PromptError, match=rf"(?s)fixed length.*<= {length} tokens.*from_torch"):
        model.logits([5] * (length + 1))
    with pytest.warns(RecomputedGeneration), pytest.raises(gw.GraphwrightError, match="from_torch"):
        model.generate([5, 6, 7, 8], length)
    receipt = model.export(tmp_path / "out", check="none")
    assert len(receipt.probe["ids"]) < length


def test_changed_config_is_captured_again(imports, tmp_path):
    saved("deit", tmp_path / "deit")
    before = gw.open(tmp_path / "deit")
    config = json.loads((tmp_path / "deit" / "config.json").read_text())
    (tmp_path / "deit" / "config.json").write_text(json.dumps(config | {"hidden_act": "relu"}))
    after = gw.open(tmp_path / "deit")
    ops = [[p.op(n) for n in p.nodes()] for p in (before.program, after.program)]
    assert "gelu" in ops[0]
    assert "gelu" not in ops[1]
    assert "relu" in ops[1]


@pytest.mark.deep
def test_damaged_cache_is_captured_again(imports, tmp_path):
    saved("beit", tmp_path / "beit")
    before = gw.open(tmp_path / "beit").program.hash()
    for path in imports.rglob("skeleton.json"):
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    assert gw.open(tmp_path / "beit").program.hash() == before


def test_wrong_inputs_name_the_expected_ones(imports, tmp_path):
    saved("electra", tmp_path / "electra")
    model = gw.open(tmp_path / "electra", tokenizer=False)
    assert model.task == "masked-lm"
    with pytest.raises(FeedError, match="input_ids: missing"):
        model.outputs(pixels=np.zeros((1, 3)))
    with pytest.raises(gw.GraphwrightError, match="masked-lm"):
        model.generate([1, 2, 3])
    with pytest.raises(UsageError, match="language models"):
        model.export(tmp_path / "out", onnx_cache=True)
    ids = np.array([[5, 6, 7]])
    np.testing.assert_array_equal(model(ids)["logits"], model.outputs(input_ids=ids)["logits"])


def test_saved_model_opens_as_it_was(imports, tmp_path):
    saved("deit", tmp_path / "deit")
    model = gw.open(tmp_path / "deit")
    heads = [name for name in model.program.axes().names.values() if name.endswith("attention.heads")]
    assert len(heads) == 2
    model.save(tmp_path / "saved")
    again = gw.open(tmp_path / "saved")
    assert again.program.hash() == model.program.hash()
    assert again.task == "image-classification"
    assert "2 layers" in str(again.inspect())


def test_missing_tensor_is_named(imports, tmp_path):
    module = saved("deit", tmp_path / "deit")
    state = {k: v for k, v in module.state_dict().items() if k != "classifier.bias"}
    module.save_pretrained(tmp_path / "deit", state_dict=state)
    with pytest.raises(TensorMismatch, match=r"missing: classifier\.bias"):
        gw.open(tmp_path / "deit")


def test_code_of_the_directory_is_not_run(imports, tmp_path):
    saved("deit", tmp_path / "deit")
    config = json.loads((tmp_path / "deit" / "config.json").read_text())
    config |= {"architectures": ["Planted"], "auto_map": {"AutoModel": "planted.Planted"}}
    (tmp_path / "deit" / "config.json").write_text(json.dumps(config))
    (tmp_path / "deit" / "planted.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(UnsupportedArchitecture, match="Planted"):
        gw.open(tmp_path / "deit")
    assert not (tmp_path / "ran").exists()
    assert Path(tmp_path / "deit").is_dir()


def test_edit_undo_and_training_leave_the_files(imports, tmp_path):
    saved("deit", tmp_path / "deit")
    raw = (tmp_path / "deit" / "model.safetensors").read_bytes()
    model = gw.open(tmp_path / "deit")
    images = np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype("f4")
    before, start = model(images)["logits"], model.program.hash()
    with model.edit("without a block") as e:
        e.cut(model.program.in_edges(model.program.junctions()[-1])[-1])
    assert not np.array_equal(model(images)["logits"], before)
    model.undo()
    assert model.program.hash() == start
    np.testing.assert_array_equal(model(images)["logits"], before)
    assert (tmp_path / "deit" / "model.safetensors").read_bytes() == raw


@pytest.mark.parametrize("name", ["deit", pytest.param("eurobert", marks=pytest.mark.deep)])
def test_outputs_in_bfloat16_are_near_those_in_float32(name, imports, tmp_path):
    saved(name, tmp_path / name)
    given = None
    outputs = []
    for compute in ("float32", "bfloat16"):
        model = gw.open(tmp_path / name, tokenizer=False, compute=compute)
        given = feeds(model.program, 2, 9) if given is None else given
        outputs.append(np.asarray(model(**given)["logits"], "f4"))
    assert np.abs(outputs[1] - outputs[0]).max() < 0.03 * np.abs(outputs[0]).max()
    assert not np.array_equal(*outputs)


def test_buffers_that_no_file_has_are_those_of_a_loaded_model():
    """DPR's inner BERT writes its positions; a class around it, whose initialisation knows none of them, does not."""
    config = tf.DPRConfig(**TEXT)
    module, values = hub.meta_module(tf.DPRQuestionEncoder, config, torch.float32)
    loaded = dict(tf.DPRQuestionEncoder(config).named_non_persistent_buffers())
    assert values.keys() == loaded.keys()
    assert all(torch.equal(values[name], tensor) for name, tensor in loaded.items())
    assert all(tensor.device.type == "meta" for tensor in module.buffers())


class Unwritten(tf.PreTrainedModel):
    """A model with a buffer that only its constructor writes, which the meta device drops."""

    config_class = tf.ElectraConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.register_buffer("scale", torch.arange(3.0), persistent=False)
        self.register_buffer("shift", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.post_init()


class Scaled(tf.PreTrainedModel):
    """A model with a buffer in bfloat16, as RecurrentGemma's factor of the embedding, and one in float32."""

    config_class = tf.ElectraConfig
    factor: torch.Tensor
    frequency: torch.Tensor

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("factor", torch.tensor(0.0, dtype=torch.bfloat16), persistent=False)
        self.register_buffer("frequency", torch.tensor(0.0, dtype=torch.float32), persistent=False)
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        if module is self:
            self.factor.fill_(32**0.5)
            self.frequency.fill_(32**0.5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_buffers_have_the_dtype_that_the_class_gives_them(dtype):
    module, values = hub.meta_module(Scaled, tf.ElectraConfig(), dtype)
    assert (module.linear.weight.dtype, torch.get_default_dtype()) == (dtype, torch.float32)
    assert torch.equal(values["factor"], torch.tensor(32**0.5, dtype=torch.bfloat16))
    assert torch.equal(values["frequency"], torch.tensor(32**0.5))


def test_buffer_without_a_value_is_not_taken_for_zeros():
    assert hub.meta_module(Unwritten, tf.ElectraConfig(), torch.float32)[1] == {}


@pytest.mark.deep
def test_sizes_become_numbers_where_the_class_has_no_graph_for_names(monkeypatch):
    module, values = hub.meta_module(tf.ElectraForMaskedLM, tf.ElectraConfig(**TEXT), torch.float32)
    tried, whole = [], torch_modules.program_of

    def program_of(*args: Any, sizes: Any, **options: Any) -> Any:
        tried.append(sizes)
        if any("T" in shape for shape in sizes.values()):
            raise ShapeError("no graph for T")
        return whole(*args, sizes=sizes, **options)

    monkeypatch.setattr(torch_modules, "program_of", program_of)
    p = hub._program(module, module.config, "masked-lm", values)
    assert tried == [{"input_ids": ("B", "T"), "attention_mask": ("B", "T")},
                     {"input_ids": ("B", 13), "attention_mask": ("B", 13)}]  # fmt: skip
    assert isinstance(p.imported, Imported)
    assert p.imported.fixed["T"] == "13: no graph for T"
    assert p.spec(p.node("input_ids")).shape == ("B", 13)
