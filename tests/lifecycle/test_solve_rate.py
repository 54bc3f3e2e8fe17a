"""Exact match and the vote over symmetries, beside counts of a few grids and a model that answers from a table."""

from __future__ import annotations

import json

import numpy as np
import pytest
from small import follows, transformer

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright.data import GridTask, ListedTasks, grids
from graphwright.data.grid_tasks import ANSWER, END, ROW, inverse, transformed
from graphwright.errors import UsageError
from graphwright.models import PromptError
from graphwright.models.generation.batched import GreedyBatch

A, B, C = (np.array(g) for g in ([[1, 2]], [[1], [2]], [[3]]))


@pytest.mark.parametrize(
    ("ballots", "tries", "winners"),
    [
        ([A, B, B, None, A, B], 2, [B, A]),
        ([A, B, C], 2, [A, B]),  # the earlier one of equal counts
        ([C, A, A], 1, [A]),
        ([None, None], 2, []),
        ([A, A], 3, [A]),
        ([], 2, []),
    ],
)
def test_the_grids_with_most_votes_win(ballots: list, tries: int, winners: list) -> None:
    found = lf.vote(ballots, tries)
    assert [g.tolist() for g in found] == [g.tolist() for g in winners]


def asked(grid: list[list[int]], name: str, question: object = ((5,),)) -> GridTask:
    return GridTask((), np.array(question), np.array(grid), name)


MODEL = follows({ANSWER: 1, 1: ROW, ROW: END})
"""Its answer is always [[1]]."""


def test_a_task_is_solved_if_all_its_questions_are() -> None:
    tasks = [asked([[1]], "a"), asked([[2]], "b"), asked([[1]], "b"), asked([[1, 1]], "c"), asked([[1]], "d")]
    for voting in (False, True):
        found = lf.exact_match(MODEL, tasks, voting=voting)
        assert (found.tasks, found.solved, found.questions, found.correct) == (4, 2, 5, 3)
        assert found.names == ("a", "d")
        assert (found.rate, found.unreadable, found.tries) == (0.5, 0.0, 2 if voting else 1)
        assert [[g.tolist() for g in tries] for tries in found.answers] == [[[[1]]]] * 5
        facts = json.loads(json.dumps(found.to_json()))
        assert (facts["rate"], facts["solved"], facts["voting"]) == (0.5, 2, voting)
        assert "2 of 4 tasks, 50.0%" in str(found)
        assert "3 of 5" in str(found)
    assert lf.exact_match(MODEL, ListedTasks(tasks), count=1).tasks == 1


def test_answers_that_are_not_a_grid_have_no_vote() -> None:
    found = lf.exact_match(follows({ANSWER: END}), [asked([[1]], "a")])
    assert (found.solved, found.unreadable, found.answers[0]) == (0, 1.0, ())
    assert lf.exact_match(MODEL, [asked([[1]], "a")], max_new_tokens=2).unreadable == 1.0
    endless = lf.exact_match(follows({ANSWER: 1, 1: ROW, ROW: 1}), [asked([[1]], "a")])
    assert endless.unreadable == 1.0


def test_the_tries_are_the_vote_over_separate_answers_in_each_view() -> None:
    model = transformer(seed=5)
    opt = lf.OnPolicy(model, gw.optim.AdamW(model, 1e-2), 0.0)
    source = grids("flip", side=2, colours=3, pairs=0)
    for i in range(0, 640, 16):
        opt.step(source.batch(np.arange(i, i + 16)))
    tasks = [grids("flip", side=2, colours=3, pairs=0, seed=1)[i] for i in range(12)]
    found = lf.exact_match(model, tasks, batch=5)
    right = 0
    for task, tries in zip(tasks, found.answers, strict=True):
        counts: dict[str, list] = {}
        for view in range(8):
            prompt, answer = task.transformed(view).encode()
            ids = model.generate(prompt, len(answer) + 2).ids
            rows = " ".join(map(str, ids)).removesuffix(f" {END}").split(f" {ROW}")
            cells = [[int(c) for c in row.split()] for row in rows if row.strip()]
            good = ids[-1] == END and ids[-2] == ROW and len({len(r) for r in cells}) == 1
            if good and all(c < 10 for r in cells for c in r):
                grid = transformed(np.array(cells), inverse(view)).tolist()
                counts.setdefault(str(grid), [0, grid])[0] += 1
        expected = [grid for _, grid in sorted(counts.values(), key=lambda pair: -pair[0])][:2]
        assert [g.tolist() for g in tries] == expected
        right += task.answer.tolist() in expected
    assert found.correct == right
    assert right > 0


def test_a_vote_can_solve_what_one_view_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model reads only the last cell of the question, so it is right in the views whose last cell is the answer."""
    model = transformer()
    task = asked([[7]], "corner", [[7, 0], [0, 0]])
    seen: list[int] = []

    def corner(self: GreedyBatch, prompts: list[np.ndarray], limits: list[int]) -> list[np.ndarray]:
        seen[:] = [int(ids[-3]) for ids in prompts]
        return [np.array([cell, ROW, END]) for cell in seen]

    monkeypatch.setattr(GreedyBatch, "__call__", corner)
    assert lf.exact_match(model, [task], voting=False).solved == 0
    found = lf.exact_match(model, [task])
    assert sorted(seen) == [0] * 6 + [7] * 2
    assert [g.tolist() for g in found.answers[0]] == [[[0]], [[7]]]
    assert found.solved == 1


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(UsageError):
        lf.exact_match(MODEL, [])
    with pytest.raises(UsageError):
        lf.exact_match(MODEL, [asked([[1]], "a")], tries=0)
    with pytest.raises(PromptError):
        lf.exact_match(transformer(vocab_size=12, eos_token_id=11), [asked([[1]], "a")])
