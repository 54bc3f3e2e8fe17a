"""Each entry of torch's OpInfo database that has a counterpart here: values, dtypes, gradients, and error inputs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from opinfo import COUNTS, KNOWN, compare, counterpart, difference, entries, entry_name, plain

import graphwright as gw
from seeds import deep

pytestmark = [
    pytest.mark.filterwarnings("ignore"),  # torch's, of its own samples
    pytest.mark.skipif(not entries(), reason="not run: needs the package expecttest"),
]
FEW = deep(0, 3)
"""Samples per entry and dtype; 0 for all."""
FOUND = [op for op in entries() if counterpart(op) is not None]
GROUPS = {entry_name(FOUND[at]): FOUND[at : at + 20] for at in range(0, len(FOUND), 20)}
"""First entry -> 20 entries: each test has its own costs."""


@pytest.mark.parametrize("first", GROUPS)
def test_samples_and_error_inputs_are_as_in_torch(first: str) -> None:
    unexplained = []
    for op in GROUPS[first]:
        function = counterpart(op)
        assert function is not None
        report = compare(op, function, FEW or None)
        for outcome, notes in report.notes.items():
            if (op.name, outcome) not in KNOWN:
                unexplained.append(f"{report.name}: {outcome}, {len(notes)} times: {notes[0]}")
    assert not unexplained, "\n".join(unexplained)


def test_known_differences_name_entries_of_the_database() -> None:
    found = {op.name for op in FOUND}
    assert {name for name, _ in KNOWN} <= found


@pytest.mark.deep
def test_the_counts_on_the_page_are_those_of_all_samples() -> None:
    script = Path(__file__).parents[2] / "scripts" / "opinfo_counts.py"
    done = subprocess.run([sys.executable, str(script), "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_counts_have_no_wrong_values() -> None:
    counts = dict(line.split(": ") for line in COUNTS.read_text("utf-8").splitlines())
    assert {k: v for k, v in counts.items() if "wrong" in k or "crash" in k} == {}


def test_differences_are_found() -> None:
    x = torch.tensor([1.0, 2.0])
    same = plain(x), plain(gw.tensor([1.0, 2.0]))
    assert difference(*same) == ""
    assert "values" in difference(plain(x), plain(gw.tensor([1.0, 2.1])))
    assert "dtype" in difference(plain(x), plain(gw.tensor([1, 2])))
    assert "shape" in difference(plain(x), plain(gw.tensor([[1.0, 2.0]])))
    assert "parts" in difference(plain((x, x)), [same[1]])


def test_the_gradient_of_ctc_loss_is_that_of_torch_through_a_softmax() -> None:
    scores = torch.randn(9, 3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    mine = gw.tensor(scores.detach().numpy(), requires_grad=True)
    targets, times, sizes = [[1, 2, 2], [3, 1, 0], [4, 4, 4]], [9, 7, 8], [3, 2, 3]
    ours = gw.nn.functional.ctc_loss(mine.log_softmax(-1), gw.tensor(targets), gw.tensor(times), gw.tensor(sizes))
    theirs = torch.nn.functional.ctc_loss(
        scores.log_softmax(-1), torch.tensor(targets), torch.tensor(times), torch.tensor(sizes)
    )
    ours.backward()
    theirs.backward()
    assert difference(plain(theirs), plain(ours)) == ""
    assert difference(plain(scores.grad), plain(mine.grad)) == ""
