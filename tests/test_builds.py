"""Native code builds itself: in the background, once for all processes, and plans switch over to it."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from threading import Event
from time import monotonic, sleep

import pytest

import graphwright
from graphwright import builds
from graphwright.builds import NativeCodeFailed, NativeCodeNotice, Part
from graphwright.errors import UsageError

SOURCE = """
import os, sys, time
from pathlib import Path
from graphwright.builds import Part
FOLDER = Path(__file__).parent

def compile():
    with open(FOLDER / "log", "a") as log:
        log.write("x")
    time.sleep(float(os.environ.get("SECONDS", "0.1")))
    if os.environ.get("BROKEN"):
        raise ValueError("no compiler")

part = Part("a part", "some_part:part", compile, lambda: FOLDER / "cache" / "part.built")
"""
COLD = """
import json, sys, time
import numpy as np
import graphwright as gw
import graphwright.nn.functional as F
from graphwright import nn, optim
from graphwright.array.vm import machine

net = nn.Sequential(nn.Linear(3, 7), nn.Tanh(), nn.Linear(7, 1))
opt = optim.Adam(net.parameters(), lr=1e-2)
x, y = gw.tensor(np.ones((4, 3), np.float32)), gw.tensor(np.ones((4, 1), np.float32))

@gw.compile
def step(x, y):
    opt.zero_grad()
    loss = F.mse_loss(net(x), y)
    loss.backward()
    opt.step()
    return loss

def kinds():
    return sorted({s.kind for s in step._latest.executable.plan.segments})

began = time.perf_counter()
losses = [step(x, y).item()]
first, at_first, worst = time.perf_counter() - began, kinds(), 0.0
while time.perf_counter() - began < 100 and kinds() != ["vm"]:
    time.sleep(0.05)
    start = time.perf_counter()
    losses.append(step(x, y).item())
    worst = max(worst, time.perf_counter() - start)
print(json.dumps({"first": first, "worst": worst, "kinds": [at_first, kinds()], "losses": losses}))
"""


@pytest.fixture
def part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Part:
    """A part that takes 0.1 s to build; each build adds a letter to the file `log`."""
    (tmp_path / "some_part.py").write_text(SOURCE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "some_part", raising=False)
    builds._announce.cache_clear()
    import some_part  # pyright: ignore[reportMissingImports]

    return some_part.part


def log(part: Part) -> str:
    path = part.marker.parents[1] / "log"
    return path.read_text() if path.exists() else ""


def test_a_part_is_built_in_the_background_with_one_notice_and_its_followers_are_called(
    part: Part, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready, notices = Event(), []
    monkeypatch.setattr(builds, "notice", notices.append)
    part.start(ready.set)
    part.start(ready.set)
    assert len(notices) == 1
    assert "once for this installation" in notices[0]
    assert not part.ready
    assert "being built" in part.why
    assert part.wait(60)
    assert ready.wait(10)
    assert log(part) == "x"
    part.build()
    assert log(part) == "x"


def test_waiting_is_limited(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECONDS", "3")
    began = monotonic()
    assert not part.wait(0.1)
    assert monotonic() - began < 2


def test_processes_build_a_part_once(part: Part) -> None:
    code = "from some_part import part; import warnings; warnings.simplefilter('ignore'); print(part.wait())"
    command = [sys.executable, "-c", code]
    env = os.environ | {"PYTHONPATH": os.pathsep.join([os.environ["PYTHONPATH"], *sys.path]), "SECONDS": "1"}
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) for _ in range(2)]
    assert [one.communicate()[0].strip() for one in both] == ["True", "True"]
    assert log(part) == "x"


PIECES = """
import os, sys, time
from pathlib import Path
from graphwright.builds import in_processes

def piece(k):
    with open(Path(sys.argv[1]) / str(k), "a") as log:
        print(os.getpid(), file=log)
    time.sleep(0.2)
    if k == 3:
        raise ValueError("a piece that cannot be compiled")
    if k == 4 and os.getpid() != main:
        os._exit(1)

main, os.cpu_count = os.getpid(), lambda: 3
in_processes([lambda k=k: piece(k) for k in range(9)])
print("went on")
"""


def test_each_piece_is_compiled_once_by_one_process_per_core(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PIECES, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert (done.stdout, done.stderr) == ("went on\n", "")
    pids = [(tmp_path / str(k)).read_text().split() for k in range(9)]
    assert [len(by) for by in pids] == [1] * 9
    assert len({by for (by,) in pids}) == 3


def test_a_killed_build_is_begun_again_by_the_next_process(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", builds._CHILD, str(Path(builds.__file__).parents[1]), "some_part:part"]
    child = subprocess.Popen(command, env=os.environ | {"SECONDS": "60"})
    while not log(part):
        sleep(0.05)
    child.kill()
    child.wait()
    assert not part.ready
    assert part.wait(60)
    assert log(part) == "xx"


def test_a_failed_build_warns_once_and_is_not_tried_again(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKEN", "1")
    notices: list[str] = []
    monkeypatch.setattr(builds, "notice", notices.append)
    assert not part.wait()
    assert not part.wait()
    assert log(part) == "x"
    assert sum("could not be built" in text and "no compiler" in text for text in notices) == 1
    with pytest.raises(NativeCodeFailed, match="no compiler"):
        part.require()


def test_native_code_can_be_switched_off(part: Part, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHWRIGHT_NATIVE", "0")
    assert not part.wait()
    assert log(part) == ""
    with pytest.raises(UsageError, match="switched off"):
        part.require()


def test_a_notice_is_a_warning_unless_the_log_is_shown(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        builds.notice("shown by the log")
        assert not seen
        with monkeypatch.context() as patch:
            patch.setattr(logging.getLogger("graphwright"), "propagate", False)
            builds.notice("shown as a warning")
        assert [one.category for one in seen] == [NativeCodeNotice]
        warnings.simplefilter("error")
        builds.notice("no error")
    assert "shown by the log" in caplog.text


@pytest.mark.deep
def test_a_first_run_blocks_for_less_than_three_seconds_and_reaches_the_vm(tmp_path: Path) -> None:
    """An installation without compiled code: a copy of the sources, an empty cache and home."""
    shutil.copytree(Path(graphwright.__file__).parent, tmp_path / "graphwright",
                    ignore=shutil.ignore_patterns("__pycache__"))  # fmt: skip
    hidden = {"PYTHONPATH": str(tmp_path), "HOME": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    command = [sys.executable, "-c", COLD]
    both = [
        subprocess.Popen(command, env=os.environ | hidden, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        out, err = process.communicate()
        found = json.loads(out)
        assert max(found["first"], found["worst"]) < 3
        assert found["kinds"] == [["aten"], ["vm"]]
        assert found["losses"][-1] < found["losses"][0]
        assert err.count("NativeCodeNotice: building native code") == 1
    assert len(list((tmp_path / "numba").rglob("machine-*.built"))) == 1
    assert len(list((tmp_path / "numba").rglob("machine*.1.nbc"))) == 1
