"""A program whose names, outputs and title attack every format that a picture is written in."""

from __future__ import annotations

from graphwright.program import Builder, Program

NAMES = (
    "<script>alert(1)</script>",
    "a & b",
    'say "hi"',
    "it's",
    "back\\slash",
    "ends with \\",
    "]]>",
    "--!><!--",
    "\u05e9\u05dc\u05d5\u05dd",
    "\u202egnirts",
    "zero\u200bwidth",
    "del\x85\x7f",
    "\ufffe\uffff",
    "emoji \U0001f9e0",
    "\u6f22\u5b57",
    "record|<p>",
    "%s %n $x",
    "x" * 4000,
    "<img src=x onerror=alert(1)>",
)


def hostile() -> Program:
    """A chain of nodes with those names, the shorter ones also as modules; lone surrogates in title and output."""
    b = Builder('"</title></style><b>&amp;\ud800')
    h = b.input("in & <out>", ("B", 4))
    for name in NAMES:
        h = b.tanh(h, name=name)
        if len(name) < 40:
            h = b.relu(h, name=f"m {name}.inner {name}")
    b.output(h, '"]; evil [label="{record|<p>} ${y} --><!--\ud800')
    return b.build()
