"""Run by `python -I` in a process of its own: load an exported directory with transformers alone.

Not imported by anything. Arguments: directory, prompts.npz, out directory, new tokens, trust (0 or 1). Writes
`logits.npz`, `greedy.npz` and `facts.json`; runs `snippet.py` of the out directory, if there is one, in `beside`.
"""

import json
import os
import platform
import runpy
import sys
from pathlib import Path

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_MODULES_CACHE"] = os.path.join(sys.argv[3], "modules")  # copies of its code go with it
sys.modules["graphwright"] = None  # pyright: ignore[reportArgumentType]  # an import of it must fail: the files have to stand alone


def main() -> None:
    """Load, compute, write."""
    import numpy as np
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    directory, prompts, out, tokens, trust = sys.argv[1:6]
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    trusted = trust == "1"
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    model, loading = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  # a pair, as asked
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=trusted
    )
    model.eval()
    end = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=0)  # nothing but greedy
    logits, greedy = {}, {}
    with torch.no_grad():
        for key, ids in np.load(prompts).items():
            batch = torch.from_numpy(ids)[None]
            logits[key] = model(batch).logits[0].numpy()
            made = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=int(tokens))
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
    if (Path(out) / "snippet.py").exists():
        os.chdir(Path(out) / "beside")
        loaded = runpy.run_path(str(Path(out) / "snippet.py"))["model"]
        facts["snippet"] = type(loaded).__name__ == facts["class"]
    (Path(out) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


main()
