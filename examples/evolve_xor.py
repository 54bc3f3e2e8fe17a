"""NEAT finds a network for XOR from bare inputs and outputs; its champion is a Program like any other.

`python examples/evolve_xor.py` runs 20 seeds, then shows the ancestors of a champion, and trains it further.
"""

import argparse
from time import perf_counter

import numpy as np

import graphwright as gw
from graphwright import evolve as ev

X = np.array([[0, 0], [0, 1], [1, 0], [1, 1]], np.float32)
Y = np.array([[0], [1], [1], [0]], np.float32)


def train(program: gw.Program, steps: int) -> tuple[float, float]:
    """Adam on the champion's weights; the loss before and after."""
    opt = gw.optim.Adam(program.parameters(), lr=0.02)

    @gw.compile
    def step(x: gw.Tensor, y: gw.Tensor) -> gw.Tensor:
        opt.zero_grad()
        loss = ((program(x=x)[program.output_names()[0]] - y) ** 2).mean()
        loss.backward()
        opt.step()
        return loss

    losses = [step(X, Y).item() for _ in range(steps)]
    return losses[0], losses[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="3 seeds")
    given = parser.parse_args()
    started = perf_counter()
    results = [ev.Evolution(ev.tasks.xor(), ev.scalar(), ev.NEAT(), seed=s).run(300)
               for s in range(3 if given.quick else given.seeds)]  # fmt: skip
    solved = [r for r in results if r.solved]
    cost = np.median([r.evolution.counters.evaluations for r in results])
    hidden = np.mean([r.best.genome.hidden for r in solved])
    print(f"{len(solved)} of {len(results)} seeds solved, median {cost:,.0f} evaluations, "
          f"{hidden:.1f} hidden nodes on average, {perf_counter() - started:.1f} s")  # fmt: skip
    best = min(solved, key=lambda r: r.best.fitness).best  # the one that leaves most to learn
    program = best.program
    print("\n".join(f"  {entry.why}" for entry in program.journal))
    before, after = train(program, 300)
    answers = program.run(x=X)["y"].to_numpy().ravel().round(3)
    print(f"trained further: loss {before:.4f} -> {after:.6f}; answers {answers}")
    assert len(solved) >= len(results) - 1
    assert after < before


if __name__ == "__main__":
    main()
