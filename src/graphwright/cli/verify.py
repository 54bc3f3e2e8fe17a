"""`graphwright verify DIR`: an export against its receipt, or one model against another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphwright.cli.common import DONE, FAILED, Debug, Json, emit_json, say
from graphwright.cli.common import verb as command


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright export bundled copy && graphwright verify copy")(verify)


@command
def verify(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="What graphwright export wrote.")],
    other: Annotated[
        str | None, typer.Argument(metavar="B", help="Another model: compare what both compute.", show_default=False)
    ] = None,
    against: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The directory that it was exported from.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run generated modeling code of the export.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Check an export against its receipt, or two models.

    Checksums, headers, a clean load and the stored probe. Exit 0: all holds, 1: something is wrong, 3: something could
    not be checked. With a second model: logits and greedy tokens on the bundled text, and weights by name; exit 1 if
    anything differs.
    """
    if other is not None:
        return _compare(directory, other, as_json)
    from graphwright.models import resolve
    from graphwright.models.export.verify import verify as check

    found = check(resolve(directory), against, trust_code=trust_code)
    if as_json:
        emit_json(found.to_json())
    else:
        for line in found.checked:
            say(f"holds      {line}")
        for line in found.unchecked:
            say(f"unchecked  {line}")
        for line in found.problems:
            say(f"wrong      {line}")
    return found.exit_code


def _compare(left: str, right: str, as_json: bool) -> int:
    from graphwright.models import open
    from graphwright.surgery import Calibration, compare

    a, b = open(left), open(right)
    found = compare(a, b, Calibration.of(a, max_tokens=4096, context=256))
    if as_json:
        emit_json(found.to_json())
    else:
        say(str(found))
    return DONE if found.equal else FAILED
