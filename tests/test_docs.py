"""Every fenced `python` block of README and docs runs, in the order of its page, in a directory of its own."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

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


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_local_links_lead_somewhere(page):
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if "://" not in target and not target.startswith("mailto:"):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_page_is_in_the_menu_of_the_site():
    menu = re.findall(r"^ +- ([a-z/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    pages = {p.name for p in (ROOT / "docs").glob("*.md")}
    assert pages == {name for name in menu if "/" not in name} - {"reporting.md"}  # that one is SECURITY.md
    packages = {p.parent.name for p in (ROOT / "src" / "graphwright").glob("*/__init__.py")} - {"cli", "files"}
    assert packages == {Path(name).stem for name in menu if name.startswith("reference/")}


def test_the_readme_has_an_example():
    assert _BLOCK.search((ROOT / "README.md").read_text(encoding="utf-8"))


def test_pictures_are_what_the_script_draws():
    script = runpy.run_path(str(ROOT / "scripts" / "pictures.py"))
    stored = {p.name: p.read_text(encoding="utf-8") for p in (ROOT / "docs" / "pictures").iterdir()}
    assert stored == {name: draw() for name, draw in script["PICTURES"].items()}, "python scripts/pictures.py"
