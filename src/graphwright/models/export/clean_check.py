"""Script of the clean process: load an exported directory with transformers alone, or with this package alone.

No module imports it. Arguments: loader (`transformers`, `trusted`, or the folder of this package), directory,
prompts.npz, output directory, number of new tokens. Writes `logits.npz`, `greedy.npz` and `facts.json`. If the output
directory has a `snippet.py`, runs it with the subdirectory `beside` as the working directory.
"""

import json
import os
import platform
import runpy
import sys
from importlib import import_module
from pathlib import Path

for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE"):
    os.environ[name] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_MODULES_CACHE"] = os.path.join(sys.argv[4], "modules")  # removed with the output directory


def with_transformers(directory, prompts, tokens, trusted):
    """Load the directory with transformers; return logits and greedy ids by key of the file `prompts`, and details."""
    sys.modules["graphwright"] = None  # pyright: ignore[reportArgumentType]  # exported files must not import it
    import numpy as np
    import torch
    import transformers
    from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    model, loading = AutoModelForCausalLM.from_pretrained(  # pyright: ignore[reportGeneralTypeIssues]  # a pair, as asked
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=trusted
    )
    model.eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # runs any width; grouped_mm needs rows of n·16 bytes
    end = model.generation_config.eos_token_id
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=end, pad_token_id=0)  # greedy only
    logits, greedy = {}, {}
    with torch.no_grad():
        for key, ids in np.load(prompts).items():
            batch = torch.from_numpy(ids)[None]
            logits[key] = model(batch).logits[0].numpy()
            made = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=tokens)
            greedy[key] = made[0, len(ids) :].numpy()
    facts = {
        "class": type(model).__name__,
        "model_type": config.model_type,
        "missing_keys": sorted(loading["missing_keys"]),
        "unexpected_keys": sorted(loading["unexpected_keys"]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    return logits, greedy, facts


def with_this_package(directory, prompts, tokens, package):
    """Load the directory with Graphwright in `package`; return logits and greedy ids by key of `prompts`, and facts."""
    sys.path.insert(0, package)
    import numpy as np

    model = import_module("graphwright").open(directory)
    logits, greedy = {}, {}
    for key, ids in np.load(prompts).items():
        logits[key] = model.logits(ids)
        greedy[key] = np.asarray(model.generate(ids, tokens).ids, np.int64)
    return logits, greedy, {"class": model.config["architectures"][0], "missing_keys": [], "unexpected_keys": []}


def main() -> None:
    """Load the exported directory, run it on the prompts, and write logits, greedy tokens and details."""
    loader, directory, prompts, out, tokens = sys.argv[1:6]
    import numpy as np

    if loader in ("transformers", "trusted"):
        logits, greedy, facts = with_transformers(directory, prompts, int(tokens), loader == "trusted")
    else:
        logits, greedy, facts = with_this_package(directory, prompts, int(tokens), loader)
    np.savez(Path(out) / "logits.npz", **logits)
    np.savez(Path(out) / "greedy.npz", **greedy)
    facts |= {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    if (Path(out) / "snippet.py").exists():
        os.chdir(Path(out) / "beside")
        loaded = runpy.run_path(str(Path(out) / "snippet.py"))["model"]
        facts["snippet"] = type(loaded).__name__ == facts["class"]
    (Path(out) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


main()
