"""Run by `python -I` in a process of its own: load an exported directory with transformers alone and write what it computes.

Not imported by anything. Arguments: directory, prompts.npz, out directory, new tokens, trust (0 or 1). Writes `logits.npz`,
`greedy.npz` and `facts.json`.
"""

import json
import os
import platform
import sys
from pathlib import Path

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.modules["graphwright"] = None  # type: ignore[assignment]  # an import of it must fail: the files have to stand alone


def main() -> None:
    import numpy as np
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM

    directory, prompts, out, tokens, trust = sys.argv[1:6]
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    trusted = trust == "1"
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    model, loading = AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=trusted
    )
    model.eval()
    model.generation_config.update(temperature=None, top_p=None, top_k=None)
    logits, greedy = {}, {}
    with torch.no_grad():
        for key, ids in np.load(prompts).items():
            batch = torch.from_numpy(ids)[None]
            logits[key] = model(batch).logits[0].numpy()
            made = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=int(tokens), do_sample=False,
                                  pad_token_id=0)  # fmt: skip
            greedy[key] = made[0, len(ids) :].numpy()
    np.savez(Path(out) / "logits.npz", **logits)
    np.savez(Path(out) / "greedy.npz", **greedy)
    facts = {
        "class": type(model).__name__,
        "model_type": config.model_type,
        "missing_keys": sorted(loading["missing_keys"]),
        "unexpected_keys": sorted(loading["unexpected_keys"]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "platform": f"{platform.system()} {platform.machine()}",
        "threads": torch.get_num_threads(),
    }
    (Path(out) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


main()
