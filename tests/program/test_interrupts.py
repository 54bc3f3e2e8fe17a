"""Ctrl-C at any line of an edit, an undo or a redo: the program is as before or as after, never in between."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from program_samples import counters, fingerprint, tiny

import graphwright as gw
from graphwright.program import Program
from graphwright.program.editing.interrupts import defer_interrupts
from seeds import deep

PACKAGE = str(Path(gw.__file__).parent)
STRIDE = deep(101, 211)  # lines between two runs; 1 tries every line and takes minutes


@pytest.fixture(autouse=True)
def heard():
    """Processes in the background are started with Ctrl-C ignored; here it is the subject."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted(work: Callable[[], None], at: int) -> bool:
    """Run `work` and send SIGINT at the `at`-th line of the package; False if it has fewer."""
    count, before = 0, sys.gettrace()

    def local(frame, event, arg):
        nonlocal count
        if event == "line":
            count += 1
            if count == at:
                signal.raise_signal(signal.SIGINT)
        return local

    sys.settrace(lambda frame, event, arg: local if frame.f_code.co_filename.startswith(PACKAGE) else None)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def change(p: Program) -> None:
    with p.edit("many") as e:
        e.insert(p.in_edges("r")[0], "tanh", name="t")
        e.cut(p.in_edges("j")[0])
        e.connect("h", "j")
        e.link("x", "j", np.ones((2, 3), "f4"))
        e.set_weight("w", lambda w: w * 2)
        with p.edit("inner"):
            e.rename("h", "hh")
        p.weights["w"].own().to_numpy()[...] = 9
        e.rewire(p.in_edges("r")[0], "j")
        e.remove("t")


def test_an_interrupted_edit_is_atomic():
    before, counts = fingerprint(tiny()), counters(tiny())
    p = tiny()
    change(p)
    after, done, at = fingerprint(p), 0, 0
    for at in range(1, 10**6, STRIDE):
        p = tiny()
        if not interrupted(lambda p=p: change(p), at):
            break
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if counters(p) == counts:
            assert fingerprint(p) == before
        else:
            assert fingerprint(p) == after
            p.undo()
            done += 1
        change(p)  # nothing is locked, nothing is open
        p.undo()
        assert fingerprint(p) == before
    assert at > 5000
    assert 0 < done < at // STRIDE


def test_an_interrupted_undo_is_atomic():
    def made() -> Program:
        p = tiny()
        for _ in range(3):
            change(p)
            with p.edit("names") as e:
                e.rename("hh", "h")
        return p

    p = made()
    end, start = fingerprint(p), fingerprint(tiny())
    for verb, here, there in (("undo", end, start), ("redo", start, end)):
        for at in range(1, 10**6, deep(20, 10) * STRIDE):
            p = made()
            if verb == "redo":
                p.undo(6)
            if not interrupted(lambda p=p, verb=verb: getattr(p, verb)(6), at):
                break
            assert fingerprint(p) in (here, there)


def test_deferred_interrupts_are_raised_at_the_end_of_the_block():
    seen = []

    def work() -> None:
        with defer_interrupts(), defer_interrupts():
            signal.raise_signal(signal.SIGINT)
            seen.append("to its end")

    with pytest.raises(KeyboardInterrupt):
        work()
    assert seen == ["to its end"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    thread = threading.Thread(target=lambda: seen.append(defer_interrupts().__enter__()))
    thread.start()
    thread.join()
    assert seen == ["to its end", None]
