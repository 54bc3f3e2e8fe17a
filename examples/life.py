"""A model with a diary: trained step by step, killed, resumed, repaired when its world changes, forked and merged.

`python examples/life.py` writes a life to ./life and its picture to ./life.svg. The data change halfway: the loss
rises, a small controller notices, and gives one of eight experts a new start, as an edit that can be undone.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np

import graphwright as gw
from graphwright import lifecycle as lf
from graphwright import nn, optim

EXPERTS, WIDTH, CLASSES, BATCH = 8, 16, 10, 64


class Pool(nn.Module):
    """The sum of some small networks."""

    def __init__(self) -> None:
        self.experts = nn.ModuleList(
            [nn.Sequential(nn.Linear(WIDTH, 12), nn.ReLU(), nn.Linear(12, CLASSES)) for _ in range(EXPERTS)]
        )

    def forward(self, x):
        total = self.experts[0](x)
        for expert in list(self.experts)[1:]:
            total = total + expert(x)
        return total


def batch(step: int, shift: int) -> dict[str, np.ndarray]:
    """Points around ten centres, which are others from the step `shift` on; they depend on the step only."""
    centres = np.random.default_rng(step >= shift).normal(size=(CLASSES, WIDTH)) * 1.5
    rng = np.random.default_rng(1000 + step)
    y = rng.integers(0, CLASSES, BATCH)
    return {"x": (centres[y] + rng.normal(size=(BATCH, WIDTH))).astype("f4"), "y": y}


def program() -> gw.Program:
    gw.manual_seed(0)
    return gw.trace(Pool(), gw.tensor(batch(0, 1)["x"]))


def loss(out, y):
    return nn.functional.cross_entropy(out, y)


def step_of(p: gw.Program):
    return gw.compile_step(p, loss, optim.AdamW(p, 3e-3), batch(0, 1))


class Care:
    """Proposes a new start for the expert with the smallest last matrix when the loss is three times what it was."""

    def propose(self, view):
        now, before = view.figures.loss_last, [p["loss"] for p in view.figures.curve.points[-9:-1]]
        alarms = view.life.log.of("alarm")
        if len(before) < 8 or now < max(0.5, 3 * np.mean(before)) or (alarms and alarms[-1].step > view.age - 50):
            return []
        weights = view.program.weights
        norms = [np.linalg.norm(weights[f"experts.{i}.2.weight"].numpy()) for i in range(EXPERTS)]
        least, rng = int(np.argmin(norms)), np.random.default_rng(view.age)

        def apply(e):
            for part in ("0.weight", "2.weight"):
                key = f"experts.{least}.{part}"
                e.set_weight(key, 0.2 * rng.normal(size=weights[key].shape))

        facts = {"loss": now, "before": float(np.mean(before))}
        alarm = lf.Proposal("alarm", "loss", "the loss rose", facts)
        return [alarm, lf.Proposal("expert_reborn", f"experts.{least}", "smallest of all", facts, apply)]


def live(folder: Path, steps: int, shift: int, name: str = "bonsai") -> lf.Life:
    """Begin the life in a directory, or resume it, and train it until it is `steps` old."""
    life = lf.open(folder) if (folder / "identity.json").exists() else lf.birth(program(), folder, name=name)
    train, care = step_of(life.program), Care()
    begin = life.resume if life.resumable else life.segment
    with begin(train, {"name": "moving clusters"}) as run:
        while run.age < steps:
            run.step(batch(run.age, shift), care)
            print(run.age, flush=True) if "--child" in sys.argv else None
    return life


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("life"), help="directory of the life")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--child", action="store_true", help="train until killed")
    parser.add_argument("--quick", action="store_true", help="80 steps")
    args = parser.parse_args()
    steps = 80 if args.quick else args.steps
    if args.child:
        live(args.out, steps, steps // 2)
        return

    for folder in (args.out, *(args.out.with_name(f"{args.out.name}-{k}") for k in ("whole", "fork"))):
        shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, __file__, "--child", "--out", str(args.out), "--steps", str(steps)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
        for line in child.stdout:
            if int(line) >= steps // 4:
                os.kill(child.pid, signal.SIGKILL)
                break
    with lf.open(args.out, readonly=True) as life:
        print(f"killed after step {life.age}: {len(life.store.commits)} commits")

    life = live(args.out, steps, steps // 2)
    whole = live(args.out.with_name(f"{args.out.name}-whole"), steps, steps // 2)
    print(
        f"resumed to step {life.age}; the same bits as without the kill: {life.program.hash() == whole.program.hash()}"
    )
    print(life.log.tail(6))

    reborn = life.log.of("expert_reborn")
    if reborn:
        entry = life.program.journal[reborn[-1].facts["entry"]]
        print(f"\njournal entry {entry.seq} by {entry.author}: {entry.why}")
    child = life.fork(args.out.with_name(f"{args.out.name}-fork"), name="twig")
    with child.program.edit("a colder output") as e:
        e.set_weight("experts.0.2.bias", lambda w: w * 0.5)
    child.commit()
    print(f"merged from {child.name}: {life.merge(child).entries} edits")
    life.to_svg(args.out.with_suffix(".svg"))
    print(life.verify())


if __name__ == "__main__":
    main()
