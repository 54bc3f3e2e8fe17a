"""Healing: the divergence from the teacher falls on held-out windows, in one entry that undo takes back."""

from __future__ import annotations

import pytest
from networks import interrupting
from prune_models import convolutional, images

import graphwright as gw
from fixtures import tiny_llama
from graphwright import surgery as sg
from graphwright.errors import UsageError

LEARNED, HELD = tiny_llama.batch(31, 96)[0], tiny_llama.batch(32, 16)[0]


def test_healing_brings_a_pruned_model_closer_to_its_teacher():
    p = gw.open(tiny_llama.directory("f32")).program
    teacher = p.fork()
    cal = sg.Calibration(LEARNED, 4096, held_out=HELD)
    sg.prune(p, sg.Ratio(0.5), cal, method="magnitude", restore=False, timed=False, min_keep=0.05)
    pruned = p.hash()
    found = sg.heal(p, teacher, cal, 20, batch=16)
    assert found.after < 0.9 * found.before
    assert len(found.losses) == 20
    assert p.journal[-1].why == "heal in 20 steps"
    assert teacher.hash() != p.hash() != pruned
    p.undo()
    assert p.hash() == pruned


def test_a_failed_healing_leaves_the_weights():
    p = gw.open(tiny_llama.directory("f32")).program
    cal = sg.Calibration(LEARNED, 512, held_out=HELD)
    before = p.hash()

    with pytest.raises(KeyboardInterrupt):
        sg.heal(p, p.fork(), cal, 5, progress=interrupting(2))
    assert p.hash() == before
    with pytest.raises(UsageError):
        sg.heal(p, p.fork(), cal, 0)
    with pytest.raises(sg.MissingCalibration):
        sg.heal(convolutional(), convolutional(), sg.Calibration(images(8)), 1)
