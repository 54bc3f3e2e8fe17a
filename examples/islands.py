"""Four islands balance two poles, evolved by two worker processes: the result is that of one process, bit for bit.

`python examples/islands.py --workers ray` evolves them on a Ray cluster.
"""

import argparse
from time import perf_counter

from graphwright import evolve as ev


def evolved(workers: str | None, generations: int) -> ev.IslandResult:
    """Evolve on islands, which send their two best genomes to the next island every five generations."""
    run = ev.Evolution(ev.tasks.double_pole(), ev.scalar(), ev.NEAT(population=50), seed=1, workers=workers,
                       islands=ev.Islands(4, every=5, migrants=2))  # fmt: skip
    began = perf_counter()
    result = run.run(generations)
    print(f"workers {workers}: {perf_counter() - began:.2f} s; {result}")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", default="2")
    parser.add_argument("--quick", action="store_true", help="at most 10 generations")
    given = parser.parse_args()
    generations = 10 if given.quick else 100
    alone, together = evolved(None, generations), evolved(given.workers, generations)
    path = [str(birth) for birth in together.lineage.path(together.best.key)]
    print("champion:", *path, sep="\n  ")
    assert path == [str(birth) for birth in alone.lineage.path(alone.best.key)]
    assert together.best.genome == alone.best.genome


if __name__ == "__main__":  # workers import this file, too
    main()
