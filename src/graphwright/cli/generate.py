"""`graphwright generate DIR PROMPT`: continue a text, token by token."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

from graphwright.cli.common import Command, Dir, OnDevice, Output, argument, option
from graphwright.errors import UsageError

if TYPE_CHECKING:
    from graphwright.models import GenerationOptions, Model


@Command(
    'graphwright generate bundled "The following" --tokens 80 --temperature 0.7',
    "graphwright.models:GenerationOptions",
    hide="processors first_stream allow_stale",
    use_model_defaults="model_defaults",
)
def generate(
    directory: Dir,
    prompt: Annotated[str | None, argument("PROMPT", "Text to continue, or - for stdin; by default none.")] = None,
    ids: Annotated[str, option("IDS", "Token ids instead of a text, such as 1,450; needs no tokenizer.")] = "",
    tokens: Annotated[int, option("N", "Maximum number of new tokens.", min=0)] = 64,
    stop: Annotated[list[str] | None, option("TEXT", "Stop before this string; may be repeated.")] = None,
    device: OnDevice = "cpu",
    *,
    quiet: bool,
    as_json: bool,
    options: GenerationOptions,
) -> Output:
    """Continue a text; greedy unless a temperature is given."""
    from graphwright.models import open

    model = open(directory, device=device)
    pieces: list[str] = []

    def stream(piece: str) -> None:
        pieces.append(piece)
        if not as_json:
            print(piece, end="", flush=True)

    given = {**asdict(options), "stop": stop or ()}
    try:
        result = model.generate(_prompt(model, prompt, ids), tokens, stream=stream, **given)
    except KeyboardInterrupt:
        shown = f": {''.join(pieces)}" if as_json else ""  # else it was printed
        raise KeyboardInterrupt(f"only the text so far was generated{shown}") from None
    if not as_json:
        print(*(result.ids if model.tokenizer is None else ()))
    if not (quiet or as_json):
        counts = f"{len(result.ids)} tokens ({result.finish_reason}), {result.tokens_per_s:.0f} token/s"
        times = f"prompt of {result.prompt_tokens} in {1e3 * result.prefill_s:.1f} ms"
        times += f", set-up {1e3 * result.setup_s:.1f} ms"
        print(f"{counts}, {times}", file=sys.stderr)
    return Output(result.to_json())


def _prompt(model: Model, text: str | None, ids: str) -> str | list[int]:
    """Return the prompt: the text, the ids, or by default the start token.

    Raises: UsageError if text and ids are both given or the ids are invalid, PromptError if there is no start token.
    """
    from graphwright.models import PromptError
    from graphwright.models.tokenizer import special_ids

    if ids and text is not None:
        raise UsageError("PROMPT and --ids are both given", got=text, fix="give one of them")
    if ids:
        try:
            return [int(word) for word in ids.replace(",", " ").split()]
        except ValueError as error:
            raise UsageError("cannot parse the token ids as whole numbers", where="--ids", got=ids) from error
    if text is not None:
        return sys.stdin.read() if text == "-" else text
    start = special_ids(model.directory, model.config)[0]
    if start is None:
        raise PromptError("no prompt was given, and the model has no start token", fix="give a text, or --ids")
    return [start]
