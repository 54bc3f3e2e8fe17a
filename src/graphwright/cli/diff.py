"""`graphwright diff A B`: the differences between two models."""

from __future__ import annotations

import re
from typing import Annotated

import typer

from graphwright.cli.common import FAILED, Debug, Json, command, emit_json, say

_LAYER = re.compile(r"\blayers\.(\d+)\.")


@command("graphwright diff bundled bundled")
def diff(
    left: Annotated[str, typer.Argument(metavar="A", help="Hugging Face directory, saved model, or the word bundled.")],
    right: Annotated[str, typer.Argument(metavar="B", help="Another model.")],
    logits: Annotated[str | None, typer.Option(metavar="TEXT", help="A text on which to compare logits.")] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Compare the config, structure and weights of two models.

    The exit code is 0 if they are equal and 1 if they differ.
    """
    from graphwright.models.open import compare_models

    found = compare_models(left, right, text=logits)
    if as_json:
        emit_json(found.to_json())
    else:
        for name, (a, b) in found.config.items():
            say(f"config {name}: {a} -> {b}")
        lines = folded(str(found.program).splitlines())
        say("structure and weights are equal" if found.program.identical else "\n".join(lines))
        if found.logits:
            moved, nats, same = (found.logits[n] for n in ("max_abs_dlogits", "mean_kl_nats", "top1_agreement"))
            say(f"logits differ by up to {moved:.4g}, KL {nats:.4g} nats, top-1 equal {100 * same:.1f} %")
    return 0 if found.identical else FAILED


def folded(lines: list[str]) -> list[str]:
    """Merge lines that differ only in the number of a layer: `layers.{0-3}.attn.q: ...`."""
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
