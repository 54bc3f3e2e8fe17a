"""`graphwright experts` and `upcycle`: the use of a mixture's experts, fewer of them, and dense models as mixtures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from graphwright.cli.common import Check, Command, Dir, Output, Overwrite, Seed, argument, bar, flag, option, read_text


@Command("graphwright experts bundled --upcycle 4 --tokens 512")
def experts(
    directory: Dir,
    out: Annotated[Path | None, argument("OUT", "Directory to write; needed with --prune.")] = None,
    text: Annotated[str | None, option("FILE", "Text to measure on; by default the help topics of Python.")] = None,
    tokens: Annotated[int, option("N", "Tokens to measure on.", min=2)] = 8192,
    context: Annotated[int, option("N", "Tokens per window.", min=2)] = 512,
    score: Annotated[str | None, option("NAME", "Print this score, such as effect or reap.")] = None,
    prune: Annotated[float | None, option("SHARE", "Cut this share of the experts, 0 to 1.")] = None,
    by: Annotated[str, option("NAME", "Score by which experts are cut.")] = "effect",
    upcycle: Annotated[int | None, option("N", "First replace each MLP by N copies and a router.", min=2)] = None,
    uneven: Annotated[bool, flag("--uneven", "Layers may lose different numbers of experts.")] = False,
    svg: Annotated[Path | None, option("FILE", "Draw the use of all experts, as SVG.")] = None,
    check: Check = "auto",
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> Output:
    """Report which experts a model uses, score them, or cut those that matter least.

    With --prune the smaller model is exported to OUT, as the original class if it can hold it.
    """
    from graphwright import experts as ex
    from graphwright.errors import UsageError
    from graphwright.files import DestinationExists, check_free
    from graphwright.models import open
    from graphwright.surgery import Calibration

    if prune is not None and out is None:
        raise UsageError("--prune was given without a directory for the smaller model", where=directory, fix="add OUT")
    if out is not None:
        check_free(out, overwrite)
    if svg is not None and svg.exists() and not overwrite:
        raise DestinationExists("the file already exists", where=svg, fix="--overwrite replaces it")
    model = open(directory)
    if upcycle is not None:
        ex.upcycle(model, upcycle, min(2, upcycle), seed=seed)
    data = Calibration.of(model, None if text is None else read_text(text), tokens, context, seed)
    facts: dict[str, Any] = {}
    lines: list[str] = []
    if prune is None and score is None:
        found = ex.usage(model, data)
        facts, lines = found.to_json(), [str(found)]
    elif score is not None:
        with bar() as progress:
            scored = ex.scores(model, score, data, seed=seed, progress=progress)
        facts, lines = scored.to_json(), [str(scored)]
    if prune is not None:
        with bar() as progress:
            report = ex.prune(model, prune, by=by, per_layer=not uneven, data=data, seed=seed, progress=progress)
        assert out is not None
        how: dict[str, Any] = {"check": check, "overwrite": overwrite}
        receipt = model.export(out, **how)
        facts |= {"pruned": report.to_json(), "receipt": receipt.to_json()}
        lines += [str(report), str(receipt)]
    if svg is not None:
        ex.usage(model, data).to_svg(svg)
        lines.append(f"wrote {svg}")
    return Output(facts, "\n".join(lines))


@Command("graphwright upcycle bundled mixture --experts 4 --k 2 --save")
def upcycle(
    directory: Dir,
    out: Annotated[Path, argument("OUT", "Directory to write.")],
    experts: Annotated[int, option("N", "Experts per layer.", min=1)] = 8,
    k: Annotated[int, option("N", "Experts that each token uses.", min=1)] = 2,
    router: Annotated[str, option("NAME", "topk; or threshold, where K is a mean.")] = "topk",
    layer: Annotated[list[str] | None, option("NAME", "Only this MLP, such as layers.0.mlp; may be repeated.")] = None,
    save: Annotated[bool, flag("--save", "Save a model with its journal for further edits; do not export.")] = False,
    check: Check = "auto",
    seed: Seed = 0,
    overwrite: Overwrite = False,
) -> Output:
    """Replace the MLPs of a model by mixtures of experts that are their copies; logits do not change.

    The model is exported as the class of transformers that has such layers, or as generated code.
    """
    from graphwright import experts as ex
    from graphwright.files import check_free
    from graphwright.models import open

    check_free(out, overwrite)
    model = ex.upcycle(open(directory), experts, k, layers=layer or "all", router=router, seed=seed)
    facts: dict[str, Any] = {"layers": {name: found.size for name, found in ex.routed_layers(model.program).items()}}
    line = f"{len(facts['layers'])} MLPs became mixtures of {experts} experts, of which a token uses {k}"
    if save:
        model.save(out, overwrite=overwrite)
        return Output({**facts, "out": str(out)}, f"{line}\nsaved {out}")
    how: dict[str, Any] = {"check": check, "overwrite": overwrite}
    receipt = model.export(out, **how)
    return Output({**facts, "receipt": receipt.to_json()}, f"{line}\n{receipt}")
