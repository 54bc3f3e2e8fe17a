"""Run in a process of its own where transformers is not installed: load an exported directory with this package alone.

Not imported by anything. Arguments: the folder of the package, directory, prompts.npz, out directory, new tokens.
Writes `logits.npz`, `greedy.npz` and `facts.json`.
"""

import json
import platform
import sys
from pathlib import Path


def main() -> None:
    """Load, compute, write."""
    package, directory, prompts, out, tokens = sys.argv[1:6]
    sys.path.insert(0, package)
    import numpy as np

    import graphwright as gw

    model = gw.open(directory)
    logits, greedy = {}, {}
    for key, ids in np.load(prompts).items():
        logits[key] = model.logits(ids)
        greedy[key] = np.asarray(model.generate(ids, int(tokens)).ids, np.int64)
    np.savez(Path(out) / "logits.npz", **logits)
    np.savez(Path(out) / "greedy.npz", **greedy)
    facts = {
        "class": model.config["architectures"][0],
        "missing_keys": [],
        "unexpected_keys": [],
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
    }
    (Path(out) / "facts.json").write_text(json.dumps(facts), encoding="utf-8")


main()
