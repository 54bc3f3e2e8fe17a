"""Compare two revisions by our own rows of some benchmarks: `python -m benchmarks.revisions BASE [NAME ...]`.

Each round starts one process for the base, one for this tree and one for the base again, which is the A/A row. Each
process imports the package and the benchmarks of its own revision, so renamed functions do not matter. Peers do not
run. Before the first round each revision compiles its native code. No result is stored.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

HERE = Path(__file__).parents[1]
ROUNDS = 7


# -- rows: functions of one process, which return seconds by label -----------------------------------------------------
def small_steps(_: Path) -> dict[str, float]:
    from benchmarks import small_steps as bench

    taken = {}
    for dims, batch in bench.MLPS:
        rng = np.random.default_rng(0)
        weights = [((rng.normal(size=(b, a)) / np.sqrt(a)).astype("f4"), np.zeros(b, "f4")) for a, b in pairwise(dims)]
        x, t = (rng.normal(size=(batch, d)).astype("f4") for d in (dims[0], dims[-1]))
        step = bench.ours(weights, x, t)
        name = "-".join(map(str, dims))
        taken[f"{name}: call"] = seconds(step)
        taken[f"{name}: bound memory"] = seconds(step.bound)
    return taken


def edit_to_result(_: Path) -> dict[str, float]:
    from benchmarks import edit_to_result as bench

    bench.ours(1)  # the first round of a process also loads code
    return {label: median(samples) for label, samples in bench.ours(3).items()}


def planning(_: Path) -> dict[str, float]:
    from benchmarks import planning as bench
    from graphwright.array import Spec, float32
    from graphwright.plan import make_plan

    p = bench.layered(5_000)
    specs, feed = {"x": Spec((4, 8), float32)}, {"x": np.ones((4, 8), np.float32)}
    taken = {"5 000 nodes: first plan": seconds(lambda: make_plan(p, specs), least=0.3)}
    figure = bench.Figure("", "")
    for executor in ("aten", "vm"):
        bench._edits(figure, p, specs, feed, executor)
    return taken | {row.who: row.value / 1e3 for row in figure.rows}


def decode(shared: Path) -> dict[str, float]:
    import transformers

    import graphwright as gw
    from benchmarks import decode as bench
    from graphwright.array.cpu import set_num_threads

    taken, ids = {}, np.arange(bench.PROMPT) + 7
    set_num_threads(1)
    for width, layers in ((64, 2), (256, 4)):
        with tempfile.TemporaryDirectory() as folder:
            config = transformers.LlamaConfig(
                hidden_size=width, num_hidden_layers=layers, num_attention_heads=4, num_key_value_heads=2,
                intermediate_size=3 * width, vocab_size=512,
            )  # fmt: skip
            transformers.LlamaForCausalLM(config).save_pretrained(folder)
            one = bench.Ours(gw.open(folder), ids)
            taken[f"width {width}: a step"] = seconds(lambda one=one: one.tokens(24)) / 23
    if not (shared / "config.json").is_file():
        bench.checkpoint(shared)
    plain, whole = gw.open(shared), gw.open(shared)
    whole.quantize("int8")
    for name, model in (("bf16", plain), ("int8", whole)):
        one = bench.Ours(model, ids)
        for threads in (1, 2):
            set_num_threads(threads)
            taken[f"TinyLlama shape, {name}, {threads} threads: a step"] = seconds(lambda one=one: one.tokens(6), 3) / 5
    return taken


def evolve_speed(_: Path) -> dict[str, float]:
    from benchmarks import evolve_speed as bench

    bench.neat = None
    taken = {}
    for figure, times in ((bench.evaluations(), 1e-6), (bench.generations(), 1.0)):
        taken |= {row.who: times / row.value for row in figure.rows if "plain Python" not in row.who}
    return taken


BENCHMARKS = (small_steps, edit_to_result, planning, decode, evolve_speed)


def seconds(call: Callable[[], Any], rounds: int = 7, least: float = 0.1) -> float:
    """Median seconds of a call over rounds of at least `least` seconds."""
    call()
    taken = []
    for _ in range(rounds):
        count, started = 0, perf_counter()
        while perf_counter() - started < least:
            call()
            count += 1
        taken.append((perf_counter() - started) / count)
    return median(taken)


# -- two revisions -----------------------------------------------------------------------------------------------------
def measure(tree: Path, name: str, shared: Path) -> dict[str, float]:
    """Run one benchmark in a new process, with package and benchmarks of `tree` and this file's rows."""
    path = os.pathsep.join((str(tree / "src"), str(tree)))
    command = [sys.executable, str(Path(__file__).resolve()), "--row", name, str(shared)]
    done = subprocess.run(command, cwd=tree, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{name} in {tree}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def compare(base: Path, name: str, shared: Path, rounds: int) -> None:
    """Print base, this tree and the ratio of each row: below 1 where this tree is faster."""
    from benchmarks.harness import interval

    trees = {"base": base, "here": HERE, "again": base}
    taken: dict[str, dict[str, list[float]]] = {}
    for r in range(rounds):
        for who in trees if r % 2 == 0 else reversed(trees):
            for label, value in measure(trees[who], name, shared).items():
                taken.setdefault(label, {w: [] for w in trees})[who].append(value)
    print(f"{name}\n  {'row':48} {'base':>12} {'here':>12}   here / base          A/A", flush=True)
    for label, rows in taken.items():
        if not all(len(rows[who]) == rounds for who in trees):  # a row that only one revision has
            continue
        ratios, noise = ([a / b for a, b in zip(rows[who], rows["base"], strict=True)] for who in ("here", "again"))
        (low, high), (under, over) = interval(ratios), interval(noise)
        base_us, here_us = (1e6 * median(rows[who]) for who in ("base", "here"))
        slower = "  slower" if low > max(over, 1.0) else ""
        print(
            f"  {label[:48]:48} {base_us:9.4g} us {here_us:9.4g} us   {median(ratios):.3f} [{low:.3f} {high:.3f}]  "
            f"[{under:.3f} {over:.3f}]{slower}",
            flush=True,
        )


def main() -> None:
    """Compare the benchmarks named on the command line, by default all of this file."""
    names = [bench.__name__ for bench in BENCHMARKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a commit, or a folder that has another revision checked out")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(names)}")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    asked = parser.parse_args()
    if unknown := set(asked.names) - set(names):
        parser.error(f"no benchmark {', '.join(sorted(unknown))}; there are: {', '.join(names)}")
    with tempfile.TemporaryDirectory() as folder:
        tree, shared = Path(asked.base).resolve(), Path(folder) / "checkpoint"
        shared.mkdir()
        added = not tree.is_dir()
        if added:
            tree = Path(folder) / "base"
            command = ["git", "worktree", "add", "--quiet", "--detach", str(tree), asked.base]
            subprocess.run(command, cwd=HERE, check=True)
        try:
            for one in (tree, HERE):
                command = [sys.executable, "-m", "graphwright", "warmup", "--quiet"]
                subprocess.run(command, cwd=one, env=os.environ | {"PYTHONPATH": str(one / "src")}, check=True)
            for name in asked.names or names:
                compare(tree, name, shared, asked.rounds)
        finally:
            if added:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=HERE, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--row"]:
        row = next(bench for bench in BENCHMARKS if bench.__name__ == sys.argv[2])
        print(json.dumps(row(Path(sys.argv[3]))))
    else:
        main()
