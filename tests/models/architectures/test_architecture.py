"""Families as data: registration, plugins, node names."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoints import Made, edit_config, some_ids

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.models import Architecture, ConfigError, architectures, register
from graphwright.models.architectures.registry import _registry

IDS = some_ids((2, 6))


@pytest.fixture(autouse=True)
def _registry_is_put_back() -> Iterator[None]:
    before = dict(architectures())
    yield
    _registry.clear()
    _registry.update(before)


def test_duplicate_architectures_are_refused_naming_both() -> None:
    llama = architectures()["llama"]
    double = Architecture("double", ("Fresh", "LlamaForCausalLM"), (), llama.read, llama.keys, llama.build)
    with pytest.raises(UsageError) as caught:
        register(double)
    assert caught.value.where == "LlamaForCausalLM"
    assert "'llama'" in caught.value.what
    assert "'double'" in str(caught.value.got)
    assert "Fresh" not in architectures()
    assert register(llama) is llama


def test_duplicates_are_found_at_registration() -> None:
    code = """
    from graphwright.models import Architecture, register
    from graphwright.errors import UsageError
    try:
        register(Architecture("mine", ("LlamaForCausalLM",), (), None, (), None))
    except UsageError as error:
        assert "'llama'" in error.what, error
    else:
        raise SystemExit("accepted")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)


_FAMILY = '''
"""Bigram: the next token depends on the last one alone, through a table, a norm and a head."""
from dataclasses import dataclass
from graphwright.models import Architecture, WeightKey

@dataclass(frozen=True)
class Dims:
    vocab: int
    width: int
    layers: int = 0
    tied: bool = False

def read(config):
    return Dims(config.size("vocab_size"), config.size("n_embd", 8))

KEYS = (
    WeightKey("embed.weight", "bi.wte", ("vocab", "width")),
    WeightKey("norm.weight", "bi.norm", ("width",)),
    WeightKey("lm_head.weight", "head", ("vocab", "width")),
)

def build(b, dims, params, compute):
    ids = b.input("ids", ("B", "T"), "int64")
    x = b.embedding(params["embed.weight"], ids, name="embed")
    x = b.rms_norm(x, params["norm.weight"], eps=1e-5, name="norm")
    b.output(b.linear(x, params["lm_head.weight"], name="lm_head"), "logits")

BIGRAM = Architecture("bigram", ("BigramLM",), ("bigram",), read, KEYS, build, prefix="bi.")
'''


def bigram(path: Path) -> Path:
    """A checkpoint of the family above."""
    import torch
    from safetensors.torch import save_file

    path.mkdir()
    (path / "config.json").write_text(json.dumps({"architectures": ["BigramLM"], "vocab_size": 11, "n_embd": 6}))
    torch.manual_seed(0)
    tensors = {"bi.wte": torch.randn(11, 6), "bi.norm": torch.ones(6), "head": torch.randn(11, 6)}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def test_a_small_family_opens_runs_and_generates(tmp_path: Path) -> None:
    assert _FAMILY.count("\n") < 60
    names: dict[str, Any] = {"__name__": "bigram_family"}
    sys.modules["bigram_family"] = type(sys)("bigram_family")  # dataclasses look their module up
    exec(_FAMILY, names)
    register(names["BIGRAM"])
    m = gw.open(bigram(tmp_path / "b"))
    table = {i: int(m.logits([i])[0].argmax()) for i in range(11)}
    done = m.generate([3], 5)
    chain = [3]
    for _ in range(5):
        chain.append(table[chain[-1]])
    assert done.ids == chain[1:]
    assert m.inspect().family == "bigram"


def test_plugin_is_found_by_entry_point_and_a_broken_one_is_skipped(tmp_path: Path) -> None:
    site = tmp_path / "site"
    info = site / "bigram-1.0.dist-info"
    info.mkdir(parents=True)
    (site / "bigram_family.py").write_text(_FAMILY)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bigram\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[graphwright.architectures]\nbroken = no_such_module:X\nbigram = bigram_family:BIGRAM\n"
    )
    code = """
    import logging, sys
    sys.path.insert(0, sys.argv[1])
    heard = []
    class Ear(logging.Handler):
        def emit(self, record):
            heard.append(record.getMessage())
    logging.getLogger("graphwright.plugins").addHandler(Ear())
    import graphwright as gw
    assert gw.open(sys.argv[2]).arch.name == "bigram"
    assert len(heard) == 1 and "broken" in heard[0], heard
    """
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), str(site), str(bigram(tmp_path / "b"))], check=True, timeout=60
    )
    assert logging.getLogger("graphwright.plugins").handlers == []


LAYER = [
    "attn.norm",
    "attn.q",
    "attn.k",
    "attn.v",
    "attn.rope_q",
    "attn.rope_k",
    "attn.sdpa",
    "attn.o",
    "mid",
    "mlp.norm",
    "mlp.gate",
    "mlp.act",
    "mlp.up",
    "mlp.mul",
    "mlp.down",
    "out",
]
EXTRA = {"qwen3": ["attn.q_norm", "attn.k_norm"]}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_node_names_are_equal_across_families(family: str, made: Callable[[str], Made]) -> None:
    p = gw.open(made(family).path).program
    shape_ops = {"unflatten", "permute", "flatten"}
    kinds = {"param", "input", "const"}
    named = {p.path(n) for n in p.nodes() if p.op(n) not in shape_ops | kinds}
    wanted = {f"layers.{i}.{n}" for i in range(3) for n in LAYER + EXTRA.get(family, [])}
    assert named == wanted | {"embed", "norm", "lm_head", "rope.table"}
    assert {p.path(n) for n in p.junctions()} == {f"layers.{i}.{n}" for i in range(3) for n in ("mid", "out")}
    assert [p.path(n) for n in p.inputs()] == ["ids", "positions"]


@pytest.mark.parametrize("name", ["llama", "llama-tied", "llama-attention-bias", "qwen2", "qwen3-tied"])
def test_every_param_has_a_key_and_every_key_a_node(name: str, made: Callable[[str], Made]) -> None:
    m = gw.open(made(name).path)
    p = m.program
    keys = [p.key(n) for n in p.params()]
    assert m.checkpoint is not None
    assert sorted(keys) == sorted(m.checkpoint)
    assert m.keys == {p.path(n): p.key(n) for n in p.params()}
    for n in p.params():
        module = p.path(n).removesuffix(".weight").removesuffix(".bias")
        assert module in {p.path(r) for r in p.consumers(n)} or module == "embed"


def test_tied_head_is_one_node_with_two_readers(made: Callable[[str], Made]) -> None:
    m = gw.open(made("llama-tied").path)
    readers = {m.program.path(n) for n in m.program.consumers("embed.weight")}
    assert readers == {"embed", "lm_head"}
    assert m.inspect().tied
    before = m.logits(IDS)
    with m.program.edit("both change") as e:
        e.set_weight("embed.weight", lambda w: w * 0.5)
    assert not (m.logits(IDS) == before).all()


@pytest.mark.parametrize("classes", ["LlamaForCausalLM", [1], {"a": 1}])
def test_invalid_architectures_fields_are_refused(classes: object, copy: Callable[[str], Path]) -> None:
    path = copy("llama")
    edit_config(path, architectures=classes)
    with pytest.raises(ConfigError, match="architectures"):
        gw.open(path)


def test_model_type_alone_identifies_the_architecture(copy: Callable[[str], Path]) -> None:
    path = copy("qwen2")
    edit_config(path, remove=("architectures",))
    assert gw.open(path).arch.name == "qwen2"
