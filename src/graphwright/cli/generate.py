"""`graphwright generate DIR PROMPT`: continue a text, token by token."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from graphwright.cli.common import Debug, Dir, Json, Quiet, Seed, Threads, command, emit_json, set_threads

if TYPE_CHECKING:
    from graphwright.models import Model


@command('graphwright generate bundled "The following" --tokens 80 --temperature 0.7')
def generate(
    directory: Dir,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="PROMPT", help="Text to continue; - reads stdin; without a prompt a new text begins."),
    ] = None,
    ids: Annotated[
        str, typer.Option(metavar="IDS", help="Token ids instead of a text, such as 1,450; needs no tokenizer.")
    ] = "",
    tokens: Annotated[int, typer.Option(metavar="N", min=0, help="Maximum number of new tokens.")] = 64,
    temperature: Annotated[float, typer.Option(metavar="T", help="Temperature; 0 takes the most likely token.")] = 0.0,
    top_k: Annotated[int, typer.Option(metavar="K", help="Sample among the k most likely tokens; 0 for all.")] = 0,
    top_p: Annotated[
        float, typer.Option(metavar="P", help="Sample among the most likely tokens up to this total probability.")
    ] = 1.0,
    min_p: Annotated[
        float,
        typer.Option(metavar="P", help="Sample among tokens with at least this share of the largest probability."),
    ] = 0.0,
    repetition_penalty: Annotated[
        float, typer.Option(metavar="R", help="Divide logits of earlier tokens; 1 for no penalty.")
    ] = 1.0,
    presence: Annotated[float, typer.Option(metavar="X", help="Subtract from logits of tokens in the output.")] = 0.0,
    frequency: Annotated[
        float, typer.Option(metavar="X", help="Subtract times the count of the token in the output.")
    ] = 0.0,
    logprobs: Annotated[int, typer.Option(metavar="K", min=0, help="Record the k most likely tokens per step.")] = 0,
    model_defaults: Annotated[
        bool, typer.Option("--model-defaults", help="Use generation_config.json for options that are not given.")
    ] = False,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this string; may be repeated.")
    ] = None,
    seed: Seed = 0,
    threads: Threads = 0,
    quiet: Quiet = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Continue a text; greedy unless a temperature is given."""
    from graphwright.models import open

    set_threads(threads)
    model = open(directory)

    pieces: list[str] = []

    def stream(piece: str) -> None:
        pieces.append(piece)
        if not as_json:
            sys.stdout.write(piece)
            sys.stdout.flush()

    try:
        result = model.generate(
            _prompt(model, prompt, ids),
            tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence=presence,
            frequency=frequency,
            logprobs=logprobs,
            use_model_defaults=model_defaults,
            seed=seed,
            stop=tuple(stop or ()),
            stream=stream,
        )
    except KeyboardInterrupt:
        shown = f": {''.join(pieces)}" if as_json else ""  # else it was printed
        raise KeyboardInterrupt(f"the text ends here{shown}") from None
    if as_json:
        emit_json(result.to_json())
        return
    print(*(result.ids if model.tokenizer is None else ()))
    if not quiet:
        print(
            f"{len(result.ids)} tokens ({result.finish_reason}), {result.tokens_per_s:.0f} token/s, "
            f"prompt of {result.prompt_tokens} in {1e3 * result.prefill_s:.1f} ms",
            file=sys.stderr,
        )


def _prompt(model: Model, text: str | None, ids: str) -> str | list[int]:
    """The prompt: the text, the ids, or the start token. Raises: UsageError, PromptError."""
    from graphwright.errors import UsageError
    from graphwright.models import PromptError
    from graphwright.models.tokenizer import special_ids

    if ids and text is not None:
        raise UsageError("PROMPT and --ids are both given", got=text, fix="give one of them")
    if ids:
        try:
            return [int(word) for word in ids.replace(",", " ").split()]
        except ValueError as error:
            raise UsageError("token ids must be whole numbers", where="--ids", got=ids) from error
    if text is not None:
        return sys.stdin.read() if text == "-" else text
    start = special_ids(model.directory, model.config)[0]
    if start is None:
        raise PromptError("no prompt was given, and the model has no start token", fix="give a text, or --ids")
    return [start]
