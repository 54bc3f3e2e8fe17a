"""Each figure of a receipt, computed again by other means; a changed receipt is not read."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime

import checkpoints
import numpy as np
import pytest
import torch
import transformers
from receipts import rewrite

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.models import ExportError
from graphwright.models.export.receipt import Receipt
from graphwright.models.open import config_from, create
from safetensors import safe_open


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


@pytest.mark.parametrize("name", ["copy", "pruned", "edited"])
def test_the_receipt_lists_the_files_and_tensors_of_the_directory(proved, made, name):
    m, folder, receipt = proved(name)
    listed = {f["name"]: (f["bytes"], f["sha256"]) for f in receipt.result["files"]}
    there = {f.name: (f.stat().st_size, sha256(f)) for f in folder.iterdir()}
    assert listed == {k: v for k, v in there.items() if k not in ("receipt.json", "README.md")}
    source = {f["name"]: f["sha256"] for f in receipt.source["files"]}
    assert source == {f.name: sha256(f) for f in m.directory.iterdir()}
    with safe_open(folder / "model.safetensors", "np") as f:
        digests = {k: hashlib.blake2b(f.get_tensor(k).tobytes(), digest_size=16).hexdigest() for k in f.keys()}  # noqa: SIM118  # no mapping
        sizes = [f.get_tensor(k).size for k in f.keys()]  # noqa: SIM118
        nonzero = sum(int((f.get_tensor(k) != 0).sum()) for k in f.keys())  # noqa: SIM118
    assert receipt.cost["nonzero_parameters"]["after"] == nonzero
    assert (nonzero < sum(sizes)) == (name == "pruned")
    assert receipt.result["tensors"] == digests
    assert receipt.cost["parameters"]["after"] == sum(sizes)
    assert receipt.cost["bytes"]["after"] == 4 * sum(sizes)


def test_drift_probe_and_export_error_match_transformers(proved):
    m, _, receipt = proved("edited")
    source = transformers.AutoModelForCausalLM.from_pretrained(m.directory, attn_implementation="eager").eval()
    prompts = [checkpoints.some_ids((n,), seed=n) for n in (9, 17)]
    with torch.no_grad():
        before = [source(torch.tensor(p[None])).logits[0].double().numpy() for p in prompts]
    after = [m.logits(p).astype(np.float64) for p in prompts]
    a, b = np.concatenate(before), np.concatenate(after)
    la, lb = (torch.log_softmax(torch.tensor(x), -1) for x in (a, b))
    assert receipt.drift["max_abs_dlogits"] == pytest.approx(np.abs(a - b).max(), rel=1e-4)
    kl = torch.nn.functional.kl_div(lb, la, log_target=True, reduction="none").sum(-1).mean()
    assert receipt.drift["mean_kl_nats"] == pytest.approx(float(kl), rel=1e-3)
    assert receipt.drift["top1_agreement"] == pytest.approx((a.argmax(-1) == b.argmax(-1)).mean())
    assert receipt.probe["ids"] == prompts[0].tolist()
    assert [i for i, _ in receipt.probe["top5"]] == np.argsort(-after[0][-1])[:5].tolist()
    assert receipt.probe["greedy"] == m.generate(prompts[0], 32).ids
    assert receipt.check["transformers"] == transformers.__version__
    assert receipt.check["prompts"] == 2


def test_journal_costs_and_hashes_match_the_program(proved, made):
    m, _, receipt = proved("edited")
    assert receipt.journal["hash"] == m.program.journal.hash
    assert [e["why"] for e in receipt.journal["edits"]] == ["cut mlp 1", "link 0 to 2", "scale model.norm.weight"]
    assert receipt.journal["by_author"] == {"human": 3}
    assert receipt.result["program_hash"] == m.program.hash()
    assert receipt.source["program_hash"] == gw.open(m.directory).program.hash()
    s = checkpoints.SIZES
    kv = 2 * s["num_hidden_layers"] * s["num_key_value_heads"] * (s["hidden_size"] // s["num_attention_heads"]) * 4
    assert receipt.cost["kv_bytes_per_token"] == {"before": kv, "after": kv}
    mlp = 3 * s["hidden_size"] * s["intermediate_size"] + s["hidden_size"]
    both = receipt.cost["parameters"]
    assert both["after"] == both["before"] - mlp + s["hidden_size"] ** 2
    times = receipt.cost["latency_ms"]
    assert (times["threads"], times["context"]) == (torch.get_num_threads(), 128)
    for found in (times["prefill"], times["decode"]):
        assert found["rounds"] >= 7
        assert found["low"] <= found["ratio"] <= found["high"]
        assert "program" not in found
        for side, (low, high) in zip(("before", "after"), found["spread"], strict=True):
            assert 0 < low <= found[side] <= high
    assert times["prefill"]["after"] > times["decode"]["after"]
    assert "ms per token" in dict(receipt.summary())


def test_an_export_without_edits_is_not_compared_with_itself(made, tmp_path):
    receipt = gw.open(made("llama").path).export(tmp_path / "same", check="none")
    times = receipt.cost["latency_ms"]
    assert times["prefill"].keys() == times["decode"].keys() == {"after"}
    assert "%" not in dict(receipt.summary())["ms per token"]


def test_a_model_with_few_positions_is_timed_with_a_shorter_prompt(tmp_path):
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 12, "vocab_size": 40}
    names = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "bos_token_id": 0, "eos_token_id": 0}
    receipt = create(config_from(sizes | names)).export(tmp_path / "out", check="none")
    assert receipt.cost["latency_ms"]["context"] < 12


def test_figures_of_zeros_are_those_of_the_files_beside_the_program(made, tmp_path):
    m = gw.open(made("llama").path)
    before = m.inspect()
    m.select("layers.1.mlp").neurons[:30].prune()
    receipt = m.export(tmp_path / "zeros", check="none")
    files = gw.open(tmp_path / "zeros").inspect()
    assert receipt.level == 3
    for name, figure in (("parameters", "parameters"), ("bytes", "nbytes"), ("flops_per_token", "flops_per_token")):
        cost = receipt.cost[name]
        assert cost["after"] == getattr(files, figure) == getattr(before, figure) == cost["before"]
        assert cost["program"] == getattr(m.inspect(), figure) < cost["after"]
        assert f"{cost['program']:,} in the program" in dict(receipt.summary())[name.replace("_", " ")]
    assert {"before", "after", "program"} <= set(receipt.cost["latency_ms"]["decode"])
    untimed = m.export(tmp_path / "size", check="none", prefer="size", timed=False)
    assert untimed.cost["bytes"]["after"] == m.inspect().nbytes
    assert "program" not in untimed.cost["bytes"]
    assert "latency_ms" not in untimed.cost
    assert (datetime.now(UTC) - datetime.fromisoformat(receipt.created)).total_seconds() < 3600


def test_bits_per_byte_of_a_text_match_transformers(byte_path, tmp_path):
    """A text of one window: all bytes but the first are scored."""
    m = gw.open(byte_path)
    with m.program.edit("scale") as e:
        e.set_weight("model.norm.weight", lambda w: w * 1.5)
    text = "if a value is 2, then b\n" * 3
    receipt = m.export(tmp_path / "out", check="none", text=text, predicted={"loss increase": 0.25})
    ids = torch.tensor([list(text.encode())])
    for side, folder in (("before", byte_path), ("after", tmp_path / "out")):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
        with torch.no_grad():
            nats = torch.nn.functional.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:]).item()
        assert receipt.drift["bits_per_byte"][side] == pytest.approx(nats / np.log(2), rel=1e-5)
    assert receipt.drift["bits_per_byte"]["bytes"] == len(text) - 1
    assert receipt.drift["bits_per_byte"]["text_sha256"] == hashlib.sha256(text.encode()).hexdigest()
    assert receipt.drift["predicted"] == {"loss increase": 0.25}
    assert {"bits per byte", "predicted loss increase"} <= dict(receipt.summary()).keys()
    assert Receipt.read(tmp_path / "out") == receipt


def test_bits_per_byte_need_a_tokenizer(made, tmp_path):
    with pytest.raises(UsageError, match="tokenizer"):
        gw.open(made("llama-tied").path).export(tmp_path / "out", check="none", text="a text")
    assert list(tmp_path.iterdir()) == []


def test_a_receipt_contains_no_machine_names_and_round_trips(proved):
    import getpass
    import socket

    _, folder, receipt = proved("edited")
    text = (folder / "receipt.json").read_text()
    for word in (str(folder.parent), socket.gethostname(), f'"{getpass.getuser()}"', str(folder.anchor) + "tmp"):
        assert word not in text
    assert Receipt.read(folder) == receipt
    data = json.loads(text)
    claimed = data.pop("sha256")
    assert claimed == hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    assert all(v is not None for v in data.values())


def test_fields_of_a_later_version_are_preserved(proved, tmp_path):
    _, folder, _ = proved("copy")
    (tmp_path / "receipt.json").write_bytes((folder / "receipt.json").read_bytes())
    rewrite(tmp_path, lambda d: d.update(signature={"by": "another"}))
    receipt = Receipt.read(tmp_path)
    receipt.write(tmp_path)
    assert json.loads((tmp_path / "receipt.json").read_text())["signature"] == {"by": "another"}
    assert Receipt.read(tmp_path) == receipt


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: d.update(schema=1), "unknown schema"),
        (lambda d: d.pop("level"), "fields of the receipt"),
        (lambda d: d.update(result=[]), "fields of the receipt"),
    ],
)
def test_invalid_receipts_are_refused(proved, tmp_path, change, words):
    _, folder, _ = proved("copy")
    (tmp_path / "receipt.json").write_bytes((folder / "receipt.json").read_bytes())
    rewrite(tmp_path, change)
    with pytest.raises(ExportError, match=words):
        Receipt.read(tmp_path)


@pytest.mark.parametrize(("text", "words"), [("[1", "cannot be read"), ("[]", "unknown schema"), (None, "no receipt")])
def test_damaged_receipt_files_are_refused(tmp_path, text, words):
    if text is not None:
        (tmp_path / "receipt.json").write_text(text)
    with pytest.raises(ExportError, match=words):
        Receipt.read(tmp_path)


def test_edited_figures_are_detected(proved, tmp_path):
    _, folder, _ = proved("edited")
    text = (folder / "receipt.json").read_text()
    (tmp_path / "receipt.json").write_text(text.replace('"top1_agreement": 0', '"top1_agreement": 1', 1))
    with pytest.raises(ExportError, match="changed after"):
        Receipt.read(tmp_path)


def test_the_summary_of_an_unedited_model_shows_no_hash(proved):
    assert dict(proved("copy")[2].summary())["edits"] == "none"
    assert dict(proved("edited")[2].summary())["edits"].startswith("3, journal ")
