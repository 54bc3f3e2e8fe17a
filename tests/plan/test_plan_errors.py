"""Wrong uses of a plan: each error says what, where, expected, got and the way out, as fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import graphwright as gw
from graphwright.array import Spec, UnboundDim, float32, from_numpy
from graphwright.autograd import Variable
from graphwright.errors import UsageError
from graphwright.plan import CaptureExecutable, Executable, ParallelExecutable, Plan
from graphwright.program import Builder, FeedError, Program

FACTS = ("what", "where", "expected", "got", "fix")


def net() -> Program:
    b = Builder("net")
    x = b.input("x", ("B", 4))
    b.output(b.tanh(b.add(x, b.expand(b.const("c", np.ones(1, np.float32)), shape=(4,)))), "y")
    return b.build()


def compiled(**options: Any) -> Callable[[Program], object]:
    return lambda p: p.compile(x=(2, 4), **options)


def planned(use: Callable[[Plan], object], **options: Any) -> Callable[[Program], object]:
    return lambda p: use(p.compile(x=(2, 4), **options))


WRONG: dict[str, Callable[[Program], object]] = {
    "inputs": lambda p: p.compile(z=(2, 4)),
    "feeds": planned(lambda plan: plan(x=np.ones((3, 4), np.float32))),
    "a value of a slot": planned(lambda plan: Executable(plan).set(0, np.ones(3))),
    "executor": compiled(executor="vn"),
    "rewrites": compiled(rewrites="exakt"),
    "layout": compiled(layout=3),
    "the VM on a device": compiled(executor="vm", device="sim"),
    "no outputs": compiled(outputs=[]),
    "names": compiled(outputs="y"),
    "target": lambda p: gw.compile(3),  # pyright: ignore[reportArgumentType, reportCallIssue]  # what is tested
    "bucket": lambda p: gw.compile(p, buckets={"T": [4]}),
    "last use": planned(lambda plan: plan.last_use("x")),  # pyright: ignore[reportArgumentType]  # what is tested
    "free after": planned(lambda plan: plan.free_after(99)),
    "part": planned(lambda plan: plan[0:99]),
    "profile": planned(lambda plan: plan.profile({"x": np.ones((2, 4), np.float32)}, n=0)),
    "no function": planned(lambda plan: plan.override(3)),  # pyright: ignore[reportArgumentType]  # what is tested
    "segment": planned(lambda plan: plan.override(print, 7)),
    "nothing overridden": planned(lambda plan: plan.check_override({})),
    "slot": planned(lambda plan: Executable(plan).value(99)),
    "slot by name": planned(lambda plan: Executable(plan).value("x")),  # pyright: ignore[reportArgumentType]  # as above
    "slot to set": planned(lambda plan: Executable(plan).set(-1, np.ones(4))),
    "nothing has run": planned(lambda plan: plan.executable().value(0)),
    "not watched": planned(lambda plan: Executable(plan).watched("y")),
    "a part of another": lambda p: Executable(p.compile(x=(2, 4))).run(p.compile(x=(3, 4))[0:1]),
    "memory of a device": planned(lambda plan: plan.bind(), device="sim"),
    "threads": planned(lambda plan: ParallelExecutable(plan, threads=0)),
    "threads on a device": planned(ParallelExecutable, device="sim"),
    "capture on the CPU": planned(CaptureExecutable),
}


@pytest.mark.parametrize("name", WRONG)
def test_usage_errors_state_all_facts(name: str) -> None:
    with pytest.raises(UsageError) as caught:
        WRONG[name](net())
    missing = [fact for fact in FACTS if getattr(caught.value, fact) in (None, "")]
    assert not missing, f"{missing} of:\n{caught.value}"


def test_replacing_an_assumed_constant_raises() -> None:
    b = Builder("scaled")
    x, one, two = b.input("x", (3,)), b.const("one", np.float32(1)), b.const("two", np.float32(2))
    b.output(b.mul(b.mul(x, one), two), "y")
    p, feeds = b.build(), {"x": np.arange(3, dtype=np.float32)}
    three, four = ({key: Variable(from_numpy(np.float32(n)), name=key)} for key, n in (("one", 3), ("two", 4)))
    plan = p.compile(x=(3,))
    with pytest.raises(UsageError, match="replaces a constant") as caught:
        Executable(plan, three)
    assert all(getattr(caught.value, fact) for fact in FACTS)
    assert Executable(plan, four).run(feeds)["y"].to_numpy().tolist() == [0, 4, 8]  # looked at, and still read
    assert Executable(plan, p.weights).run(feeds)["y"].to_numpy().tolist() == [0, 2, 4]
    assert Executable(p.compile(x=(3,), rewrites="none"), three).run(feeds)["y"].to_numpy().tolist() == [0, 6, 12]
    one_slot = p.compile(x=(3,), rewrites="none")  # a check of an override copies what it may
    for whole in (plan, one_slot):
        with whole.override(lambda ins, outs: [a.copy_from(from_numpy(feeds["x"] * 2)) for a in outs.values()]):
            whole.check_override(feeds)


def test_invalid_sizes_and_name_lists_are_refused() -> None:
    p = net()
    assert p.compile(x=(np.int64(2), 4)) is p.compile(x=(2, 4))
    with pytest.raises(FeedError, match=r"x: expected f32\[B, 4\], got f32\[-1, 4\]"):
        p.compile(x=(-1, 4))
    for size in (("B", 4), Spec(("B", 4), float32)):
        with pytest.raises(UnboundDim, match="x: an input has a dimension without a value"):
            p.compile(x=size)
    for option in ("outputs", "watch", "patch"):
        with pytest.raises(UsageError, match=f"{option} is one string instead of a list"):
            p.compile(x=(2, 4), **{option: "y"})  # pyright: ignore[reportArgumentType]  # what is tested
    with pytest.raises(UsageError, match="a Program or a function"):
        gw.compile(3)  # pyright: ignore[reportArgumentType, reportCallIssue]  # that is what is tested
