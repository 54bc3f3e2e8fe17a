"""Threads beside each other: each result is that of one version, without errors."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from program_samples import tiny

import graphwright as gw
from graphwright.graph import EditBusy
from graphwright.program import NotUndoable
from graphwright.program.exclusive import exclusive

IDS = np.array([[84, 104, 101, 32, 102]])
CUT = "layers.1.mlp.down -> layers.1.out"


def together(*jobs: Callable[[], object]) -> None:
    """Run each job in its own thread until all have ended; raise the first error."""
    errors: list[BaseException] = []

    def guarded(job: Callable[[], object]) -> None:
        try:
            job()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def times(n: int, job: Callable[[], object]) -> Callable[[], object]:
    return lambda: [job() for _ in range(n)] and None


def test_threads_read_logits_beside_each_other() -> None:
    model = gw.open("bundled")
    ids = [np.arange(k)[None] for k in range(2, 8)]
    want = [model.logits(x) for x in ids]

    def read() -> None:
        for x, logits in zip(ids, want, strict=True):
            assert np.array_equal(model.logits(x), logits)

    together(*[times(20, read)] * 3)


def test_readers_beside_an_editor_see_whole_versions() -> None:
    model = gw.open("bundled")
    p = model.program
    before = model.logits(IDS), model.generate([84, 104], 3).ids, p.hash()
    with p.edit("cut and zero") as e:
        e.cut(CUT)
        e.set_weight("model.norm.weight", lambda w: 0.5 * w)
    after = model.logits(IDS), model.generate([84, 104], 3).ids, p.hash()
    p.undo()

    def edit() -> None:
        with p.edit("cut and zero") as e:
            e.cut(CUT)
            e.set_weight("model.norm.weight", lambda w: 0.5 * w)
            model.logits(IDS)  # the thread of the edit reads its open edit
        p.undo()

    def read() -> None:
        logits, ids, digest = model.logits(IDS), model.generate([84, 104], 3).ids, p.hash()
        assert any(np.array_equal(logits, known[0]) for known in (before, after))
        assert ids in (before[1], after[1])
        assert digest in (before[2], after[2])
        model.logits(IDS, np.ones_like(IDS, bool))
        model.inspect()
        p.fork()
        p.axes()
        p.run(ids=IDS, positions=np.arange(5)[None])

    together(times(12, edit), times(8, read), times(8, read))
    assert p.valid
    assert p.hash() == before[2]


def test_a_plan_runs_in_one_thread_after_the_other() -> None:
    p = tiny()
    feeds = {name: np.ones(p.spec(p.node(name)).bind({str(d): 2 for d in p.spec(p.node(name)).shape}).sizes, np.float32)
             for name in p.input_names()}  # fmt: skip
    plan = p.compile({name: a.shape for name, a in feeds.items()})
    want = {name: a.tobytes() for name, a in plan(feeds).items()}

    def call() -> None:
        assert {name: a.tobytes() for name, a in plan(feeds).items()} == want

    together(*[times(500, call)] * 3)


def test_a_reader_gives_up_on_an_edit_that_stays_open() -> None:
    p = gw.open("bundled").program
    p.graph.timeout = 0.05
    with p.edit("open"), pytest.raises(EditBusy):
        together(p.hash)
    with exclusive(p):  # a run is waited for, however long it takes
        waiting = threading.Thread(target=p.hash)
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
    waiting.join(5)
    assert not waiting.is_alive()


@pytest.mark.parametrize("back", [True, False])
def test_of_two_threads_that_undo_one_edit_one_finds_nothing_to_undo(back: bool) -> None:
    p = tiny()
    with p.edit("halve") as e:
        e.set_weight("w", lambda w: w / 2)
    if not back:
        p.undo()
    walk, refused, second = p.undo if back else p.redo, [], threading.Event()

    def other() -> None:
        second.set()
        with pytest.raises(NotUndoable, match=r"nothing to (undo|redo)") as caught:
            walk()
        refused.append(caught.value)

    thread = threading.Thread(target=other)
    with exclusive(p):
        thread.start()
        second.wait()
        thread.join(0.1)  # it waits for the program
        walk()
    thread.join()
    assert len(refused) == 1
    assert p.journal[-1].edits
    p.journal.verify()
