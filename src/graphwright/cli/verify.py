"""`graphwright verify DIR`: check an export against its receipt, or one model against another."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from graphwright.cli.common import DONE, FAILED, Debug, Json, command, emit_json, say


@command("graphwright export bundled copy && graphwright verify copy")
def verify(
    directory: Annotated[str, typer.Argument(metavar="DIR", help="Directory that graphwright export wrote.")],
    other: Annotated[
        str | None, typer.Argument(metavar="B", help="Another model to compare with.", show_default=False)
    ] = None,
    against: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory of the original model.")] = None,
    trust_code: Annotated[
        bool, typer.Option("--trust-code", help="Run generated modeling code of the export.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> int:
    """Check an export against its receipt, or compare two models.

    Checks checksums, headers, a load in a separate process and the stored logits. The exit code is 0 if all checks
    pass, 1 if one fails, and 3 if one could not be made. With a second model, compares logits and greedy tokens on the
    bundled text, and weights by name; the exit code is 1 if anything differs.
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
            say(f"passed     {line}")
        for line in found.unchecked:
            say(f"unchecked  {line}")
        for line in found.problems:
            say(f"failed     {line}")
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
