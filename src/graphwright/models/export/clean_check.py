"""Script of the clean process: load an exported directory with transformers alone, or with this package alone.

No module imports it. Arguments: loader (`transformers`, `trusted`, or the folder of this package), directory,
examples.npz, output directory, number of new tokens, class that loads the directory. Writes `outputs.npz`, `greedy.npz`
and `facts.json`. Arrays are named `<number of the example>/<name>`. If the output directory has a `snippet.py`, runs it
with the subdirectory `beside` as the working directory.
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


LANGUAGE_MODEL = "AutoModelForCausalLM"


def with_transformers(directory, examples, tokens, trusted, made_by):
    """Load the directory with transformers; return outputs and greedy ids of the examples, and facts."""
    sys.modules["graphwright"] = None  # pyright: ignore[reportArgumentType]  # exported files must not import it
    import torch
    import transformers
    from transformers import AutoConfig, GenerationConfig

    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(directory, trust_remote_code=trusted)
    model, loading = getattr(transformers, made_by).from_pretrained(
        directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True, trust_remote_code=trusted
    )
    model.eval()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # runs any width; grouped_mm needs rows of n·16 bytes
    outputs, greedy = {}, {}
    if made_by == LANGUAGE_MODEL:
        own = {name: getattr(model.generation_config, name) for name in ("eos_token_id", "use_cache")}
        model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0, **own)  # greedy only
    with torch.no_grad():
        for number, example in examples.items():
            given = {name: torch.from_numpy(array) for name, array in example.items()}
            if made_by != LANGUAGE_MODEL:
                found = {k: v for k, v in model(**given, return_dict=True).items() if isinstance(v, torch.Tensor)}
                outputs |= {f"{number}/{name}": value.numpy() for name, value in found.items()}
                continue
            batch = given["input_ids"][None]
            outputs[f"{number}/logits"] = model(batch).logits[0].numpy()
            made = model.generate(batch, attention_mask=torch.ones_like(batch), max_new_tokens=tokens)
            greedy[number] = made[0, batch.shape[1] :].numpy()
    facts = {
        "class": type(model).__name__,
        "model_type": config.model_type,
        "missing_keys": sorted(loading["missing_keys"]),
        "unexpected_keys": sorted(loading["unexpected_keys"]),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "threads": torch.get_num_threads(),
    }
    return outputs, greedy, facts


def with_this_package(directory, examples, tokens, package):
    """Load the directory with Graphwright in `package`; return outputs and greedy ids of the examples, and facts."""
    sys.path.insert(0, package)
    import numpy as np

    model = import_module("graphwright").open(directory)
    outputs, greedy = {}, {}
    for number, example in examples.items():
        if model.task == "causal-lm":
            ids = example["input_ids"]
            outputs[f"{number}/logits"] = model.logits(ids)
            greedy[number] = np.asarray(model.generate(ids, tokens).ids, np.int64)
        else:
            outputs |= {f"{number}/{name}": value for name, value in model.outputs(**example).items()}
    return outputs, greedy, {"class": model.config["architectures"][0], "missing_keys": [], "unexpected_keys": []}


def main() -> None:
    """Load the exported directory, run it on the examples, and write outputs, greedy tokens and facts."""
    loader, directory, file, out, tokens, made_by = sys.argv[1:7]
    import numpy as np

    examples = {}
    for at, array in np.load(file).items():
        number, _, name = at.partition("/")
        examples.setdefault(number, {})[name] = array
    if loader in ("transformers", "trusted"):
        outputs, greedy, facts = with_transformers(directory, examples, int(tokens), loader == "trusted", made_by)
    else:
        outputs, greedy, facts = with_this_package(directory, examples, int(tokens), loader)
    np.savez(Path(out) / "outputs.npz", **outputs)
    np.savez(Path(out) / "greedy.npz", **greedy)
    facts |= {"python": platform.python_version(), "platform": f"{platform.system()} {platform.machine()}"}
    if (Path(out) / "snippet.py").exists():
        os.chdir(Path(out) / "beside")
        loaded = runpy.run_path(str(Path(out) / "snippet.py"))["model"]
        facts["snippet"] = type(loaded).__name__ == facts["class"]
    (Path(out) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


main()
