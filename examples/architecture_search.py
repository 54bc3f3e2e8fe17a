"""Find the skips of a chain of blocks: a teacher has three, and students search by gates, growth, a softmax relaxation,
random choice and evolution.

A block is tanh(W h + b). The student has its own initial weights and learns the output of each block of the teacher.
Every method has the same number of training steps, retraining included. `python examples/architecture_search.py` runs
three seeds and prints a table for each.
"""

import argparse

import numpy as np

import graphwright as gw
from graphwright import structure as st

WIDTH, BLOCKS = 12, 6
NAMES = ["x", *(f"h{j}" for j in range(1, BLOCKS + 1))]


def chain(rng: np.random.Generator, teacher: bool) -> gw.Program:
    """Six blocks; a teacher's weights are 1.2 times orthogonal."""
    b = gw.Builder("chain")
    h = b.input("x", ("B", WIDTH))
    for j in range(1, BLOCKS + 1):
        w = rng.normal(size=(WIDTH, WIDTH))
        w = 1.2 * np.linalg.qr(w)[0] if teacher else w / WIDTH**0.5
        shift = 0.1 * rng.normal(size=WIDTH) * teacher
        weight, bias = b.param(f"b{j}.w", np.float32(w)), b.param(f"b{j}.bias", np.float32(shift))
        h = b.tanh(b.linear(h, weight, bias, name=f"b{j}"), name=f"h{j}")
        b.output(h, f"y{j}")
    return b.build()


def one(seed: int, method: str, budget: int, beside: tuple[str, ...]) -> tuple[st.SearchResult, gw.Program, bool]:
    """Plant three skips, search for them: what was found, the student, and whether it was just those."""
    rng, candidates = np.random.default_rng(seed), st.skips(NAMES, min_gap=2)
    teacher, student = chain(rng, True), chain(np.random.default_rng(1000 + seed), False)
    planted = sorted(rng.choice(candidates.names(teacher), 3, replace=False).tolist())
    candidates.build(teacher, planted)

    def batch(rng: np.random.Generator, n: int = 128) -> dict[str, np.ndarray]:
        x = rng.normal(size=(n, WIDTH)).astype("f4")
        shown = teacher.run(x=x, keep="outputs")
        return {"x": x, **{f"t{j}": shown[f"y{j}"].to_numpy() for j in range(1, BLOCKS + 1)}}

    def task(outputs: dict, batch: dict) -> gw.Tensor:
        gaps = [((outputs[f"y{j}"] - batch[f"t{j}"]) ** 2).mean() for j in range(1, BLOCKS + 1)]
        return sum(gaps[1:], start=gaps[0]) * (1 / BLOCKS)

    valid = batch(np.random.default_rng(7), 512)
    found = st.search(student, candidates, batch, valid, method, budget, seed, task=task, beside=beside)
    print(f"seed {seed}, planted: {', '.join(planted)}\n{found}\n", flush=True)
    assert found.loss <= min(row.loss for row in found.table), "nothing beside it is better"
    return found, student, sorted(found.chosen) == planted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4000, help="training steps of each method")
    parser.add_argument("--quick", action="store_true", help="one seed, 1000 steps, gates beside chance")
    args = parser.parse_args()
    seeds, steps, beside = (1, 1000, ()) if args.quick else (args.seeds, args.steps, ("grow", "softmax", "evolve"))
    right = [one(seed, "gates", steps, beside)[2] for seed in range(seeds)]
    print(f"gates found just the planted skips in {sum(right)} of {seeds} seeds")
    assert sum(right) * 3 >= 2 * seeds


if __name__ == "__main__":
    main()
