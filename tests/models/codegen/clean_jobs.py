"""Run by `python -I` without this package: what transformers makes of exported directories. Not a test file.

Arguments: jobs.json ({name: {directory, ids, mask, steps}}) and an out directory; writes `<name>.npz` and `facts.json`.
"""

import json
import os
import sys
from pathlib import Path

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
    os.environ[name] = "1"
os.environ["HF_MODULES_CACHE"] = os.path.join(sys.argv[2], "modules")
sys.modules["graphwright"] = None  # pyright: ignore[reportArgumentType]  # an import of it must fail

from typing import Any  # noqa: E402

import numpy as np  # noqa: E402  # what stands above must stand above
import torch  # noqa: E402
import transformers  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def load(directory, dtype=torch.float32) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, trust_remote_code=True)


def run(job, out):
    ids, mask = torch.tensor(job["ids"]), torch.tensor(job["mask"])
    model = load(job["directory"]).eval()
    greedy = {"max_new_tokens": job["steps"], "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.no_grad():
        found = {"logits": model(ids).logits, "padded": model(ids, attention_mask=mask).logits}
        for cached in (True, False):
            made = model.generate(ids, attention_mask=torch.ones_like(ids), use_cache=cached, **greedy)
            found[f"greedy_{cached}"] = made[:, ids.shape[1] :]
        found["greedy_padded"] = model.generate(ids, attention_mask=mask, **greedy)[:, ids.shape[1] :]
        found["kept"] = model(ids, logits_to_keep=2).logits
        found["low"] = load(job["directory"], torch.bfloat16)(ids).logits.float()
    model.save_pretrained(out / "again")
    files = sorted(f.name for f in (out / "again").iterdir())
    with torch.no_grad():
        found["again"] = load(out / "again")(ids).logits
    model.train()
    loss = model(ids, labels=ids).loss
    loss.backward()
    found["loss"] = loss.detach()
    gradients = {key: None if p.grad is None else float(p.grad.abs().max()) for key, p in model.named_parameters()}
    facts = {"class": type(model).__name__, "files": files, "gradients": gradients, "keys": sorted(model.state_dict())}
    if (Path(job["directory"]) / "tokenizer.json").exists():
        facts["tokens"] = AutoTokenizer.from_pretrained(job["directory"], trust_remote_code=True)("a b").input_ids
    return {k: v.numpy() for k, v in found.items()}, facts


def main():
    jobs, out = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    facts = {}
    for name, job in jobs.items():
        (out / name).mkdir()
        try:
            found, facts[name] = run(job, out / name)
            np.savez(out / f"{name}.npz", **found)
        except Exception as error:
            facts[name] = {"error": f"{type(error).__name__}: {error}"[:2000]}
    (out / "facts.json").write_text(json.dumps(facts))


main()
