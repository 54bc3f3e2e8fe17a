"""Teacher forcing against on-policy prefixes on grid tasks: exact match, exposure gap and tokens per second.

Both train the same small decoder from the same weights on the same batches. A step includes its rollouts.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from time import perf_counter

import numpy as np

import graphwright as gw
from benchmarks.harness import Figure
from graphwright import data
from graphwright import lifecycle as lf
from graphwright.data.grid_tasks import END, PAD, VOCABULARY
from graphwright.models.open import config_from, create
from graphwright.optim.lr_scheduler import warmup_cosine

PARTS = ("grids", "curves", "arc")
SEEDS, SIDE, SHARE = 5, 4, 0.5
EVERY, BATCH, RATE, HELD_OUT = 25, 16, 3e-3, 64
KINDS = {"copy": 48, "flip": 128, "recolour": 48}
"""Kind -> the number of its few tasks, chosen so that teacher forcing alone does not solve all of the held-out ones."""
NEW, FEW = "new tasks", "few tasks"
STEPS = {NEW: 150, FEW: 300}
PLAIN, OWN, LONGER = "teacher forcing", "own prefixes", "teacher forcing, same seconds"
ARC_SECONDS, ARC_TOKENS, ARC_BATCH, ARC_SIDE = 45.0, 512, 8, 10


def decoder(seed: int, hidden: int = 64, layers: int = 2) -> gw.Model:
    """A small decoder over the tokens of grid tasks, with random weights."""
    fields = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": hidden,
        "intermediate_size": 2 * hidden, "num_hidden_layers": layers, "num_attention_heads": hidden // 16,
        "num_key_value_heads": hidden // 16, "max_position_embeddings": 2048, "tie_word_embeddings": True,
        "initializer_range": 0.1, "eos_token_id": END, "pad_token_id": PAD,
    }  # fmt: skip
    return create(config_from(fields), seed=seed)


@dataclass(slots=True)
class Curve:
    """Measurements of one run on held-out tasks, every `EVERY` steps and at the end.

    `seconds` is the median of the training steps times their number, so without set-up and what disturbs the machine.
    """

    steps: list[int] = field(default_factory=list)
    exact: list[float] = field(default_factory=list)
    gap: list[float] = field(default_factory=list)
    seconds: float = 0.0
    tokens: int = 0


def trained(kind: str, eta: float, seed: int, tasks: int | None, steps: int) -> Curve:
    """One run on tasks of one rule."""
    model = decoder(seed)
    stream = data.grids(kind, SIDE, pairs=0, seed=seed + 1, fixed=True)
    order = np.arange(steps * BATCH) if tasks is None else np.random.default_rng(seed).integers(0, tasks, steps * BATCH)
    held = data.grids(kind, SIDE, pairs=0, seed=seed + 1001, fixed=True)
    optimizer = gw.optim.AdamW(model, RATE, weight_decay=0.01)
    policy = lf.OnPolicy(model, optimizer, lf.ramp(0, eta, steps // 2), clip=1.0)
    made, times = Curve(), []

    def measure() -> None:
        found = lf.exposure_gap(model, held, count=HELD_OUT, batch=HELD_OUT)
        made.steps.append(policy.done)
        made.exact.append(found.exact)
        made.gap.append(found.gap)

    measure()
    for batch in data.DataLoader(data.Subset(stream, order), BATCH):
        optimizer.lr = warmup_cosine(policy.done, peak=RATE, warmup=20, total=steps, floor=0.1)
        started = perf_counter()
        policy.step(batch).item()
        times.append(perf_counter() - started)
        made.tokens += int((batch["answer"].numpy() != PAD).sum())
        if policy.done % EVERY == 0 or policy.done == steps:
            measure()
    made.seconds = median(times) * len(times)
    return made


_RUNS: dict[tuple[str, str], dict[str, list[Curve]]] = {}


def runs(regime: str, kind: str) -> dict[str, list[Curve]]:
    """The curves of all seeds by arm, run once. The third arm has the steps that fit into the time of the second."""
    if (regime, kind) not in _RUNS:
        tasks, steps = KINDS[kind] if regime == FEW else None, STEPS[regime]
        found: dict[str, list[Curve]] = {PLAIN: [], OWN: [], LONGER: []}
        for seed in range(SEEDS):
            plain, own = (trained(kind, eta, seed, tasks, steps) for eta in (0.0, SHARE))
            longer = trained(kind, 0.0, seed, tasks, round(steps * own.seconds / plain.seconds))
            for arm, curve in zip(found, (plain, own, longer), strict=True):
                found[arm].append(curve)
        _RUNS[regime, kind] = found
    return _RUNS[regime, kind]


def grids() -> Figure:
    """Exact match and gap at equal steps and at equal wall-clock time."""
    figure = Figure(
        "Own prefixes beside teacher forcing, grid tasks of 4 x 4",
        f"median of {SEEDS} seeds and their range; {STEPS[NEW]} steps on new tasks, or {STEPS[FEW]} steps on few: "
        f"{', '.join(f'{n} of {kind}' for kind, n in KINDS.items())}; one rule for all tasks, no demonstrations; a "
        f"decoder of 2 layers, 64 wide; AdamW at {RATE:g}, batches of {BATCH}; share of own prefixes from 0 to {SHARE} "
        f"in the first half; {HELD_OUT} held-out tasks, greedy; same seconds: as many steps as fit into the time of "
        "those with own prefixes",
    )
    for regime in STEPS:
        for kind in KINDS:
            for arm, found in runs(regime, kind).items():
                add(figure, f"{regime}, {kind}, {arm}: exact match", [c.exact[-1] for c in found], "share")
                add(figure, f"{regime}, {kind}, {arm}: exposure gap", [c.gap[-1] for c in found], "nats")
                if arm != LONGER:
                    add(figure, f"{regime}, {kind}, {arm}: speed", [c.tokens / c.seconds for c in found], "tokens/s")
    cost = [
        own.seconds / plain.seconds
        for regime in STEPS for kind in KINDS
        for plain, own in zip(runs(regime, kind)[PLAIN], runs(regime, kind)[OWN], strict=True)
    ]  # fmt: skip
    add(figure, "time of a run with own prefixes, of teacher forcing", cost, "times")
    return figure


def curves() -> Figure:
    """Exact match over steps, as `scripts/pictures.py on_policy.svg` draws it."""
    figure = Figure(
        "Exact match over steps, own prefixes beside teacher forcing",
        f"median of {SEEDS} seeds and their range, few tasks; the runs of the table above",
    )
    for kind in KINDS:
        for arm in (PLAIN, OWN):
            found = runs(FEW, kind)[arm]
            for i, step in enumerate(found[0].steps):
                add(figure, f"{kind}, {arm}, step {step}", [c.exact[i] for c in found], "share")
    return figure


def add(figure: Figure, who: str, values: list[float], unit: str) -> None:
    """A row: the median over seeds and the range."""
    figure.add(who, median(values), unit, low=min(values), high=max(values), seeds=values)


def arc() -> Figure:
    """Solve rates on ARC-AGI-1 after a short training: printed as they are."""
    figure = Figure(
        f"ARC-AGI-1 within {ARC_SIDE} x {ARC_SIDE}, own prefixes beside teacher forcing",
        f"one seed, {ARC_SECONDS:.0f} s of training steps on the training tasks with prompts of at most {ARC_TOKENS} "
        f"tokens and their variants; a decoder of 3 layers, 96 wide, with random weights; batches of {ARC_BATCH}; "
        "solved: one of 2 tries, by a vote over 8 views, is the answer to each question of a task",
    )
    known = [t for t in data.arc("arc-agi-1", "training", ARC_SIDE).tasks if len(t.encode()[0]) <= ARC_TOKENS]
    unseen = data.arc("arc-agi-1", "evaluation", ARC_SIDE)
    stream = data.AugmentedTasks(known, 1000)
    for arm, eta in ((PLAIN, 0.0), (OWN, SHARE)):
        model = decoder(0, 96, 3)
        optimizer = gw.optim.AdamW(model, 1e-3, weight_decay=0.01)
        policy = lf.OnPolicy(model, optimizer, lf.ramp(0, eta, 200), clip=1.0, round_to=128)
        spent, losses = 0.0, []
        for batch in data.DataLoader(stream, ARC_BATCH, shuffle=True):
            started = perf_counter()
            losses.append(policy.step(batch).item())
            spent += perf_counter() - started
            if spent > ARC_SECONDS:
                break
        note = f"{policy.done} steps, last losses {np.mean(losses[-50:]):.3f} nats"
        for name, tasks in (("evaluation", unseen), ("training", known)):
            found = lf.exact_match(model, tasks)
            figure.add(f"{arm}: {name} tasks solved", found.solved, f"of {found.tasks}", note)
            figure.add(f"{arm}: {name} outputs that are not a grid", found.unreadable, "share")
        gap = lf.exposure_gap(model, unseen, count=len(unseen))
        figure.add(f"{arm}: exposure gap on the evaluation tasks", gap.gap, "nats")
    return figure
