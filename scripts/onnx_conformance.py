"""Print how many of the node tests of the `onnx` package pass on imported programs, in all or by operator.

python scripts/onnx_conformance.py [--by-operator]
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "models" / "importing"))

import onnx_nodes


def main() -> None:
    """Print the tables of docs/importing_onnx.md, or a line for each operator."""
    if "--by-operator" not in sys.argv:
        print(onnx_nodes.table())
        return
    for name, counts in onnx_nodes.count().items():
        print(f"{name:30} " + ", ".join(f"{n} {kind}" for kind, n in sorted(counts.items())))


if __name__ == "__main__":
    main()
