"""`graphwright life DIR`: who a life is, what happened to it, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from graphwright.cli.common import Command, Output, argument, flag, option


@Command(
    "graphwright train bundled --text notes.txt --steps 1 --life young --quiet && graphwright life young --log",
)
def life(
    directory: Annotated[str, argument("DIR", "Directory of a life, such as that of `train --life`.")],
    log: Annotated[bool, flag("--log", "Print all events.")] = False,
    svg: Annotated[Path | None, option("FILE", "Draw loss, experts and events over steps, as SVG.")] = None,
    verify: Annotated[bool, flag("--verify", "Check every stored byte, line and hash.")] = False,
) -> Output:
    """Show the life of a model: name, age, segments, events, bytes on disk.

    Another process may train it meanwhile.
    """
    from graphwright import lifecycle
    from graphwright.report import bytes_text, plain, table

    with lifecycle.open(directory, readonly=True) as found:
        store, identity = found.store, found.identity
        facts = {**found.to_json()}
        if log:
            facts["events"] = [plain(event) for event in found.log]
        if verify:
            facts["verified"] = found.verify().to_json()
        if svg is not None:
            found.to_svg(svg)
            facts["svg"] = str(svg)
        born = f"born {identity.time[:19]} as {identity.name}, id {identity.id}"
        if identity.parent is not None:
            born += f", a fork of {identity.parent['id']} at step {identity.parent['step']}"
        count = "1 commit" if len(store.commits) == 1 else f"{len(store.commits)} commits"
        size = f"{count}, {bytes_text(store.nbytes)}, {bytes_text(store.live_bytes)} of them live"
        columns = ("start", "steps", "items", "tokens", "loss_first", "loss_last")
        lines = [f"{found.name}, {found.age:,} steps", born, size]
        if segments := facts["segments"]:
            lines += ["", table(segments, columns)]
        lines += ["", str(found.log.tail(len(found.log) if log else 8))]
        if verify:
            lines += ["", "every stored byte, line and hash is as it was written"]
        if svg is not None:
            lines.append(f"wrote {svg}")
    return Output(facts, "\n".join(lines))
