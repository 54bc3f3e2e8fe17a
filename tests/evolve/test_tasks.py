"""Tasks: splits, environments against scalar physics, IDX files, CSV files, what bad input gets."""

from __future__ import annotations

import gzip
import struct
import sys
import types
from typing import Any

import numpy as np
import pytest

from graphwright import evolve as ev
from graphwright.errors import MissingExtra
from graphwright.evolve import tasks
from graphwright.evolve.errors import TaskError
from graphwright.files import UnreadableFile


def gymnasium_step(state, action):
    """CartPole-v1's `step` as gymnasium 1.0 writes it, for one episode."""
    x, x_dot, theta, theta_dot = state
    force = 10.0 if action == 1 else -10.0
    costheta, sintheta = np.cos(theta), np.sin(theta)
    temp = (force + 0.05 * np.square(theta_dot) * sintheta) / 1.1
    thetaacc = (9.8 * sintheta - costheta * temp) / (0.5 * (4.0 / 3.0 - 0.1 * np.square(costheta) / 1.1))
    xacc = temp - 0.05 * thetaacc * costheta / 1.1
    x, x_dot = x + 0.02 * x_dot, x_dot + 0.02 * xacc
    theta, theta_dot = theta + 0.02 * theta_dot, theta_dot + 0.02 * thetaacc
    over = bool(x < -2.4 or x > 2.4 or theta < -12 * 2 * np.pi / 360 or theta > 12 * 2 * np.pi / 360)
    return np.array([x, x_dot, theta, theta_dot]), over


def test_cartpole_matches_a_scalar_implementation():
    rng = np.random.default_rng(0)
    env = tasks.CartPole()
    state = env.reset(rng, (3, 4)).copy()
    assert np.abs(state).max() <= 0.05
    steps = 0
    for _ in range(300):
        action = rng.random((3, 4, 1))
        seen, reward, fell = env.step(action)
        for i in np.ndindex(3, 4):
            state[i], over = gymnasium_step(state[i], int(action[i][0] > 0.5))
            assert over == fell[i]
            steps += 1
        np.testing.assert_allclose(seen, state, rtol=0, atol=1e-12)
        assert (reward == 1).all()
        env.state[fell] = state[fell] = rng.uniform(-0.05, 0.05, (int(fell.sum()), 4))
    assert steps == 3600


def test_cartpole_matches_gymnasium():
    gymnasium = pytest.importorskip("gymnasium")
    theirs, rng = [gymnasium.make("CartPole-v1") for _ in range(20)], np.random.default_rng(1)
    ours, age, cuts, falls = tasks.CartPole(), np.zeros(20, int), 0, 0
    ours.reset(rng, (20,))
    for k, env in enumerate(theirs):
        env.reset(seed=k)
        ours.state[k] = env.unwrapped.state
    for _ in range(520):
        # some pushes go where the pole leans, so that episodes last; the last ten are drawn
        lean = ours.state[:, 2] + ours.state[:, 3] > 0
        right = np.where((np.arange(20) < 10) | (rng.random(20) < 0.3), lean, rng.random(20) < 0.5)
        made = [env.step(int(r)) for env, r in zip(theirs, right, strict=True)]
        seen, reward, fell = ours.step(right[:, None].astype(float))
        age += 1
        np.testing.assert_allclose(seen, [env.unwrapped.state for env in theirs], rtol=0, atol=1e-12)
        assert [step[1:4] for step in made] == list(zip(reward, fell, age >= ours.limit, strict=True))
        for k in np.flatnonzero(fell | (age >= ours.limit)).tolist():
            theirs[k].reset()
            ours.state[k], age[k] = theirs[k].unwrapped.state, 0
        cuts, falls = cuts + int((age == 0).sum() - fell.sum()), falls + int(fell.sum())
    assert cuts > 0
    assert falls > 20


def double_pole_derivative(s, force, friction):
    """The equations of Gomez and Miikkulainen, one pole at a time."""
    force -= friction * np.sign(s[1])
    total_f, total_m, parts = 0.0, 0.0, []
    for i, (m, half) in enumerate(((0.1, 0.5), (0.01, 0.05))):
        a, w = s[2 + 2 * i], s[3 + 2 * i]
        hinge = 2e-6 * w / (m * half)
        total_f += m * half * w**2 * np.sin(a) + 0.75 * m * np.cos(a) * (hinge - 9.8 * np.sin(a))
        total_m += m * (1 - 0.75 * np.cos(a) ** 2)
        parts.append((a, w, hinge, half))
    push = (force + total_f) / (1.0 + total_m)
    out = [s[1], push]
    for a, w, hinge, half in parts:
        out += [w, -0.75 * (push * np.cos(a) - 9.8 * np.sin(a) + hinge) / half]
    return np.array(out)


def double_pole_action(s, force, friction):
    """Two steps of Runge-Kutta."""
    for _ in range(2):
        k1 = double_pole_derivative(s, force, friction)
        k2 = double_pole_derivative(s + 0.005 * k1, force, friction)
        k3 = double_pole_derivative(s + 0.005 * k2, force, friction)
        k4 = double_pole_derivative(s + 0.01 * k3, force, friction)
        s = s + 0.01 / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
    return s


@pytest.mark.parametrize("friction", [0.0, 5e-4])
def test_double_pole_follows_its_equations(friction):
    env = tasks.DoublePole(friction=friction)
    rng = np.random.default_rng(0)
    env.reset(rng, (5,))
    env.state += rng.normal(size=env.state.shape) * 0.05
    for _ in range(20):
        before, action = env.state.copy(), rng.random((5, 1))
        fell = env.step(action)[2]
        for k in range(5):
            s = double_pole_action(before[k], 20 * (action[k, 0] - 0.5), friction)
            over = abs(s[0]) > 2.4 or max(abs(s[2]), abs(s[4])) > np.radians(36)
            assert over == fell[k]
            if not over:
                np.testing.assert_allclose(env.state[k], s, rtol=0, atol=1e-12)
        env.state[fell] = 0.0
        env.state[fell, 2] = 0.07


def test_double_pole_fitness_counts_steps_until_a_fall():
    run = ev.Evolution(tasks.double_pole(), None, ev.NEAT(population=12), seed=0)
    run.run(2, target=2000.0)
    seen = set()
    for g in range(0, 12, 3):
        one = run.individual(ev.IndividualKey(run.generation, g))
        s, steps, fell = np.array([0, 0, 0.07, 0, 0, 0]), 0, False
        while not fell and steps < 60:
            answer = one.predict((s / [4.8, 2, 0.52, 2, 0.52, 2])[None].astype("f4"))[0, 0]
            s = double_pole_action(s, 20 * (float(answer) - 0.5), 0.0)
            steps, fell = steps + 1, abs(s[0]) > 2.4 or max(abs(s[2]), abs(s[4])) > np.radians(36)
        assert one.fitness == steps if fell else one.fitness >= steps
        seen.add(one.fitness)
    assert len(seen) > 1


def test_neat_balances_the_pole():
    solved = []
    for seed in range(3):
        result = ev.Evolution(tasks.cartpole(), None, seed=seed).run(30)
        solved.append(result.solved)
        counters = result.evolution.counters
        assert 0.1 * counters.seconds < counters.environment < counters.seconds  # told apart from ours
        assert result.to_json()["environment_seconds"] == counters.environment
        assert result.test() >= 475
        assert result.best.rescore() == result.best.fitness
    assert all(solved)


def test_hybrid_solves_parity_by_delay_links():
    task = tasks.parity(5)
    settings = ev.Hybrid(delays=0.5, train=ev.Train(steps=100))
    result = ev.Evolution(task, None, settings, seed=1).run(30)
    assert result.solved
    assert result.test() >= 0.95
    assert any(e.delay for e in result.best.genome.links)


def test_iris_and_two_moons_are_solved():
    for task in (tasks.two_moons(), tasks.blobs()):
        result = ev.Evolution(task, None, ev.Hybrid(train=ev.Train(steps=100)), seed=0).run(15)
        assert result.test() >= 0.9


def test_the_split_is_stratified_and_disjoint():
    x = np.arange(200.0)[:, None]
    task = ev.Task(x, np.arange(200) % 4 == 0)
    parts = [set(p.x[:, 0, 0].tolist()) for p in (task.train, task.valid, task._test)]
    assert [len(p) for p in parts] == [120, 40, 40]
    assert set.union(*parts) == set(x[:, 0].tolist())
    assert all(p.y.mean() == 0.25 for p in (task.train, task.valid, task._test))
    assert ev.Task(x, np.arange(200) % 4 == 0, seed=1).hash() != task.hash()


def test_steps_after_the_end_of_a_sequence_are_not_scored():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(30, 6, 1)).astype(np.float32)
    lengths = rng.integers(1, 7, 30)
    other = x.copy()
    other[np.arange(6) >= lengths[:, None]] = 99.0
    y = (x > 0).astype(int)
    runs = []
    for data in (x, other):
        task = ev.Task(data, y, lengths=lengths, split="same", name="padded")
        run = ev.Evolution(task, None, ev.Hybrid(population=6, delays=0.5), seed=0)
        run.run(4, target=2.0)
        runs.append(run)
    assert (runs[0].fitness == runs[1].fitness).all()
    assert runs[0].genes.weight.tobytes() == runs[1].genes.weight.tobytes()


@pytest.mark.parametrize(
    ("inputs", "targets", "loss", "what"),
    [
        ([[1.0, 2.0], [3.0]], [0, 1], "bce", "arrays"),
        (np.zeros((0, 2)), [], "bce", "wrong shape or are empty"),
        (np.zeros((4, 2)), [0, 1], "bce", "different numbers of cases"),
        (np.zeros((4, 2)), 3, "bce", "different numbers of cases"),
        (np.full((4, 2), np.nan), [0, 1, 0, 1], "bce", "finite"),
        (np.zeros((4, 2)), ["a", "b", "a", "b"], "bce", "numbers"),
        (np.zeros((4, 2)), [0.5, 1, 2, 0], "cross_entropy", "are not classes 0, 1"),
        (np.zeros((4, 2)), [0, 1, 0, 1], "hinge", "unknown loss"),
        (np.zeros((2, 2)), [0, 1], "bce", "part of the split is empty"),
        (np.zeros((4, 2)), [0, 1, 2, 1], "bce", "not in .0, 1."),
        (np.full((4, 2), 1e300), [0, 1, 0, 1], "bce", "finite"),
    ],
)
def test_invalid_data_are_refused(inputs, targets, loss, what):
    with pytest.raises(TaskError, match=what):
        ev.Task(inputs, targets, loss)


@pytest.mark.parametrize("loss", ["bce", "mse", "cross_entropy"])
def test_constant_targets_are_refused(loss):
    x, same = np.random.default_rng(0).normal(size=(40, 2)), np.ones(40, int)
    with pytest.raises(TaskError, match="the target is the same in all cases"):
        ev.Task(x, same, loss)
    with pytest.raises(TaskError, match="task, head b: the target is the same"):
        ev.Task(x, {"a": ev.Head(np.arange(40) % 2), "b": ev.Head(same, loss)})
    assert ev.Task(x, same, loss, fitness=lambda program: 0.0).outputs  # nothing is compared with it
    steps = np.ones((40, 3, 1))
    steps[:, 0] = 0  # which does not count
    with pytest.raises(TaskError, match="the target is the same"):
        ev.Task(np.repeat(x[:, None], 3, 1), steps, "mse", skip=1)


def test_r2_refuses_constant_targets_in_a_split():
    x = np.random.default_rng(0).normal(size=(40, 2))
    rare = np.arange(40) == 7
    assert ev.Task(x, rare).valid.y.max() == 0  # an accuracy is one of any cases
    with pytest.raises(TaskError, match=r"undefined: all (validation|test) targets(.|\n)*8 of \[0.0\]"):
        ev.Task(x, rare, "mse")
    assert ev.Task(x, np.c_[rare, x[:, 0]], "mse").outputs == 2
    assert ev.Task(x, rare, "mse", split="same").outputs == 1


def test_invalid_splits_are_refused():
    wrong: Any = "all"
    with pytest.raises(TaskError, match=r'"same"'):
        ev.Task(np.zeros((8, 2)), [0, 1] * 4, split=wrong)


def test_mnist_names_missing_files(tmp_path):
    rng = np.random.default_rng(0)
    for part, count in (("train", 60), ("t10k", 20)):
        images, labels = rng.integers(0, 256, (count, 4, 4)), np.arange(count) % 3
        (tmp_path / f"{part}-images-idx3-ubyte").write_bytes(
            b"\0\0\x08\x03" + struct.pack(">3I", count, 4, 4) + images.astype("u1").tobytes()
        )
        (tmp_path / f"{part}-labels-idx1-ubyte.gz").write_bytes(
            gzip.compress(b"\0\0\x08\x01" + struct.pack(">I", count) + labels.astype("u1").tobytes())
        )
    task = tasks.mnist(tmp_path)
    assert (len(task.train.x), len(task.valid.x), len(task._test.x)) == (50, 10, 20)
    assert task.inputs == 16
    assert task.outputs == 3
    (tmp_path / "train-images-idx3-ubyte").unlink()
    with pytest.raises(TaskError, match="missing"):
        tasks.mnist(tmp_path)


def test_a_csv_file_is_read_as_a_task(tmp_path):
    path = tmp_path / "flowers.csv"
    rows = [f"{i},{i % 5 + 0.5},{'ab'[i % 2]}" for i in range(40)]
    path.write_text("\n".join(["long,wide,kind", *rows]) + "\n")
    task = tasks.csv(path, "kind")
    assert task.names == ("long", "wide")
    assert task.loss == "bce"
    assert task.outputs == 1
    np.testing.assert_allclose(task.train.x.mean((0, 1)), 0, atol=1e-6)  # by the training cases, and by them alone
    assert abs(task._test.x[..., 0].mean()) > 1e-3
    raw = task._test.x[:, 0] * task.scale[1] + task.scale[0]
    assert {round(float(v), 3) for v in raw[:, 0]} <= set(range(40))


def test_csv_files_with_words_other_separators_and_a_byte_order_mark_are_read(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes("\ufeffy ; colour;size\n".encode() + b"\n".join(b"%d;%s;%d" % (i % 3, (b"red", b"blue")[i % 2], i)
                                                                     for i in range(60)) + b"\n\n")  # fmt: skip
    task = tasks.csv(path, "y")
    assert task.names == ("colour=blue", "colour=red", "size")
    assert task.loss == "cross_entropy"
    assert task.outputs == 3
    size = task.train.x[:, 0, 2] * task.scale[1, 2] + task.scale[0, 2]
    np.testing.assert_array_equal(task.train.x[:, 0, 1], 1 - np.round(size) % 2)  # red where the number is even
    np.testing.assert_array_equal(task.train.x[:, 0, :2].sum(1), 1)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no rows"),
        ("a,y\n", "no rows"),
        ("a,b\n1,x\n", "no such column"),
        ("y\n1\n2\n", "target is the only column"),
        ("a,y\n1,x\n2\n", ":3: a row does not have as many cells"),
        ("a,y\n1,0\n2,0\nfour,1\n", ":4, column a: a cell is not a number"),
        ("a,y\n1,0\n2,0\n1e39,1\n", ":4, column a: a cell is not a number"),
        ("a,y\n1,0\n,1\n", ":3, column a: a value is missing"),
        ("a,y\n1,0\nNaN,1\n", ":3, column a: a value is missing"),
        ("a,a,y\n1,0,1\n", "column 2: two columns have the same name"),
        ("a,y\n1,0\n2,0\n", "the same in all rows"),
        ("a,y\n" + "\n".join(f"w{i},{i}" for i in range(30)), "too many different words"),
        ("a,y\n1,0\n2,1\n", "part of the split is empty"),
        ("gr\u00f6\u00dfe,y\n1,0\n", "UTF-8"),
    ],
)
def test_invalid_csv_files_are_refused(tmp_path, text, what):
    path = tmp_path / "t.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(TaskError, match=what):
        tasks.csv(path, "y")
    with pytest.raises(UnreadableFile):
        tasks.csv(tmp_path / "none.csv", "y")


def test_missing_gymnasium_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(MissingExtra, match="evolve"):
        tasks.gym("Acrobot-v1")
    assert tasks.cartpole().inputs == 4  # our own physics need none
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    for task in (tasks.iris, tasks.digits):
        with pytest.raises(MissingExtra, match="evolve"):
            task()


def test_unknown_gymnasium_environments_are_named(monkeypatch):
    def make(name):
        raise LookupError("no such environment")

    monkeypatch.setitem(sys.modules, "gymnasium", types.SimpleNamespace(make=make))
    with pytest.raises(TaskError, match=r"Nope-v1(.|\n)*LookupError: no such environment"):
        tasks.gym("Nope-v1")


class FakeEnvironment:
    """CartPole with the part of the interface of gymnasium that `tasks.gym` uses."""

    class spec:
        max_episode_steps, reward_threshold = 60, 50.0

    class observation_space:
        shape = (4,)

    class action_space:
        n = 2

    def reset(self, seed=None):
        self.state, self.steps = np.random.default_rng(seed).uniform(-0.05, 0.05, 4), 0
        return self.state.astype(np.float32), {}

    def step(self, action):
        self.state, over = gymnasium_step(self.state, action)
        self.steps += 1
        return self.state.astype(np.float32), 1.0, over, self.steps >= 60, {}


def test_gymnasium_environments_run_as_tasks(monkeypatch):
    monkeypatch.setitem(sys.modules, "gymnasium", types.SimpleNamespace(make=lambda name: FakeEnvironment()))
    task = tasks.gym("Fake-v0")
    assert (task.inputs, task.outputs, task.target, task.environment.limit) == (4, 1, 50.0, 60)
    result = ev.Evolution(task, None, ev.NEAT(population=20), seed=0).run(20)
    assert result.solved
    assert result.test() >= 50.0


def test_irregular_sine_has_the_documented_inputs_and_targets():
    task = ev.tasks.irregular_sine(50, seed=3)
    x, y = task.train.x, task.train.y
    assert x.shape[1:] == (20, 2)
    assert x[..., 1].min() >= 0.05
    assert x[..., 1].max() <= 1.55
    np.testing.assert_array_equal(x[:, 1:, 0], y[:, :-1, 0])  # what was to be told is read next
    # sin(t + p) = sin t cos p + cos t sin p: from two readings the next follows
    for value, gap, wanted in zip(x[:, :, 0], x[:, :, 1], y[:, :, 0], strict=True):
        t = np.r_[0, gap.cumsum()]
        a, b = np.linalg.solve([[np.sin(t[0]), np.cos(t[0])], [np.sin(t[1]), np.cos(t[1])]], value[:2].astype("f8"))
        np.testing.assert_allclose(wanted, a * np.sin(t[1:]) + b * np.cos(t[1:]), atol=2e-3)
    assert (task.train.counts[:, :4] == 0).all()
    assert (task.train.counts[:, 4:] == 1).all()


def test_event_xor_has_the_documented_inputs_and_targets():
    task = ev.tasks.event_xor(8, 200, seed=1)
    part = task.train
    for x, y, last in zip(part.x, part.y, part.last, strict=True):
        bits = np.repeat(x[: last + 1, 0], x[: last + 1, 1].astype(int))
        assert len(bits) == 8
        assert (np.diff(x[: last + 1, 0]) != 0).all()  # runs are whole
        assert (x[last + 1 :] == 0).all()
        assert y[last, 0] == bits.sum() % 2
    with pytest.raises(TaskError, match="64"):
        ev.tasks.event_xor(65)


def test_skipped_steps_are_not_scored():
    x, y = np.zeros((6, 3, 1)), np.arange(18.0).reshape(6, 3, 1)
    assert (ev.Task(x, y, "mse", split="same", skip=2).train.counts == [0, 0, 1]).all()
    with pytest.raises(TaskError, match="`skip` leaves no step"):
        ev.Task(x, y, "mse", split="same", lengths=[2] * 6, skip=2)


def test_constant_training_inputs_are_not_scaled():
    x = np.full((50, 3), 0.1, np.float32)
    x[:, 1] = np.arange(50)
    y = np.arange(50) % 2
    plain = ev.Task(x, y)
    rare = next(i for i in range(50) if i in plain._test.x[:, 0, 1])
    x[rare, 0] = 1.1  # seen for the first time in the test cases
    task = ev.Task(x, y, scaled=True)
    assert np.abs(task._test.x).max() < 10
    np.testing.assert_array_equal(task.scale[:, 2], np.array([0.1, 1], np.float32))
    assert np.unique(task.train.x[..., 2]).size == 1


def test_large_and_small_inputs_are_standardised():
    x = np.random.default_rng(0).normal(size=(60, 1))
    x = (x * np.array([[1e30, 1, 1e-30]])).astype(np.float32)
    task = ev.Task(x, np.arange(60) % 2, scaled=True)
    np.testing.assert_allclose(task.train.x[..., 0], task.train.x[..., 1], atol=1e-5)
    np.testing.assert_allclose(task.train.x[..., 2], task.train.x[..., 1], atol=1e-5)


def test_overflow_of_scaled_inputs_names_the_input():
    x = (np.random.default_rng(0).normal(size=(60, 2)) * 0.01).astype(np.float32)
    x[x[:, 0] == ev.Task(x, np.arange(60) % 2)._test.x[0, 0, 0], 1] = 3e38
    with pytest.raises(TaskError, match=r"x1: .* exceeds float32"):
        ev.Task(x, np.arange(60) % 2, scaled=True)


@pytest.mark.parametrize(
    "options",
    [{"names": ("a",)}, {"fitness": 3}, {"fitness_batch": 3}, {"fitness": len, "fitness_batch": len},
     {"scaled": [True] * 3}, {"seed": -1, "split": (0.5, 0.25, 0.25)}, {"split": None}, {"split": 3}, {"target": "x"}],
    ids=str,
)  # fmt: skip
def test_invalid_options_are_task_errors(options):
    with pytest.raises(TaskError):
        ev.Task(np.eye(2)[[0, 1, 0, 1]], [0, 1, 1, 0], **{"split": "same", **options})


def test_complex_numbers_are_refused():
    with pytest.raises(TaskError, match="real"):
        ev.Task(np.eye(2) * 1j, [0, 1], split="same")
    with pytest.raises(TaskError, match="real"):
        ev.Task(np.eye(2), np.array([0, 1j]), split="same")
