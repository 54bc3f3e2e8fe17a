"""`graphwright run DIR --text T`: print the most likely next tokens, and statistics of inner values."""

from __future__ import annotations

from typing import Annotated

import typer

from graphwright.cli.common import Debug, Dir, Json, Threads, command, emit_json, say, set_threads


@command('graphwright run bundled --text "The following" --watch layers.1.out')
def run(
    directory: Dir,
    text: Annotated[str, typer.Option(metavar="TEXT", help="Input text.")],
    watch: Annotated[
        list[str] | None, typer.Option(metavar="NODE", help="Summarise the values of this node; may be repeated.")
    ] = None,
    threads: Threads = 0,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the most likely next tokens, and inner values."""
    import numpy as np

    from graphwright.models import open
    from graphwright.models.generation.sampling import log_softmax
    from graphwright.models.generation.text import prompt_ids

    set_threads(threads)
    model = open(directory)
    ids = prompt_ids(model, text)
    logp = log_softmax(model.logits(ids)[-1])
    best = np.argsort(-logp, kind="stable")[:5]
    top = [
        {"id": int(i), "text": model.tokenizer.decode([int(i)]) if model.tokenizer else "", "p": float(np.exp(logp[i]))}
        for i in best
    ]
    rows = []
    if watch:
        feeds = {"ids": ids[None], "positions": np.arange(len(ids))[None]}
        found = model.program.run(feeds, keep=watch)
        for path in watch:
            a = found.value(path).to_numpy("float32")
            rows.append(
                {
                    "path": path,
                    "shape": list(a.shape),
                    "mean": float(a.mean()),
                    "rms": float(np.sqrt((a**2).mean())),
                    "min": float(a.min()),
                    "max": float(a.max()),
                }
            )
    if as_json:
        emit_json({"tokens": len(ids), "top": top, "watch": rows})
        return
    for row in top:
        say(f"{100 * row['p']:6.2f} %  {row['id']:>6}  {row['text']!r}")
    for row in rows:
        say(
            f"{row['path']:<32} {row['shape']!s:<16} mean {row['mean']:+.4f}  rms {row['rms']:.4f}  "
            f"min {row['min']:+.4f}  max {row['max']:+.4f}"
        )
