"""The wheel holds the package and nothing else, and works without the source tree beside it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

import pytest

ROOT = Path(__file__).parents[1]


def run(*command: object, env: dict[str, str] | None = None, cwd: Path | None = None) -> str:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, env=env, cwd=cwd)
    assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-2000:])
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built with the hatchling of this environment: no network."""
    out = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    run(sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", "--target", target, wheel)
    return target


@pytest.fixture(scope="module")
def bare(installed: Path) -> dict[str, str]:
    """An environment with the wheel and the dependencies: under `-S` no .pth file names the source tree."""
    dependencies = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "COVERAGE", "NUMBA"))}
    return {**kept, "PYTHONPATH": os.pathsep.join([str(installed), *sorted(dependencies)])}


def test_the_wheel_contains_exactly_the_files_of_the_package(wheel: Path) -> None:
    source = ROOT / "src"
    ours = {str(p.relative_to(source)) for p in source.rglob("*") if p.is_file() and "__pycache__" not in p.parts}
    with ZipFile(wheel) as archive:
        names = set(archive.namelist())
    described = {n for n in names if n.split("/")[0].endswith(".dist-info")}
    assert names - described == ours
    assert {"graphwright/py.typed", "graphwright/models/data/pydoc-llama/model.safetensors"} <= names
    assert {n.split("/", 1)[1] for n in described} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "entry_points.txt",
        "licenses/LICENSE",
    }


def test_inspect_runs_from_the_installed_wheel(installed: Path, bare: dict[str, str], tmp_path: Path) -> None:
    where = run(sys.executable, "-S", "-c", "import graphwright; print(graphwright.__file__)", env=bare, cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(installed)
    script = installed / "bin" / "graphwright"
    for command in ([script], ["-m", "graphwright"]):
        output = run(sys.executable, "-S", *command, "inspect", "bundled", "--json", env=bare, cwd=tmp_path)
        facts = json.loads(output)
        assert (facts["schema"], facts["family"], facts["parameters"]) == (1, "llama", 1_623_744)


def test_the_metadata_gives_lower_bounds_only(wheel: Path) -> None:
    with ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("/METADATA"))
        lines = archive.read(name).decode().splitlines()
    wanted = [line.split(";")[0].removeprefix("Requires-Dist:").strip() for line in lines if "Requires-Dist" in line]
    assert "torch>=2.13" in wanted
    assert all(w.startswith("graphwright[") or (w.count(">=") == 1 and "<" not in w and "," not in w) for w in wanted)
    assert "Requires-Python: >=3.11" in lines
