"""Checkpoints of every feature, made once per run and never written to."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import checkpoints
import edits
import pytest

import graphwright as gw
from graphwright.models.export import verify
from graphwright.models.tokenizer import byte_tokenizer_json


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], checkpoints.Made]:
    """Feature name -> checkpoint, cached for the session."""
    found: dict[str, checkpoints.Made] = {}

    def get(name: str) -> checkpoints.Made:
        if name not in found:
            family, fields = {**checkpoints.FEATURES, **checkpoints.MIXTURES, **checkpoints.LATER}[name]
            found[name] = checkpoints.make(tmp_path_factory.mktemp(name), family, **fields)
        return found[name]

    return get


@pytest.fixture
def copy(made: Callable[[str], checkpoints.Made], tmp_path: Path) -> Callable[[str], Path]:
    """Feature name -> a copy of its directory that a test may damage."""

    def get(name: str) -> Path:
        return Path(shutil.copytree(made(name).path, tmp_path / name, dirs_exist_ok=True))

    return get


@pytest.fixture
def model(made: Callable[[str], checkpoints.Made]) -> Any:
    """A freshly opened llama with three layers."""
    return gw.open(made("llama").path)


@pytest.fixture(scope="session")
def byte_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama over bytes with the built-in tokenizer; byte 0 begins and ends."""
    path = tmp_path_factory.mktemp("bytes")
    checkpoints.make(path, "llama", vocab_size=256, bos_token_id=0, eos_token_id=0)
    (path / "tokenizer.json").write_text(byte_tokenizer_json())
    return path


@pytest.fixture
def byte_model(byte_path: Path) -> gw.Model:
    return gw.open(byte_path)


@pytest.fixture(scope="session")
def proved(
    made: Callable[[str], checkpoints.Made], tmp_path_factory: pytest.TempPathFactory, warm_process: Any
) -> Callable[[str], Any]:
    """Name -> (model, directory, receipt): exports that transformers confirmed; not to be written to.

    `copy` is level 1, `pruned` 3, `edited` 5, proved by a Python that was started for it.
    """
    found: dict[str, Any] = {}

    def get(name: str) -> Any:
        if name not in found:
            m = gw.open(made("llama-tied" if name == "copy" else "llama-attention-bias").path)
            if name == "pruned":
                m.select("layers.{0,2}.mlp").neurons[:23].prune(why="30 % of the neurons of two layers")
                m.select("layers.0.attn").heads[[1, 2, 5]].prune(ragged=True)
                edits.cut_attention(m, 2)
                edits.cut_mlp(m, 1)
            if name == "edited":
                edits.cut_mlp(m, 1)
                edits.link(m, 0)
                edits.scale_weight(m, "model.norm.weight")
            prompts = [checkpoints.some_ids((n,), seed=n) for n in (9, 17)]
            directory = tmp_path_factory.mktemp("proved") / name
            with pytest.MonkeyPatch.context() as patch:
                if name != "edited":
                    patch.setattr(verify, "_start", warm_process)
                found[name] = (m, directory, m.export(directory, prompts=prompts, check="required"))
        return found[name]

    return get


@pytest.fixture
def hf_modules(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory of this run for code that transformers loads with `trust_remote_code`."""
    import transformers
    from transformers import dynamic_module_utils

    cache = str(tmp_path_factory.getbasetemp() / "hf_modules")
    monkeypatch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", cache)
    monkeypatch.syspath_prepend(cache)
    transformers.utils.logging.disable_progress_bar()
