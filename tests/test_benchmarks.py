"""Each benchmark can be imported, so that none refers to what has moved; only a peer may be missing."""

from importlib import import_module
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"


OURS = {"graphwright", "benchmarks", *(p.stem for p in FOLDER.parent.glob("tests/**/*.py"))}


def missing(name: str) -> str | None:
    """Import a benchmark; return the name of the package that is not there, or None."""
    try:
        import_module(f"benchmarks.{name}")
    except ModuleNotFoundError as error:
        return (error.name or "").partition(".")[0]
    return None


@pytest.mark.parametrize("name", sorted(p.stem for p in FOLDER.glob("*.py") if not p.stem.startswith("__")))
def test_each_benchmark_is_imported(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(FOLDER.parent)
    assert missing(name) not in OURS
