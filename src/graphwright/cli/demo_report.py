"""The report of the demo: one HTML page with chapters, the edited graph, the loss and the receipt."""

from __future__ import annotations

from html import escape
from pathlib import Path
from typing import Any

from graphwright.program.draw.shapes import chart, lines

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2430;--soft:#5b6675;--line:#d8dee6;
  --back:#fff;--panel:#f6f8fa;--good:#1a7f4b;--bad:#b42318;
  --key:#1f5fbf}
@media(prefers-color-scheme:dark){:root{--ink:#e6eaf0;--soft:#9aa5b4;--line:#323a46;--back:#12161c;
  --panel:#1a2029;--good:#4cc38a;--bad:#ff8a7a;--key:#7db0ff}}
*{box-sizing:border-box}
body{margin:0;background:var(--back);color:var(--ink);font:15px/1.55 system-ui,sans-serif}
main{max-width:60rem;margin:0 auto;padding:2rem 1.25rem 4rem}
h1{font-size:1.7rem;margin:0 0 .3rem}
h2{font-size:1.15rem;margin:2.2rem 0 .5rem}
.lead{color:var(--soft);margin:0 0 1.2rem}
code,pre{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,monospace}
pre{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:.7rem .9rem;
  overflow-x:auto;margin:.5rem 0}
.code{color:var(--key)}
.ok{color:var(--good)}
.no{color:var(--bad)}
.check{margin:.15rem 0}
table{border-collapse:collapse;width:100%;margin:.6rem 0}
td,th{text-align:left;padding:.32rem .7rem;border-bottom:1px solid var(--line);vertical-align:top}
th{color:var(--soft);font-weight:600}
td.n{text-align:right;font-variant-numeric:tabular-nums}
.figure{border:1px solid var(--line);border-radius:6px;padding:.6rem;overflow:auto;margin:.6rem 0}
.figure svg{display:block;margin:0 auto;max-width:100%;height:auto}
.cards{display:grid;grid-template-columns:repeat(auto-fit,minmax(11rem,1fr));gap:.7rem;margin:1rem 0}
.card{background:var(--panel);border:1px solid var(--line);border-radius:6px;padding:.7rem .9rem}
.card b{display:block;font-size:1.35rem}
.card span{color:var(--soft);font-size:.86rem}
"""


def write_report(path: Path, chapters: list[Any], demo: Any, seconds: float) -> None:
    """Write the report."""
    by_title = {c.title: c for c in chapters}
    scores = [
        ("as opened", demo.before),
        ("branch cut", by_title["cut a branch while it runs"].facts["bits_per_byte"]),
        ("undone", demo.before),
        ("30 % of the blocks pruned", by_title["prune"].facts["bits_per_byte"]),
        ("skip added and trained", by_title["train the edited model"].facts["bits_per_byte"]),
    ]
    opened, cut = by_title["open"].facts, by_title["cut a branch while it runs"].facts
    cards = [
        (f"{opened['ms']:.0f} ms", "to open, no weight read"),
        (f"{cut['ms_to_next_byte']:.0f} ms", "from a cut to the next byte"),
        (f"{demo.before:.3f}", "bits per byte, held out"),
        ("yes" if demo.receipt.confirmed else "no", "confirmed by transformers"),
    ]
    body = [
        "<h1>Graphwright demo</h1>",
        f"<p class=lead>A byte-level Llama of {opened['parameters']:,} parameters, opened, cut, pruned, undone, "
        f"extended, trained and exported in {seconds:.0f} s.</p>",
        "<div class=cards>"
        + "".join(f"<div class=card><b>{escape(v)}</b><span>{escape(t)}</span></div>" for v, t in cards)
        + "</div>",
        "<h2>Bits per byte on held-out text</h2>",
        _bars(scores),
        "<h2>The edited graph</h2><p class=lead>Compared with the original model: new parts are thick green, "
        "unchanged ones pale. In <a href=model.html>model.html</a>, the original model, blocks open with a click.</p>",
        f"<div class=figure>{demo.picture}</div>",
        "<h2>Training loss</h2><p class=lead>Nats per byte, per step.</p>",
        f"<div class=figure>{_loss_chart(demo.losses)}</div>",
        "<h2>Receipt</h2>",
        _table(demo.receipt.summary()),
        "<h2>Chapters</h2>",
    ]
    for number, c in enumerate(chapters, 1):
        checks = "".join(
            f"<div class='check {'ok' if ok else 'no'}'>{'✓' if ok else '✗'} {escape(what)}</div>"
            for what, ok in c.checks.items()
        )
        body.append(
            f"<h2>{number}. {escape(c.title)} <span class=lead>({c.seconds:.1f} s)</span></h2>"
            f"<pre class=code>&gt;&gt;&gt; {escape(c.code)}</pre>"
            f"<pre>{escape(chr(10).join(c.lines))}</pre>{checks}"
        )
    path.write_text(
        f"<!doctype html><html lang=en><head><meta charset=utf-8><meta name=viewport content='width=device-width'>"
        f"<title>Graphwright demo</title><style>{_STYLE}</style></head><body><main>"
        f"{''.join(body)}</main></body></html>\n",
        encoding="utf-8",
    )


def _table(rows: list[tuple[str, str]]) -> str:
    return "<table>" + "".join(f"<tr><th>{escape(a)}</th><td>{escape(b)}</td></tr>" for a, b in rows) + "</table>"


def _bars(rows: list[tuple[str, float]]) -> str:
    top = max(v for _, v in rows)
    lines = "".join(
        f"<tr><th>{escape(name)}</th><td style='width:60%'>"
        f"<div style='background:var(--key);opacity:.75;height:.9rem;border-radius:3px;"
        f"width:{100 * value / top:.1f}%'></div></td><td class=n>{value:.4f}</td></tr>"
        for name, value in rows
    )
    return f"<table>{lines}</table>"


def _loss_chart(values: list[float]) -> str:
    style = "text{font:11px system-ui;fill:currentColor}.axis{stroke:currentColor;fill:none;opacity:.5}"
    return chart(lines({"loss": (values, "var(--key)")}, f"step {len(values)}"), style=style)
