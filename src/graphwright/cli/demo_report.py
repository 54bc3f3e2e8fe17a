"""The report of the demo: one HTML page with chapters, the edited graph, the loss and the receipt."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

from graphwright.program.draw.page import html_page
from graphwright.program.draw.shapes import chart, lines

_STYLE = """
:root{color-scheme:light dark;--line:#8884;--panel:#88888814;--soft:GrayText;--key:light-dark(#1f5fbf,#7db0ff)}
body{margin:0;font:15px/1.55 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.7rem;margin:0 0 .3rem}
h2{font-size:1.15rem;margin:2.2rem 0 .5rem}
pre{font:13px/1.5 ui-monospace,Menlo,monospace;padding:.7rem .9rem;overflow-x:auto;margin:.5rem 0}
.lead,th,.card span{color:var(--soft)}
.code{color:var(--key)} .ok{color:light-dark(#1a7f4b,#4cc38a)} .no{color:light-dark(#b42318,#ff8a7a)}
table{border-collapse:collapse;width:100%;margin:.6rem 0}
td,th{text-align:left;padding:.32rem .7rem;border-bottom:1px solid var(--line);vertical-align:top}
.track{width:min(34rem,38vw)} .bar{background:var(--key);opacity:.75;height:.9rem;border-radius:3px}
pre,.card{background:var(--panel)} pre,.card,.figure{border:1px solid var(--line);border-radius:6px}
.figure{padding:.6rem;overflow:auto;margin:.6rem 0}
.figure svg{display:block;margin:0 auto;max-width:100%;height:auto}
.figure .paper{fill:none} .figure .axis,.figure polyline{stroke:currentColor} .figure .axis{opacity:.5}
.figure .small{fill:currentColor} .figure polyline{color:var(--key)}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.7rem;margin:1rem 0}
.card{padding:.7rem .9rem} .card b{display:block;font-size:1.35rem}
"""


def write_report(path: Path, chapters: list[Any], demo: Any, seconds: float) -> None:
    """Write the report of a demo as an HTML page."""
    facts = {c.title: c.facts for c in chapters}
    opened, cut = facts["open"], facts["cut a branch while it runs"]
    scores = {
        "as opened": demo.before,
        "branch cut": cut["bits_per_byte"],
        "undone": demo.before,
        "30 % of the blocks pruned": facts["prune"]["bits_per_byte"],
        "skip added and trained": facts["train the edited model"]["bits_per_byte"],
    }
    top = max(scores.values())
    bar = "<div class=track><div class=bar style='width:{:.1f}%'></div></div>"
    bars = [(escape(name), bar.format(100 * value / top), f"{value:.4f}") for name, value in scores.items()]
    cards = {
        "to open, no weight read": f"{opened['ms']:.0f} ms",
        "from a cut to the next byte": f"{cut['ms_to_next_byte']:.0f} ms",
        "bits per byte, held out": f"{demo.before:.3f}",
        "confirmed by transformers": "yes" if demo.receipt.confirmed else "no",
    }
    loss = lines({"loss": (demo.losses, "#1f5fbf")}, f"step {len(demo.losses)}")
    body = [
        "<h1>Graphwright demo</h1>",
        f"<p class=lead>A byte-level Llama of {opened['parameters']:,} parameters, opened, cut, pruned, undone, "
        f"extended, trained and exported in {seconds:.0f} s.</p><div class=cards>",
        *(f"<div class=card><b>{value}</b><span>{text}</span></div>" for text, value in cards.items()),
        f"</div><h2>Bits per byte on held-out text</h2>{_table(bars)}",
        "<h2>The edited graph</h2><p class=lead>Compared with the original model: new parts are thick green, "
        "unchanged ones pale. In <a href=model.html>model.html</a>, the original model, blocks open with a click.</p>",
        f"<div class=figure>{demo.picture}</div>",
        "<h2>Training loss</h2><p class=lead>Nats per byte, per step.</p>",
        f"<div class=figure>{chart(loss)}</div>",
        f"<h2>Receipt</h2>{_table([(escape(name), escape(value)) for name, value in demo.receipt.summary()])}",
        "<h2>Chapters</h2>",
    ]
    for number, c in enumerate(chapters, 1):
        checks = "".join(
            f"<div class={'ok' if ok else 'no'}>{'✓' if ok else '✗'} {escape(what)}</div>"
            for what, ok in c.checks.items()
        )
        body.append(
            f"<h2>{number}. {escape(c.title)} <span class=lead>({c.seconds:.1f} s)</span></h2>"
            f"<pre class=code>&gt;&gt;&gt; {escape(c.code)}</pre><pre>{escape(chr(10).join(c.lines))}</pre>{checks}"
        )
    page = html_page("Graphwright demo", _STYLE, f"<main>{''.join(body)}</main>")
    path.write_text(page, encoding="utf-8")


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    """Return an HTML table; the first entry of each row is its heading."""
    cells = ("</td><td>".join(row[1:]) for row in rows)
    made = (f"<tr><th>{row[0]}</th><td>{cell}</td></tr>" for row, cell in zip(rows, cells, strict=True))
    return f"<table>{''.join(made)}</table>"
