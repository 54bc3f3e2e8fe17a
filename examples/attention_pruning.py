"""Prune the twelve edges of an attention of four tokens, five of which carry signal; then the heads of a real model.

Each token is the mean of three others, and every edge has a gate. Gates and weights are trained together, and every ten
steps all terms of the loss are printed. `python examples/attention_pruning.py` takes a minute.
"""

import argparse

import numpy as np

import graphwright as gw
from graphwright import structure as st

TOKENS, WIDTH, PLANTED, STEPS = 4, 8, 5, 100


def toy() -> tuple[np.ndarray, list[str], list[bool]]:
    """Edges j -> i of weight 1/3; the targets are sums over five of them.

    Returns: probabilities [steps, edges], names of the edges, and which of them stayed.
    """
    rng, b = np.random.default_rng(0), gw.Builder("attention")
    x, y = (b.input(name, ("B", TOKENS, WIDTH)) for name in "xy")
    parts = [b.slice(x, axis=1, start=j, size=1, step=1, name=f"x{j}") for j in range(TOKENS)]
    third = b.const("third", np.float32(1 / 3))
    sums = [
        b.junction(*(b.mul(parts[j], third, name=f"m{j}{i}") for j in range(TOKENS) if j != i), name=f"y{i}")
        for i in range(TOKENS)
    ]
    w = b.param("w", np.float32(np.eye(WIDTH) + 0.1 * rng.normal(size=(WIDTH, WIDTH))))
    gap = b.sub(b.linear(b.concat(*sums, axis=1), w), y)
    b.output(b.mean(b.mul(gap, gap), axes=(0, 1, 2)), name="loss")
    p = b.build()
    edges = [(j, i) for i in range(TOKENS) for j in range(TOKENS) if i != j]
    planted = {edges[k] for k in rng.choice(len(edges), PLANTED, replace=False)}
    mixing = 3 * np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0]

    def batch() -> dict[str, np.ndarray]:
        given = rng.normal(size=(64, TOKENS, WIDTH))
        wanted = 0.05 * rng.normal(size=given.shape)
        for j, i in planted:
            wanted[:, i] += given[:, j] @ mixing.T / 3
        return {"x": np.float32(given), "y": np.float32(wanted)}

    with p.edit("a gate on every edge", author="gate") as e:
        e.gate([f"m{j}{i} -> y{i}" for j, i in edges], "sigmoid", init=1.0)
    view = st.DifferentiableGraph(p, schedule=st.TemperatureSchedule(1.0, 0.5, STEPS))
    penalties = [st.sparsity(0.1), st.edge_entropy(0.01)]
    opt = st.JointOptimizer(view, "loss", penalties, params=0.05, gates=0.1)
    seen, names = [], list(view.probabilities())
    for step in range(STEPS):
        made = opt.step(batch())
        seen.append(list(view.probabilities().values()))
        if step % 10 == 9:
            terms = ", ".join(f"{name} {value:.3f}" for name, value in made.penalties.items())
            print(f"step {step + 1}: task {made.task:.3f}, {terms}, T {made.temperature['default']:.2f}")
    done = view.discretize(0.5, probe=batch())
    kept = {(j, i) for j, i in edges if f"m{j}{i} -> y{i}" not in done.cut}
    print(f"{len(edges)} edges before, {len(kept)} after, {len(done.cut) / len(edges):.0%} cut\n{done}\n")
    assert planted <= kept, "edges that carry signal stay"
    assert len(kept) <= PLANTED + 1
    assert p.journal[-1] is done.entry
    why = p.blame(done.cut[0])[-1].annotations(done.cut[0])[0]
    print(f"{done.cut[0]} went at step {why['step']}: p {why['p']:.3f}, gradient {why['gradient']:.2g}\n")
    p.undo()
    assert len(p.gates()) == len(edges)
    return np.array(seen), names, [name not in done.cut for name in names]


def real(steps: int) -> None:
    """Heads of the bundled model, learned against the model itself."""
    model = gw.open("bundled")
    found = st.learn(model, ("heads",), 0.8, steps=steps, gates=12 / steps)
    print(found)
    assert len(found.hardened.cut) >= 4
    assert found.after["bits_per_byte"] < found.before["bits_per_byte"] + 0.4
    model.program.undo(2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="20 steps on the real model")
    args = parser.parse_args()
    toy()
    real(20 if args.quick else 150)


if __name__ == "__main__":
    main()
