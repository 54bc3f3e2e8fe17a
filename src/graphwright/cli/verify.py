"""`graphwright verify DIR`: an export against its receipt."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphwright.cli.common import Debug, Json, emit_json, say
from graphwright.cli.common import verb as command


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command(epilog="Example: graphwright export bundled copy && graphwright verify copy")(verify)


@command
def verify(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="What graphwright export wrote.")],
    against: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The directory that it was exported from.")
    ] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run the modeling code that a rung 5 export carries.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Check an export against its receipt.

    Checksums, headers, a clean load and the stored probe. Exit 0: all holds, 1: something is wrong, 3: something could
    not be checked.
    """
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
