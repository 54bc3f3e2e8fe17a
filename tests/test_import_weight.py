"""Looking is light: importing the package and inspecting a model loads no torch, numba or transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "numba", "transformers", "scipy", "tokenizers")
SCRIPT = """
import sys
{work}
print(sorted(m for m in {heavy} if m in sys.modules))
"""


@pytest.mark.parametrize(
    "work",
    [
        "import graphwright",
        "import graphwright as gw; gw.Program; gw.Tensor; gw.compile; gw.open",
        "import graphwright as gw; print(gw.open('bundled').inspect(), file=sys.stderr)",
        "import graphwright as gw; gw.open('bundled').export_plan()",
        "import graphwright as gw; p = gw.open('bundled').program; p.to_svg()",
        "sys.argv = ['graphwright', 'inspect', 'bundled', '--json']\n"
        "import contextlib, io\nfrom graphwright.cli import app\n"
        "with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit): app()",
    ],
    ids=["import", "names", "open and inspect", "export plan", "draw", "cli inspect"],
)
def test_inspection_imports_no_heavy_library(work):
    script = SCRIPT.format(work=work, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_edit_reads_no_weight_and_imports_no_torch():
    work = """
import graphwright as gw
p = gw.open('bundled').program
with p.edit('cut') as e: e.cut(p.in_edges('layers.1.out')[1])
p.undo()
assert not any(v.data.storage.touched for v in p.weights.values() if v.data.storage.readonly)
"""
    script = SCRIPT.format(work=work, heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_completion_offers_public_names_only():
    import graphwright as gw

    assert set(dir(gw)) >= set(gw.__all__)
    assert not {"Any", "import_module", "annotations", "_HOME"} & set(dir(gw))
