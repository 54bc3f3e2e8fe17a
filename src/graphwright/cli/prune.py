"""`graphwright prune DIR OUT`: a smaller model, with what it cost."""

from __future__ import annotations

from typing import Annotated

import typer

from graphwright.cli.common import (
    Check,
    Debug,
    Dir,
    Json,
    Overwrite,
    Quiet,
    Seed,
    Threads,
    bar,
    command,
    emit_json,
    say,
    set_threads,
)
from graphwright.cli.surgery import DryRun, Out, Text, calibration, opened


@command("graphwright prune bundled smaller --tokens 512 --recipe units --no-time --check none --quiet")
def prune(
    directory: Dir,
    out: Out = None,
    target: Annotated[float, typer.Option(metavar="SHARE", help="Share to take away, 0 to 1.")] = 0.3,
    of: Annotated[str, typer.Option(metavar="WHAT", help="params, flops or bytes.")] = "params",
    where: Annotated[str | None, typer.Option(metavar="PATTERN", help="What may be pruned; the layers.")] = None,
    kinds: Annotated[
        str, typer.Option(metavar="KINDS", help="Units: neurons, head_dim, kv_groups, queries, heads; with commas.")
    ] = "neurons,channels,units",
    method: Annotated[
        str, typer.Option(metavar="SCORE", help="greedy, obs, wanda, magnitude, taylor or random.")
    ] = "greedy",
    recipe: Annotated[str, typer.Option(metavar="NAME", help="default, units or modules.")] = "default",
    round_to: Annotated[int, typer.Option(metavar="N", min=1, help="Sizes become multiples of N.")] = 1,
    text: Text = None,
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Tokens to learn from.")] = 8192,
    context: Annotated[int, typer.Option(metavar="N", min=2, help="Tokens per window.")] = 512,
    seed: Seed = 0,
    time: Annotated[bool, typer.Option("--time/--no-time", help="Measure the time per token.")] = True,
    dry_run: DryRun = False,
    check: Check = "auto",
    save: Annotated[
        bool, typer.Option("--save", help="Save it to go on from, journal and all; do not export.")
    ] = False,
    overwrite: Overwrite = False,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Take away the units that matter least, and export.

    Scores come from calibration data; what reads the pruned units gets the least-squares weights for those that stay.
    The report says what changed, on text that was held out.
    """
    from graphwright.surgery import Ratio
    from graphwright.surgery import prune as run

    goal = Ratio(target, of)  # pyright: ignore[reportArgumentType]  # it checks
    set_threads(threads)
    model = opened(directory, out, dry_run, overwrite)
    data = calibration(model, tokens, context, text, seed)
    names = tuple(k.strip() for k in kinds.split(",") if k.strip())
    with bar(quiet or as_json) as report:
        plan = run(
            model, goal, data, dry_run=True, recipe=recipe, method=method, kinds=names, where=where,
            round_to=round_to, seed=seed, timed=time, report=report,
        )  # fmt: skip
        receipt = None
        if out is not None and not dry_run:
            plan.apply()
            plan.report.journal = model.program.journal.hash
            if save:
                model.save(out, overwrite=overwrite)
            else:
                receipt = model.export(out, check=check, overwrite=overwrite, report=report)
    if as_json:
        written = {} if dry_run else {"out": str(out), "receipt": None if receipt is None else receipt.to_json()}
        emit_json({"plan" if dry_run else "report": plan.to_json(), **written})
        return
    say(str(plan.report))
    if not dry_run:
        say(f"wrote {out}" + ("" if receipt is None else f", export level {receipt.level}"))
