"""Generated modeling code: text of an untrusted journal or checkpoint stays text and never becomes code."""

from __future__ import annotations

import ast
import re

import numpy as np
import pytest

import graphwright as gw
from graphwright.models import ExportLevelImpossible
from graphwright.models.codegen.names import MODULE, ROOT
from graphwright.models.codegen.source import generate

TRAPS = [
    '"""\nplanted()\n"""',
    "@forward@",
    "\\",
    '"] + planted() + w["x',
    "{planted()}",
    "' + planted() + '",
    'a\\"]; planted()',
]


def edited(why: str, name: str, key: str):
    p = gw.open("bundled").program
    with p.edit(why) as e:
        w = e.param("layers.2.extra", np.zeros((192, 192), np.float32), key=key)
        e.connect(e.add("linear", "layers.1.out", w, name=name), "layers.2.out")
    return p


@pytest.mark.parametrize("trap", TRAPS)
def test_names_and_reasons_never_become_code(trap):
    name = "layers.2." + re.sub(r"[\n.*\[\]{}]", "", trap).strip()  # without characters that names cannot have
    text = generate(edited(trap, name, "layers.2.extra"), "x", [trap, "@shapes@"]).files["modeling_x.py"]
    tree = ast.parse(text)
    called = {n.func.id for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
    assert "planted" not in called
    assert sum(isinstance(n, ast.Expr) for n in tree.body) == 1  # the docstring


@pytest.mark.parametrize("trap", TRAPS)
def test_a_key_that_could_be_code_is_refused(trap):
    with pytest.raises(ExportLevelImpossible, match="key"):
        generate(edited("x", "layers.2.skip", trap.replace("\n", "")), "x", [])


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    import transformers
    from transformers import dynamic_module_utils

    folder, cache = tmp_path_factory.mktemp("names"), str(tmp_path_factory.getbasetemp() / "hf_modules")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
        patch.syspath_prepend(cache)
        transformers.utils.logging.disable_progress_bar()
        gw.open("bundled").export(folder / "code", level=5, check="none", timed=False)
        yield transformers.AutoModelForCausalLM.from_pretrained(folder / "code", trust_remote_code=True)


def test_attributes_of_the_generated_classes_are_known(loaded):
    """A submodule or parameter with the name of an attribute could not be added to the module."""
    for module, known in ((loaded, MODULE | ROOT), (loaded.model, MODULE), (loaded.model.layers[0], MODULE)):
        inside = {*module._modules, *module._parameters}
        names = {n for n in dir(module) if n not in inside and not n.startswith("_") and n.isidentifier()}
        assert not names - known


@pytest.mark.parametrize(
    "key", ["config.weight", "features.w", "layers.2.half", "model.layers.0.forward.w", "_modules.w"]
)
def test_a_key_with_the_name_of_an_attribute_is_refused(key):
    with pytest.raises(ExportLevelImpossible, match="attribute of a torch module"):
        generate(edited("x", "layers.2.skip", key), "x", [])


@pytest.mark.parametrize("key", ["layers.2.config", "extra.features", "model.layers.2.scaling"])
def test_other_keys_are_modules_and_parameters(key):
    assert generate(edited("x", "layers.2.skip", key), "x", []).files
