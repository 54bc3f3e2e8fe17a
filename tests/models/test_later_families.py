"""Families whose blocks differ from Llama's: each beside its class of transformers, in every way a model is used."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from checkpoints import LATER, Made, edit_config, relative, some_ids
from edits import scale_weight
from safetensors.numpy import load_file, save_file
from transformers import AutoModelForCausalLM

import graphwright as gw
from axis_samples import agree, run
from graphwright.models import ConfigError, TensorMismatch, architectures
from graphwright.models.export.ladder import Ladder
from graphwright.models.open import config_from, create
from graphwright.models.stacks import join
from graphwright.nn.functional import cross_entropy
from graphwright.safetensors import TensorData
from seeds import DEEP

IDS = some_ids((2, 21))
PADDED = np.stack([np.arange(21) >= 6, np.ones(21, bool)])
FEEDS = {"ids": IDS, "positions": np.broadcast_to(np.arange(21), IDS.shape).copy()}


@pytest.fixture(params=LATER)
def checkpoint(request: pytest.FixtureRequest, made: Callable[[str], Made]) -> Made:
    return made(request.param)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    return str(request.node.callspec.params["checkpoint"])


def written(m: gw.Model, target: Path, level: int | str = "auto") -> int:
    """Write a level's files, without what an export measures; return its number."""
    ladder = Ladder(m)
    chosen = ladder.choose(ladder.plan(), level)
    target.mkdir()
    chosen.write(target)
    return chosen.number


def cut(m: gw.Model, junction: str) -> None:
    """Cut the branch that a junction adds to the residual stream."""
    with m.program.edit(f"cut the branch at {junction}") as e:
        e.cut(m.program.in_edges(junction)[1])


def loaded(path: Path, **options: Any) -> Any:
    """The model of transformers in a directory, which must have all of its tensors and no others."""
    options = {"dtype": torch.float32, "attn_implementation": "eager", "output_loading_info": True, **options}
    found: Any = AutoModelForCausalLM.from_pretrained(path, **options)
    model, facts = found
    assert not facts["missing_keys"]
    assert not facts["unexpected_keys"]
    return model.eval()


def logits(model: Any, ids: np.ndarray = IDS) -> np.ndarray:
    with torch.no_grad():
        return model(torch.tensor(ids)).logits.numpy()


def test_logits_equal_transformers_also_with_padding(checkpoint: Made) -> None:
    m = gw.open(checkpoint.path)
    assert relative(m.logits(IDS), checkpoint.logits(IDS)) < 5e-6
    assert relative(m.logits(IDS, PADDED)[PADDED], checkpoint.logits(IDS, PADDED)[PADDED]) < 5e-6


def test_low_precision_rounds_where_transformers_does(checkpoint: Made) -> None:
    """Both differ from float32 by rounding; they are nearer to each other, as they round at the same points."""
    model = loaded(checkpoint.path, dtype=torch.bfloat16)
    with torch.no_grad():
        theirs = model(torch.tensor(IDS)).logits.float().numpy()
    m, exact = gw.open(checkpoint.path, dtype="bfloat16", compute="bfloat16"), checkpoint.logits(IDS)
    ours = m.logits(IDS)
    assert relative(ours, exact) < 5e-2
    assert np.abs(ours - theirs).mean() < 0.95 * np.abs(theirs - exact).mean()


def test_generation_equals_transformers_with_static_and_paged_caches(checkpoint: Made) -> None:
    m, prompt, steps = gw.open(checkpoint.path), IDS[0, :7], 16
    theirs = checkpoint.greedy(prompt, steps)
    assert m.generate(prompt, steps).ids == theirs
    cache = m.new_cache(32).sequence()
    m.prefill(cache, prompt)
    assert list(m.decode(cache, steps)) == theirs


def test_an_unchanged_model_is_written_back_byte_by_byte(checkpoint: Made, tmp_path: Path) -> None:
    m = gw.open(checkpoint.path)
    assert not any(m.program.weights.array(k).storage.touched for k in m.keys.values())
    assert written(m, tmp_path / "out") == 1
    for file in ("config.json", "model.safetensors"):
        assert (tmp_path / "out" / file).read_bytes() == (checkpoint.path / file).read_bytes()
    stored = load_file(checkpoint.path / "model.safetensors")
    found = m.inspect()
    assert found.parameters == sum(t.size for t in stored.values())
    assert found.nbytes == sum(t.nbytes for t in stored.values())


def test_one_changed_weight_changes_one_tensor(checkpoint: Made, tmp_path: Path) -> None:
    m = gw.open(checkpoint.path)
    scale_weight(m, m.keys["layers.1.attn.k.weight"])
    assert written(m, tmp_path / "out") == 1
    before, after = (load_file(p / "model.safetensors") for p in (checkpoint.path, tmp_path / "out"))
    assert len([k for k in before if not np.array_equal(before[k], after[k])]) == 1
    assert relative(logits(loaded(tmp_path / "out")), m.logits(IDS)) < 1e-5


def test_masked_and_cut_units_of_every_kind_are_equal(checkpoint: Made, name: str) -> None:
    p = gw.open(checkpoint.path, dtype="float64", compute="float64").program
    kinds = set()
    for group in list(p.axes().values()):
        if group.frozen or group.mixed or group.atoms == () or not group.name.startswith("layers.1"):
            continue
        several = range(int(group.atoms[1].size)) if len(group.atoms) > 1 else [0, group.size // 2]
        agree(p, group.units(several if group.size > 2 else [1]), FEEDS, 1e-10)
        kinds.add(group.name.rpartition(".")[2])
    assert kinds >= ({"neurons"} if name.startswith("olmo") else {"neurons", "heads"})  # all heads share their norm


def test_the_residual_width_shrinks_with_the_norms_corrected(checkpoint: Made, name: str) -> None:
    m = gw.open(checkpoint.path, dtype="float64", compute="float64")
    p, gone = m.program, [0, 5, 17, 40]
    stays = ~np.isin(np.arange(48), gone)
    with p.edit("zero the channels where they are written") as e:
        e.set_weight("embed.weight", lambda w: w * stays)
        for path in (p.path(n) for n in p.params()):
            if re.search(r"(attn\.o|mlp\.down)\.(weight|bias)$", path):
                e.set_weight(path, lambda w: (w.T * stays).T)
    expected = run(p, FEEDS)["logits"]
    (axis,) = p.select("embed").channels.chosen
    with p.edit("cut them") as e:
        e.cut_units(p.axes()[axis].units(gone))
    assert p.spec("layers.1.out").shape[-1] == 44
    if name == "gpt2":  # its norms subtract a mean, which has no correction
        found = m.export_plan()
        assert found.level == 5
        assert any("subtracts the mean" in str(r) for r in found.levels[2].reasons)
        return
    np.testing.assert_allclose(run(p, FEEDS)["logits"], expected, rtol=0, atol=1e-10)


def test_removed_layers_and_neurons_export_as_a_resized_config(checkpoint: Made, tmp_path: Path) -> None:
    m = gw.open(checkpoint.path)
    m.select("layers").layers[[0]].prune()
    m.select("layers.*.mlp").neurons[:12].prune()
    assert written(m, tmp_path / "out") == 2
    assert relative(logits(loaded(tmp_path / "out")), m.logits(IDS)) < 1e-5
    again = gw.open(tmp_path / "out")
    np.testing.assert_array_equal(again.logits(IDS), m.logits(IDS))
    assert again.export_plan().level == 1


def test_uneven_pruning_exports_zero_filled(checkpoint: Made, name: str, tmp_path: Path) -> None:
    m = gw.open(checkpoint.path)
    m.select("layers.0.mlp").neurons[3:20].prune()
    if not name.startswith("olmo"):
        m.select("layers.1.attn").heads[[1, 5]].prune(ragged=True)
    cut(m, "layers.2.mid")
    cut(m, "layers.1.out")
    assert written(m, tmp_path / "out") == 3
    assert (tmp_path / "out/config.json").read_bytes() == m.config.raw
    assert relative(logits(loaded(tmp_path / "out")), m.logits(IDS)) < 1e-5


@pytest.mark.usefixtures("hf_modules")
def test_generated_code_computes_and_generates_the_same(checkpoint: Made, tmp_path: Path) -> None:
    m = gw.open(checkpoint.path)
    m.select("layers.0.mlp").neurons[3:20].prune()
    cut(m, "layers.1.out")
    assert written(m, tmp_path / "out", 5) == 5
    model = loaded(tmp_path / "out", trust_remote_code=True)
    assert relative(logits(model), m.logits(IDS)) < 1e-5
    prompt = IDS[0, :7]
    assert Made(tmp_path, model).greedy(prompt, 10) == m.generate(prompt, 10).ids


def test_gradients_of_all_weights_equal_torch(checkpoint: Made) -> None:
    m, model = gw.open(checkpoint.path), loaded(checkpoint.path)
    found = m.program(**FEEDS)["logits"]
    cross_entropy(found[:, :-1], IDS[:, 1:], dim=-1).backward()
    scores = model(torch.tensor(IDS)).logits[:, :-1]
    torch.nn.functional.cross_entropy(
        scores.reshape(-1, scores.shape[-1]), torch.tensor(IDS[:, 1:]).flatten()
    ).backward()
    variables: dict[str, Any] = {key: m.program.weights[key] for key in m.keys.values()}
    grads = {key: np.asarray(variable.grad.numpy()) for key, variable in variables.items()}
    items = [TensorData(key, "F32", grad.shape, np.ascontiguousarray(grad)) for key, grad in grads.items()]
    ours = {
        i.key: np.frombuffer(b"".join(map(bytes, i.chunks())), "f4").reshape(i.shape) for i in join(items, m.arch, None)
    }
    theirs: dict[str, Any] = {key: w.grad.numpy() for key, w in model.named_parameters()}
    assert ours.keys() == theirs.keys()
    for key, grad in ours.items():
        assert relative(grad, theirs[key]) < 1e-4, key


@pytest.mark.parametrize("name", LATER if DEEP else ["gemma2", "phi3", "gpt2"])
def test_an_export_is_confirmed_in_a_clean_process(
    name: str, made: Callable[[str], Made], tmp_path: Path, warm: None
) -> None:
    m = gw.open(made(name).path)
    m.select("layers.0.mlp").neurons[3:20].prune()
    receipt = m.export(tmp_path / "out", prompts=[IDS[0, :9]], timed=False, check="required")
    assert (receipt.level, receipt.confirmed) == (3, True)
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == m.arch.model_types[0]


# -- configs and files -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("family", checkpoints.LATER_CLASSES)
def test_absent_fields_have_the_defaults_of_the_class(family: str) -> None:
    settings, kind = checkpoints.LATER_CLASSES[family]
    theirs: Any = getattr(transformers, f"{settings}Config")()
    sizes = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    fields = {} if family == "gpt2" else {name: getattr(theirs, name) for name in sizes}
    dims: Any = architectures()[kind].read(config_from({"architectures": [kind], **fields}))
    heads = theirs.num_attention_heads
    assert (dims.vocab, dims.positions, dims.tied) == (
        theirs.vocab_size,
        theirs.max_position_embeddings,
        theirs.tie_word_embeddings,
    )
    assert dims.kv_heads == getattr(theirs, "num_key_value_heads", heads)
    assert dims.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // heads)
    assert dims.eps == getattr(theirs, "rms_norm_eps", None) or theirs.layer_norm_epsilon
    assert dims.score_cap == (getattr(theirs, "attn_logit_softcapping", None))
    assert dims.logit_cap == (getattr(theirs, "final_logit_softcapping", None))
    types = ["full_attention" if w is None else "sliding_attention" for w in dims.windows]
    assert types == (getattr(theirs, "layer_types", None) or types)
    ropes = getattr(theirs, "rope_parameters", None) or {}
    given = [ropes.get(kind, ropes) for kind in ("full_attention", "sliding_attention")]
    if dims.rope is not None:
        assert [r["rope_theta"] for r in given] == [dims.rope.theta, (dims.local_rope or dims.rope).theta]


OLD = {
    "gemma2": ({"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}, {"rope_theta": 300.0}),
    "gemma3": ({"rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
               {"rope_theta": 7e5, "rope_local_base_freq": 9e3}),
    "phi3": ({"rope_scaling": {"type": "su", "short_factor": [1.0, 1.2, 1.4], "long_factor": [1.5, 2.0, 3.0],
                               "original_max_position_embeddings": 12}},
             {"partial_rotary_factor": 0.75, "rope_theta": 300.0}),
    "olmo3": ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16}},
              {"rope_theta": 7e5}),
}  # fmt: skip


@pytest.mark.parametrize("family", OLD)
def test_old_spellings_are_read_as_by_transformers_and_kept(
    family: str, copy: Callable[[str], Path], tmp_path: Path
) -> None:
    path = copy(family)
    edit_config(path, remove=("rope_parameters", "rope_scaling"), **OLD[family][0], **OLD[family][1])
    m = gw.open(path)
    assert relative(m.logits(IDS), logits(loaded(path))) < 5e-6
    assert written(m, tmp_path / "out") == 1
    assert (tmp_path / "out/config.json").read_bytes() == (path / "config.json").read_bytes()


@pytest.mark.parametrize("theirs", [True, False])
def test_gpt2_files_with_and_without_the_prefix_are_kept(
    theirs: bool, copy: Callable[[str], Path], made: Callable[[str], Made], tmp_path: Path
) -> None:
    """Files of the hub have neither the prefix nor config fields named as Llama's; some have masks of attention."""
    path = copy("gpt2")
    file = path / "model.safetensors"
    tensors = {key.removeprefix("transformer." if theirs else ""): t for key, t in load_file(file).items()}
    start = "" if theirs else "transformer."
    masks = {f"{start}h.{i}.attn.bias": np.tril(np.ones((1, 1, 64, 64), "f4")) for i in range(3)}
    save_file({**tensors, **masks}, file, {"format": "pt"})
    if not theirs:
        names = {"n_embd": 48, "n_layer": 3, "n_head": 6, "n_positions": 64}
        edit_config(path, remove=tuple(names), hidden_size=48, num_hidden_layers=3, num_attention_heads=6,
                    max_position_embeddings=64)  # fmt: skip
    m = gw.open(path)
    np.testing.assert_array_equal(m.logits(IDS), gw.open(made("gpt2").path).logits(IDS))
    assert written(m, tmp_path / "out") == 1
    assert (tmp_path / "out/model.safetensors").read_bytes() == file.read_bytes()
    m.select("layers.*.mlp").neurons[:4].prune()
    assert written(m, tmp_path / "resized") == 2
    assert relative(logits(loaded(tmp_path / "resized")), m.logits(IDS)) < 1e-5


def test_gpt2_may_scale_scores_by_the_number_of_the_layer(tmp_path: Path) -> None:
    c = checkpoints.make(tmp_path / "falling", "gpt2", scale_attn_by_inverse_layer_idx=True, scale_attn_weights=False)
    m = gw.open(c.path)
    assert relative(m.logits(IDS), c.logits(IDS)) < 5e-6
    m.select("layers").layers[[0]].prune()  # the others would be scaled otherwise
    assert any("score_scale" in str(r) for r in m.export_plan().levels[1].reasons)
    assert written(m, tmp_path / "out") == 3
    assert relative(logits(loaded(tmp_path / "out")), m.logits(IDS)) < 1e-5


def test_long_texts_use_the_other_frequencies_of_phi3(made: Callable[[str], Made]) -> None:
    ids = some_ids((1, 57))
    assert relative(gw.open(made("phi3").path).logits(ids), made("phi3").logits(ids)) < 5e-6


@pytest.mark.parametrize("name", ["phi3", "gpt2"])
def test_a_saved_or_new_model_of_fused_matrices_is_exported_with_them(
    name: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    m = gw.open(made(name).path)
    m.save(tmp_path / "saved")
    again = gw.open(tmp_path / "saved")
    again.export(tmp_path / "out", check="none", timed=False)
    assert (
        load_file(tmp_path / "out/model.safetensors").keys() == load_file(made(name).path / "model.safetensors").keys()
    )
    assert relative(logits(loaded(tmp_path / "out")), m.logits(IDS)) < 1e-5
    new = create(m.config, seed=3)
    new.export(tmp_path / "new", check="none", timed=False)
    assert relative(logits(loaded(tmp_path / "new")), new.logits(IDS)) < 1e-5


FUSED = "model.layers.1.self_attn.qkv_proj.weight"


@pytest.mark.parametrize(
    ("change", "missing", "unexpected", "misshapen"),
    [
        (lambda t: t.update({FUSED: t[FUSED][:-1].copy()}), 0, 0, 1),
        (lambda t: t.pop(FUSED), 1, 0, 0),
        (lambda t: t.update({FUSED.replace("layers.1", "layers.7"): t[FUSED]}), 0, 1, 0),
    ],
)
def test_fused_tensors_that_do_not_fit_are_named_as_in_the_file(
    change: Any, missing: int, unexpected: int, misshapen: int, copy: Callable[[str], Path]
) -> None:
    path = copy("phi3")
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    with pytest.raises(TensorMismatch, match=r"qkv_proj") as caught:
        gw.open(path)
    found = caught.value
    assert [len(x) for x in (found.missing, found.unexpected, found.misshapen)] == [missing, unexpected, misshapen]


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [
        ("gemma2", "sliding_window", None), ("gemma2", "query_pre_attn_scalar", 0),
        ("gemma2", "attn_logit_softcapping", -1.0), ("gemma2", "use_bidirectional_attention", True),
        ("gemma2", "hidden_activation", "mish"), ("gemma3", "rope_parameters", {"rope_theta": 1e4}),
        ("gemma3", "rope_parameters", {"full_attention": 3}), ("gemma3", "rope_local_base_freq", 0),
        ("gemma3", "layer_types", ["chunked_attention"] * 3), ("gemma3", "rope_scaling", 3),
        ("phi3", "rope_scaling", {"rope_type": "llama3", "factor": 2.0}), ("phi3", "head_dim", 12),
        ("olmo3", "sliding_window", None), ("gpt2", "n_head", 5), ("gpt2", "add_cross_attention", True),
        ("gpt2", "activation_function", "mish"), ("gpt2", "n_positions", 0), ("gpt2", "scale_attn_weights", "yes"),
    ],
)  # fmt: skip
def test_invalid_fields_are_refused_by_name(name: str, field: str, value: Any, copy: Callable[[str], Path]) -> None:
    path = copy(name)
    edit_config(path, remove=("rope_parameters",) if field.startswith("rope") else (), **{field: value})
    with pytest.raises(ConfigError, match=field.removesuffix("ing")):
        gw.open(path)
