"""Every fenced `python` block of README and docs runs, in the order of its page, in a directory of its own."""

from __future__ import annotations

import re
import runpy
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from graphwright.cli import app
from seeds import DEEP

pytestmark = pytest.mark.usefixtures("warm")
ROOT = Path(__file__).parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
_BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)
_LINK = re.compile(r"\[[^\]]*\]\(([^)#\s]+)(?:#[^)]*)?\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_python_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {"__name__": "docs"}
    text = page.read_text(encoding="utf-8")
    for found in _BLOCK.finditer(text):
        line = text[: found.start()].count("\n") + 2
        exec(compile("\n" * (line - 1) + found[1], str(page), "exec", dont_inherit=True), names)


def test_documented_commands_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("To be or not to be, that is the question.\n" * 40, encoding="utf-8")
    text = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"^```sh\n(.*?)^```", text, re.M | re.S) for line in block.splitlines()]
    assert len(lines) > 8
    ends = []
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line)[1:])
        assert done.exit_code in (0, 1, 3), f"{line}\n{done.output}"
        ends.append((line.split()[1], done.exit_code))
    assert [code for verb, code in ends if verb == "diff"] == [1, 0]  # cut, and undone
    assert all(code == 0 for verb, code in ends if verb not in ("diff", "verify"))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_local_links_point_to_existing_files(page):
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_menu_of_the_site():
    menu = re.findall(r"^ +- ([a-z_/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    pages = {p.name for p in (ROOT / "docs").glob("*.md")}
    assert pages == {name for name in menu if "/" not in name} - {"reporting.md"}  # that one is SECURITY.md
    packages = {p.parent.name for p in (ROOT / "src" / "graphwright").glob("*/__init__.py")} - {"cli", "files"}
    assert packages == {Path(name).stem for name in menu if name.startswith("reference/")}


def test_pages_show_the_stored_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT)
    from benchmarks.render import PAGE, page, with_tables

    assert PAGE.read_text(encoding="utf-8") == page()
    texts = {path.name: path.read_text(encoding="utf-8") for path in PAGE.parent.glob("*.md")}
    assert texts == {name: with_tables(text) for name, text in texts.items()}
    assert "<!-- table: regeneration" in texts["experts.md"]


def test_the_readme_has_an_example():
    assert _BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))


def test_stored_pictures_equal_those_of_the_script():
    script = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
    stored = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "pictures").iterdir()}
    assert stored.keys() == script["PICTURES"].keys()
    drawn = script["PICTURES"] if DEEP else {k: v for k, v in script["PICTURES"].items() if k not in script["TRAINED"]}
    assert {name: stored[name] for name in drawn} == {name: draw() for name, draw in drawn.items()}, (
        "scripts/pictures.py"
    )
