"""The page: self-contained, hostile names inert, details complete; a browser opens groups as Python lays them out."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from base64 import b64encode
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from graphwright.program import Program, load
from graphwright.program.draw import PictureLayout, layout
from graphwright.program.draw.page import html_page

from . import models
from .hostile import NAMES, hostile

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-component-update",
    "--disable-background-networking",
    "--disable-sync",
    "--dump-dom",
    "--virtual-time-budget=4000",
)


class Page(HTMLParser):
    """Tags with their attributes, and the text of scripts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data
        self.words.append(data)


def data_of(page: Page) -> dict:
    return json.loads(page.scripts[0])


def test_the_page_has_no_external_references() -> None:
    page = Page(models.llama(2).to_html())
    for tag, attrs in page.tags:
        assert tag not in ("link", "img", "iframe", "object", "embed", "base"), tag
        assert not attrs.keys() & {"src", "href", "action", "xlink:href"}, (tag, attrs)
        assert not any(name.startswith("on") for name in attrs), (tag, attrs)
    for script in page.scripts:
        assert not re.search(r"fetch\(|XMLHttpRequest|import\(|WebSocket|https?://(?!www\.w3\.org/2000/svg)", script)


def test_hostile_names_create_no_html_element() -> None:
    plain, page = Page(models.mlp().to_html()), Page(hostile().to_html())
    assert {t for t, _ in page.tags} <= {t for t, _ in plain.tags} | {"details", "summary"}
    assert len(page.scripts) == 2
    data = data_of(page)
    lines = {line for node in data["nodes"] for line in node["lines"]}
    assert {"<script>alert(1)</script>", "<img src=x onerror=alert(1)>", "\\u{202e}gnirts"} <= lines
    assert len(data["nodes"]) == 1 + len(NAMES) + sum(len(n) < 40 for n in NAMES)


def test_the_page_contains_every_node_and_group_open_and_closed() -> None:
    program = models.llama(3)
    data = data_of(Page(program.to_html()))
    assert {n["path"] for n in data["nodes"]} == set(layout(program, level=9).boxes)
    assert {m["path"] for m in data["modules"]} == {"", *layout(program, level=9).groups}
    assert [data["modules"][k]["path"] for k in data["open"]] == ["", "layers"]
    assert len(data["arrangements"]) == 5, "equal layers share one"


def test_the_text_tree_lists_every_node() -> None:
    page = Page(models.llama(2).to_html())
    listed = [attrs["title"] or "" for tag, attrs in page.tags if tag == "p" and "title" in attrs]
    assert sorted(listed) == sorted(layout(models.llama(2), level=9).boxes)
    assert sum(tag == "details" for tag, _ in page.tags) == len(layout(models.llama(2), level=9).groups)


def test_details_show_the_edits_of_a_node() -> None:
    program = models.llama(2)
    with program.edit("softer norm") as e:
        e.set_attr("layers.1.mlp.norm", eps=1e-3)
    with program.edit("other weights", author="pass") as e:
        e.set_weight("layers.1.mlp.norm.weight", lambda w: w + 1)
    data = data_of(Page(program.to_html()))
    node = next(n for n in data["nodes"] if n["path"] == "layers.1.mlp.norm")
    assert ["softer norm" in data["entries"][k] for k in node["blame"]] == [True, False]
    assert "pass: other weights" in data["entries"][node["blame"][1]]
    assert "eps = 0.001" in node["tip"]
    assert "key layers.1.mlp.norm.weight" in node["tip"]
    assert [n["path"] for n in data["nodes"] if "blame" in n] == ["layers.1.mlp.norm"]


def test_details_show_statistics_of_loaded_weights(tmp_path: Path) -> None:
    program = models.mlp()
    with program.edit("values") as e:
        values = np.array([[3, -4, 0, 1], *[[1, 1, 1, 1]] * 15], "f4")
        e.set_weight("first.weight", values)
        e.set_weight("second.bias", [np.nan, np.inf, 2.0])
    tips = {n["path"]: n["tip"].splitlines() for n in data_of(Page(program.to_html()))["nodes"]}
    assert tips["first"][-1] == f"weight: mean {values.mean():.3g}, std {values.std():.3g}, largest 4"
    assert tips["second_bias"][-1] == "bias: mean 2, std 0, largest 2, 2 not finite"
    loaded = load(program.save(tmp_path / "p"))
    pages = {n["path"]: n["tip"] for n in data_of(Page(loaded.to_html()))["nodes"]}
    assert not any("mean" in tip for tip in pages.values()), "no byte is read for a picture"
    assert not any(v.data.storage.touched for v in loaded.weights.values())
    boxes = {n["path"]: n["tip"] for n in data_of(Page(program.to_html(params=True)))["nodes"]}
    assert boxes["first.weight"].endswith("largest 4")


# -- in a browser -----------------------------------------------------------------------------------------------------
def shown(page: str, script: str, folder: Path, admit: bool = True) -> str:
    """The document after a script was added to the page, and to its policy if `admit`."""
    if admit:
        digest = b64encode(sha256(script.encode()).digest()).decode()
        page = page.replace("script-src ", f"script-src 'sha256-{digest}' ", 1)
    file = folder / "page.html"
    file.write_text(page.replace("</body>", f"<script>{script}</script></body>"), "utf-8")
    command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={folder / 'profile'}", file.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=100).stdout


def drawn(page: str, script: str, folder: Path) -> dict[str, list[int]]:
    """Rectangles of boxes and frames after running a script in the page."""
    report = (
        f"window.onerror = (m) => {{ document.body.textContent = 'ERROR ' + m }};{script};"
        "const found = {}; for (const g of document.querySelectorAll('.gw-all .gw-b, .gw-all .gw-f')) {"
        "const r = [...g.querySelectorAll('rect')].at(-1);"
        "found[g.dataset.path] = ['x','y','width','height'].map((k) => +r.getAttribute(k)) }"
        "document.body.textContent = 'FOUND' + JSON.stringify(found) + 'END'"
    )
    made = shown(page, report, folder)
    found = re.search(r"FOUND(.*)END", made)
    assert found, made[-2000:]
    return json.loads(found[1])


def rectangles(made: PictureLayout) -> dict[str, list[int]]:
    return {p: [b.x, b.y, b.w, b.h] for p, b in (*made.boxes.items(), *made.groups.items())}


@pytest.mark.browser
@pytest.mark.parametrize(
    ("program", "opened"),
    [
        (models.llama(3), {"layers", "layers.1", "layers.1.attn", "layers.2", "layers.2.mlp"}),
        (models.branches(), {"block", "block.branch2"}),
        (models.tangle(), {"a", "a.d", "b", "e", "e.f"}),
    ],
)
def test_expanding_in_the_browser_gives_the_layout_of_python(
    program: Program, opened: set[str], tmp_path: Path
) -> None:
    script = "document.getElementById('gw-close').click();" + "".join(
        f"graphwright.toggle('{p}');" for p in sorted(opened)
    )
    assert drawn(program.to_html(), script, tmp_path) == rectangles(layout(program, expanded=frozenset(opened)))


@pytest.mark.browser
def test_clicking_toggles_groups_and_hovering_shows_details(tmp_path: Path) -> None:
    program = models.llama(3)
    script = """
      const at = (path) => document.querySelector(`.gw-all [data-path="${path}"]`);
      const act = (path, kind) => at(path).dispatchEvent(new MouseEvent(kind, { bubbles: true }));
      act("layers.1", "click"); act("layers.1.mlp", "click"); act("layers.1.mlp.gate", "mouseover");
      const told = document.getElementById("gw-details").textContent;
      if (!told.includes("key layers.1.mlp.gate.weight")) throw new Error("no details");
      act("layers.1.mlp", "click"); act("layers.1", "click")"""
    assert drawn(program.to_html(), script, tmp_path) == rectangles(layout(program))


@pytest.mark.browser
def test_a_script_that_is_not_the_page_s_own_does_not_run(tmp_path: Path) -> None:
    page, script = models.mlp().to_html(), "document.body.textContent = 'INT' + 'RUDER'"
    assert "INTRUDER" in shown(page, script, tmp_path)
    assert "INTRUDER" not in shown(page, script, tmp_path, admit=False)


def test_the_policy_of_a_page_admits_its_own_script_alone() -> None:
    for text in (models.mlp().to_html(), html_page("a & b", "p{color:red}", "<p>text</p>")):
        page = Page(text)
        (policy,) = [a["content"] or "" for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
        rules = dict(rule.split(" ", 1) for rule in policy.split("; "))
        own = [b64encode(sha256(s.encode()).digest()).decode() for s in re.findall("(?s)<script>(.*?)</script>", text)]
        assert rules["default-src"] == "'none'"
        assert rules["script-src"] == (f"'sha256-{own[0]}'" if own else "'none'")
        assert len(own) <= 1
