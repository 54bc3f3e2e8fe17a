"""`graphwright diff A B`: what two models differ in."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from graphwright.cli.common import FAILED, Debug, Json, emit_json, say, verb

_LAYER = re.compile(r"\blayers\.(\d+)\.")


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright diff bundled bundled")(diff)


@verb
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="Hugging Face directory, saved model, or the word bundled.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    logits: Annotated[str | None, typer.Option(metavar="TEXT", help="A text on which to compare logits.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """What two models differ in: config, structure, weights.

    Exit 0: the same, 1: different.
    """
    from graphwright.models.compare import compare_models

    found = compare_models(left, right, text=logits)
    if as_json:
        emit_json(found.to_json())
    else:
        for name, (a, b) in found.config.items():
            say(f"config {name}: {a} -> {b}")
        lines = folded(str(found.program).splitlines())
        say("structure and weights are the same" if found.program.identical else "\n".join(lines))
        if found.logits:
            moved, nats, same = (found.logits[n] for n in ("max_abs_dlogits", "mean_kl_nats", "top1_agreement"))
            say(f"logits differ by up to {moved:.4g}, KL {nats:.4g} nats, top-1 equal {100 * same:.1f} %")
    return 0 if found.identical else FAILED


def folded(lines: list[str]) -> list[str]:
    """Lines that say the same of several layers as one, at the first of them: `layers.{0-3}.attn.q: ...`."""
    from graphwright.program.axes.units import runs

    found: dict[str, list[int]] = {}
    for line in lines:
        numbers = {int(n) for n in _LAYER.findall(line)}
        same = _LAYER.sub("layers.{}.", line) if len(numbers) == 1 else line
        found.setdefault(same, []).extend(numbers if len(numbers) == 1 else ())
    return [
        line.replace("layers.{}.", f"layers.{{{runs(n)}}}." if len(n) > 1 else f"layers.{n[0]}.") if n else line
        for line, n in found.items()
    ]
