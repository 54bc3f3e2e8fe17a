"""Arguments are checked against annotations, and public functions raise typed errors for arguments of another type."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence  # noqa: F401
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import pytest

import graphwright as gw
from graphwright.arguments import checked, evaluated, matches, words
from graphwright.errors import GraphwrightError, UsageError
from graphwright.models import Sampling, SamplingRequest
from graphwright.settings import AtLeastOne, Share  # noqa: F401
from seeds import DEEP

if TYPE_CHECKING:
    from graphwright.program import Program  # noqa: F401  # in texts of annotations, as below
    from graphwright.program.op_graph import Ref  # noqa: F401  # a union, not a class

WRONG: list[Any] = [
    None, [], {}, "", "x", b"x", 1.5, float("nan"), -1, 2**63, True, object(), Path("nope"), np.array(3), np.array(1.5),
    ["a", "b"], "\0", "\ud800", {"a": 1}, (), [None], [[1], [1, 2]], np.ones((2, 2), "f4"),
]  # fmt: skip
Texts = Sequence[str] | None
HINTS = {
    "int": ([3, np.int64(3)], [True, 3.0, "3", None, np.array(3)]),
    "float": ([3, 1.5, np.float32(2)], [True, "3", None, [1.0]]),
    "bool": ([True, np.bool_(False)], [0, 1, None, "no"]),
    "str | None": (["x", None], [b"x", 3, ["x"]]),
    "Texts": ([None, ["a"], (), ("a", "b")], ["ab", b"ab", [3], {"a": 1}, np.array("a")]),
    "Sequence[Any]": ([np.ones(3), [None]], [np.array(3), "ab", 3]),
    "Iterable[str]": ([{"a"}, (c for c in "ab")], ["ab", 3]),
    "Mapping[str, float]": ([{}, {"a": 1}], [{"a": "b"}, {3: 1}, [], "a"]),
    "tuple[float, float]": ([(1, 2.0), [1, 2]], [(1,), (1, "x"), 3]),
    "tuple[int, ...]": ([(), (1, 2)], [("x",), 3]),
    "Literal['a', 1]": (["a", 1], [True, "b", ["a"], np.ones(2)]),
    "AtLeastOne": ([1], [0, 1.0, True, "x", 2**2000]),
    "Share | None": ([0, 0.5, None], [2, float("nan"), "x"]),
    "Callable[[int], int]": ([len, int], [3, "len"]),
    "Program": ([gw.Program()], [3, "x", gw.Program]),
    "Ref": (["x"], [object()]),
    "an invalid annotation": ([3, "x"], []),
}


@pytest.mark.parametrize("text", HINTS)
def test_values_match_their_annotation(text: str) -> None:
    hint = evaluated(text, globals())
    right, wrong = HINTS[text]
    assert [v for v in right if not matches(v, hint)] == []
    assert [v for v in wrong if matches(v, hint)] == []
    assert words(hint)


def test_the_first_wrong_argument_is_named_before_the_function_runs() -> None:
    ran = []

    @checked
    def function(a: int, b: Literal["x", "y"] = "x", *rest: int, c: AtLeastOne = 1, **more: int) -> None:
        ran.append(a)

    function(1, "y", 3, "any", c=2, d="any")  # pyright: ignore[reportArgumentType]
    cases: list[tuple[tuple[Any, ...], dict[str, Any], str, str, str]] = [
        (("1",), {}, "a", "a whole number", "'1'"),
        ((1, "z"), {}, "b", "x, y", "'z'"),
        ((1,), {"b": ["x"]}, "b", "x, y", "list ['x']"),
        ((1,), {"c": 0}, "c", "a whole number >= 1", "0"),
    ]
    for args, named, where, expected, got in cases:
        with pytest.raises(UsageError) as caught:
            function(*args, **named)
        assert (caught.value.where, caught.value.expected, caught.value.got) == (where, expected, got)
    assert ran == [1]
    with pytest.raises(TypeError, match="missing"):
        function()  # pyright: ignore[reportCallIssue]


def test_of_a_class_constructor_and_public_methods_are_checked() -> None:
    @checked
    class Counter:
        def __init__(self, start: int) -> None:
            self.count = start

        def add(self, n: int) -> Counter:
            self.count += n
            return self

        def _private(self, n: int) -> object:
            return n

    assert Counter(1).add(2).count == 3
    assert Counter(1)._private("x") == "x"  # pyright: ignore[reportArgumentType]
    for call in (lambda: Counter("x"), lambda: Counter(1).add(1.5)):  # pyright: ignore[reportArgumentType]
        with pytest.raises(UsageError, match="a whole number"):
            call()


def fuzz(make: Callable[[], tuple[Callable[..., Any], dict[str, Any]]], *without: str) -> list[str]:
    """Call a function with each wrong value for each of its parameters; return the errors that are not typed."""
    function, given = make()
    usual = [
        p for p in inspect.signature(function).parameters.values() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    ]
    found = []
    for i, name in enumerate(p.name for p in usual if p.name not in without):
        for wrong in WRONG if DEEP else WRONG[i % 2 :: 2]:
            function, given = make()
            try:
                made = function(**{**given, name: wrong})
                if inspect.isgenerator(made):
                    list(made)
            except GraphwrightError:
                pass
            except Exception as error:
                found.append(f"{name}={wrong!r:.60}: {type(error).__name__}: {error!s:.80}")
    return found


MODEL = gw.open("bundled")


def method(name: str, **given: Any) -> Any:
    """Return a maker of a method of the shared model: a refused call must leave the model usable for the next one."""
    return lambda: (getattr(MODEL, name), given)


def of_cache(kind: str, name: str, **given: Any) -> Any:
    def make() -> tuple[Callable[..., Any], dict[str, Any]]:
        cache: Any = MODEL.new_cache(16, kind="static") if kind == "static" else MODEL.new_cache(64).sequence()
        cache.prefill(np.array([[1, 2, 3]]))
        return getattr(cache, name), given

    return make


def on_program(name: str, **given: Any) -> Any:
    def make() -> tuple[Callable[..., Any], dict[str, Any]]:
        b = gw.Builder("network")
        b.output(b.linear(b.input("x", (2, 8)), b.param("w", np.eye(8, dtype="f4")), name="fc"), "y")
        return getattr(gw.surgery, name), {"program": b.build(), **given}

    return make


REQUESTS = (SamplingRequest(),)
CALLS = {
    "generate": (method("generate", prompt="a", max_new_tokens=1), ()),
    "generate_many": (method("generate_many", prompt="a", n=1, max_new_tokens=1), ("n",)),
    "logits": (method("logits", ids="a"), ()),
    "run": (method("run", ids="a"), ()),
    "perplexity": (method("perplexity", text="some text", window=8, stride=4), ()),
    "edit": (lambda: (gw.open("bundled").edit, {"why": "x"}), ()),
    "new_cache": (method("new_cache", tokens=16), ()),
    "export_plan": (method("export_plan"), ()),
    "open": (lambda: (gw.open, {"path": "bundled"}), ()),
    "register": (lambda: (gw.models.register, {"arch": None}), ()),
    "train_bpe": (lambda: (gw.models.train_bpe, {"texts": "some text", "vocab_size": 258}), ()),
    "compress": (on_program("compress", where="fc", method="svd"), ()),
    "lora": (on_program("lora", where="fc", rank=2), ()),
    "merge_lora": (on_program("merge_lora"), ()),
    "solve": (on_program("solve"), ()),
    "prune": (on_program("prune", target=0.9, dry_run=True), ()),
    "replay buffer": (lambda: (gw.data.ReplayBuffer(4).sample, {"count": 1}), ()),
    "inspection": (lambda: (MODEL.inspect().text, {}), ()),
    "sampling": (lambda: (Sampling(top_k=2, temperature=1).sample, {"logits": np.zeros(8, "f4"), "position": 0}), ()),
    "options": (lambda: (gw.models.GenerationOptions, {}), ()),
    "request": (lambda: (SamplingRequest, {}), ()),
    **{
        f"{kind} {name}": (of_cache(kind, name, **given), ())
        for kind in ("static", "paged")
        for name, given in {
            "step": {"ids": np.array([[5]])}, "advance": {"count": 1, "requests": REQUESTS}, "truncate": {"length": 2},
            "rollback": {"length": 2}, "sampled": {"requests": REQUESTS}, "validity": {}, "restore": {"mark": None},
            "prefill": {"ids": np.array([[5]])},
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_another_type_are_typed_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make, without = CALLS[name]
    assert fuzz(make, *without) == []
