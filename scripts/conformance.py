"""The conformance scoreboard: what `gw.from_torch` opens, beside torch. `make conformance` writes docs/conformance.md.

    python scripts/conformance.py [--only NAME ...] [--kind KIND ...] [--json FILE] [--seconds N]
                                   [--processes N] [--no-write]

Per model, in a process of its own with a time limit: captured (torch.export has a graph), lowered (each operator has a
row), equal (outputs within 1e-4 of torch's largest entry, at the example and at other sizes), back (`as_module` has the
module's keys, loads its state strictly, and computes the same), pruned (channels, neurons or heads removed: as if they
were multiplied by 0). Per operator: the samples of torch's OpInfo database, with gradients
in float64. A result that differs from torch's is `wrong`; the exit status is 1 if there is any.
"""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import logging
import multiprocessing
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from itertools import islice
from multiprocessing import connection
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "ops"), str(ROOT / "tests" / "models" / "importing")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from conformance_models import Case, import_torchvision, timm_cases, torchvision_cases, transformers_cases  # noqa: E402

import graphwright as gw  # noqa: E402
from graphwright.models.errors import CaptureError, UnsupportedOperator  # noqa: E402
from graphwright.program import EmptyAxis, FrozenAxis, RaggedUnit  # noqa: E402
from graphwright.program.recorder import labelled  # noqa: E402

PAGE = ROOT / "docs" / "conformance.md"
STAGES = ("captured", "lowered", "equal", "back", "pruned")
TOLERANCE = 1e-4


@dataclass
class Outcome:
    """The outcome of one model: the stages that it passed, and why the next one failed."""

    kind: str
    name: str
    passed: list[str] = field(default_factory=list)
    wrong: bool = False
    why: str = ""
    fixed: dict[str, str] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    peer: str = ""
    seconds: float = 0.0


# -- one model ---------------------------------------------------------------------------------------------------------
def open_and_compare(case: Case) -> Outcome:
    """Open a model and compare it with torch."""
    start, found = time.perf_counter(), Outcome(case.kind, case.name)
    torch.manual_seed(0)
    try:
        module = case.make().eval()
        for tensor in module.state_dict().values():  # fresh weights are often 0 or tiny, and hide mistakes
            if tensor.is_floating_point() and tensor.numel() and (tensor.ndim == 1 or tensor.abs().max() < 1e-3):
                tensor.add_(torch.rand_like(tensor) * 0.1)
        _stages(case, module, found)
        if found.wrong:  # perhaps only rounding, which deep networks with random weights amplify
            found = Outcome(case.kind, case.name, notes=[f"compared in float64: {found.why} in float32"])
            _stages(case, module.double(), found, torch.float64)
    except UnsupportedOperator as error:
        found.why = f"operators: {', '.join(error.operators)}"
    except CaptureError as error:
        found.why = f"{error.got} ({error.where})"
    except Exception as error:
        notes = "; ".join(getattr(error, "__notes__", [])[:1])
        found.why = f"{type(error).__name__} {notes}: {error}"
    found.why = " ".join(found.why.split())[:300]
    found.seconds = round(time.perf_counter() - start, 1)
    return found


def _stages(case: Case, module: torch.nn.Module, found: Outcome, kind: torch.dtype = torch.float32) -> None:
    def example(i: int) -> dict[str, torch.Tensor]:
        return {n: t.to(kind) if t.is_floating_point() else t for n, t in case.inputs(i).items()}

    inputs = example(0)
    sizes = dict(case.sizes)
    args: tuple[Any, ...] = ()
    if case.kind != "transformers":  # the name of the argument differs from model to model
        args, inputs = tuple(inputs.values()), {}
        name = next(iter(inspect.signature(module.forward).parameters))
        sizes = {name: next(iter(case.sizes.values()))}
    program = _opened(module, args, inputs, sizes, found)
    worst = 0.0
    for i in (0, 1):
        if i and found.fixed:
            continue
        given = example(i)
        given = given if not args else {next(iter(sizes)): next(iter(given.values()))}
        with torch.no_grad():
            want = module(**given) if not args else module(*given.values())
        got = program(**{k: gw.tensor(v.numpy()) for k, v in given.items()})
        worst = max([worst, *_differences(want, got)])
    if not worst <= TOLERANCE:
        found.wrong, found.why = True, f"outputs differ by {worst:.1e}"
        return
    found.passed.append("equal")
    _back(program, module, given, want, found)
    if found.wrong:
        return
    _prune(program, {k: v.numpy() for k, v in given.items()}, found)


def _back(
    program: gw.Program, module: torch.nn.Module, given: dict[str, torch.Tensor], want: Any, found: Outcome
) -> None:
    """Take the program back into torch: the same keys, the module's state loaded strictly, the same outputs."""
    state, net = module.state_dict(), program.as_module()
    differ = sorted(state.keys() ^ net.state_dict().keys())
    if differ:
        found.notes.append(f"as_module: {len(differ)} keys differ, {differ[0]}")
        return
    net.load_state_dict(state)
    with torch.no_grad():
        outs = labelled(net(**given))
    worst = max(_differences(want, {name: gw.tensor(t.numpy()) for name, t in outs.items()}))
    if worst <= TOLERANCE:
        found.passed.append("back")
    else:
        found.wrong, found.why = True, f"outputs of as_module differ by {worst:.1e}"


def _opened(module: torch.nn.Module, args: Any, inputs: Any, sizes: Any, found: Outcome) -> gw.Program:
    try:
        program = gw.from_torch(module, args, inputs, sizes=sizes)
    except Exception as error:
        if not isinstance(error, CaptureError):
            found.passed.append("captured")
        raise
    found.passed += ["captured", "lowered"]
    shapes = [program.spec(n).shape for n in program.inputs()]
    named = {d for shape in shapes for d in shape if isinstance(d, str)}
    found.fixed = {d: "fixed" for shape in sizes.values() for d in shape if isinstance(d, str) and d not in named}
    return program


def _differences(want: Any, got: Any) -> Iterator[float]:
    """Yield the largest difference of each output, relative to its largest entry."""
    theirs = dict(want) if hasattr(want, "items") else {"out": want} if isinstance(want, torch.Tensor) else {
        ("out" if i == 0 else f"out_{i}"): v for i, v in enumerate(want)}  # fmt: skip
    pairs = 0
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor) and isinstance(got.get(name), gw.Tensor):
            a, b = got[name].numpy().astype("f8"), value.detach().numpy().astype("f8")
            pairs += 1
            yield np.inf if a.shape != b.shape else float(np.abs(a - b).max() / max(np.abs(b).max(), 1e-6))
    if not pairs:
        yield np.inf


def _prune(program: gw.Program, feeds: dict[str, Any], found: Outcome) -> None:
    """Cut units of some axes, and compare with the program in which they are multiplied by 0."""
    from axis_samples import masked, run  # pyright: ignore[reportMissingImports]

    rng, reasons = np.random.default_rng(0), Counter()
    kinds, whole, total, stuck = ("heads", "neurons", "channels"), run(program, feeds), 0, 0
    groups = list(program.axes().values())
    rng.shuffle(groups)  # pyright: ignore[reportArgumentType]
    groups.sort(key=lambda g: next((i for i, k in enumerate(kinds) if k in g.kinds), 9))
    for group in groups:
        kind = next((k for k in kinds if k in group.kinds), None)
        if kind is None or group.size < 2:
            continue
        total += 1
        if group.frozen or group.mixed:
            reasons[(group.frozen or group.mixed)[0]] += 1
            stuck += 1
            continue
        if found.units.get(kind, 0) >= 2:
            continue
        units = group.units(sorted(rng.choice(group.size, max(1, group.size // 4), replace=False).tolist()))
        try:
            want = run(masked(program, units), feeds)
            if all(np.array_equal(want[n], whole[n]) for n in want):
                reasons["units without effect"] += 1
                continue
            units.prune()
        except (RaggedUnit, EmptyAxis, FrozenAxis) as error:
            reasons[error.what] += 1
            continue
        got = run(program, feeds)
        program.undo()
        worst = max(float(np.abs(got[n] - want[n]).max() / max(np.abs(want[n]).max(), 1e-6)) for n in want)
        if not worst <= TOLERANCE:
            found.wrong, found.why = True, f"{group.name}: cut and masked differ by {worst:.1e}"
            return
        found.units[kind] = found.units.get(kind, 0) + 1
    if stuck:
        found.notes.append(f"{stuck} of {total} axes are frozen: {reasons.most_common(1)[0][0]}")
    if found.units:
        found.passed.append("pruned")
    else:
        found.why = "no units to prune: " + "; ".join(r for r, _ in reasons.most_common(2))


def _torch_pruning(case: Case) -> str:
    """Prune half of a model's channels by Torch-Pruning; returns `pruned`, or the error's type."""
    import torch_pruning as tp  # pyright: ignore[reportMissingImports]

    module, example = case.make().eval(), next(iter(case.inputs(0).values()))
    before = sum(p.numel() for p in module.parameters())
    ignored = [m for m in module.modules() if isinstance(m, torch.nn.Linear) and m.out_features == 10]
    try:
        pruner = tp.pruner.MagnitudePruner(module, example, importance=tp.importance.MagnitudeImportance(),
                                           pruning_ratio=0.5, ignored_layers=ignored)  # fmt: skip
        pruner.step()
        with torch.no_grad():
            module(example)
    except Exception as error:
        return type(error).__name__
    return "pruned" if sum(p.numel() for p in module.parameters()) < before else "nothing pruned"


# -- processes ---------------------------------------------------------------------------------------------------------
def apart(
    tasks: Iterable[tuple[Any, Callable[[Callable[[Any], None]], None]]], seconds: float, processes: int
) -> Iterator[tuple[Any, Any, str]]:
    """Run functions in forks of this process, which has imported the libraries, at most `processes` at once.

    A function calls its argument with a value at each step, the last time with its result. Yields for each task its
    key, the last value (None without one), and why the function did not end, or an empty text.
    """
    context, waiting = multiprocessing.get_context("fork"), iter(tasks)
    running: dict[Any, list[Any]] = {}  # pipe -> key, process, deadline, last value
    while True:
        for key, function in islice(waiting, processes - len(running)):
            here, there = context.Pipe(False)
            child = context.Process(target=_child, args=(function, there))
            child.start()
            there.close()
            running[here] = [key, child, time.monotonic() + seconds, None]
        if not running:
            return
        ready = connection.wait(list(running), max(0.0, min(r[2] for r in running.values()) - time.monotonic()))
        for pipe, (key, child, deadline, value) in list(running.items()):
            why, ended = "", False
            if pipe in ready:
                try:
                    running[pipe][3], ended = pipe.recv()
                except EOFError:
                    why = "the process ended without a result"
            elif time.monotonic() >= deadline:
                why = f"took more than {seconds:.0f} s"
            if why or ended:
                value = running.pop(pipe)[3]
                child.kill()
                child.join()
                pipe.close()
                yield key, value, why


def _child(function: Callable[[Callable[[Any], None]], None], pipe: Any) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    torch.set_num_threads(1)
    last: Any = None

    def progress(value: Any) -> None:
        nonlocal last
        last = value
        pipe.send((value, False))

    function(progress)
    pipe.send((last, True))


def cases(kinds: Sequence[str]) -> Iterator[Case]:
    """Yield the models of the kinds whose library is installed."""
    for kind, made in (("transformers", transformers_cases), ("torchvision", torchvision_cases), ("timm", timm_cases)):
        if kind in kinds and importlib.util.find_spec(kind) is not None:
            yield from made()


# -- operators ---------------------------------------------------------------------------------------------------------
def operators(
    done: Mapping[str, Any], seconds: float, processes: int, only: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Compare rows of the table with torch on samples of OpInfo; yields each entry's name and outcome.

    Entries of `done` are not run again.
    """
    from operator_samples import cases as samples  # pyright: ignore[reportMissingImports]
    from operator_samples import compare  # pyright: ignore[reportMissingImports]
    from opinfo import entry_name  # pyright: ignore[reportMissingImports]

    def comparison(entry: Any) -> Callable[[Callable[[Any], None]], None]:
        return lambda progress: compare(entry, None, lambda report: progress((dict(report.counts), report.notes)))

    tasks = ((entry_name(e), comparison(e)) for e in samples()
             if entry_name(e) not in done and (not only or entry_name(e) in only))  # fmt: skip
    for name, value, why in apart(tasks, seconds, processes):
        counts, notes = value or ({}, {})
        if why:
            counts, notes = {**counts, "unfinished": 1}, {**notes, "unfinished": [why]}
        yield name, {"counts": counts, "notes": notes}


def wrong_samples(ops: Mapping[str, Any]) -> list[str]:
    """Return the descriptions of wrong results."""
    from operator_samples import WRONG  # pyright: ignore[reportMissingImports]

    return [f"{name}: {note}" for name, found in ops.items() for kind in WRONG for note in found["notes"].get(kind, ())]


# -- the page ----------------------------------------------------------------------------------------------------------
def page(outcomes: Sequence[Outcome], ops: Mapping[str, Any], onnx: str) -> str:
    """Return docs/conformance.md."""
    from graphwright.models.importing.operators import OPERATORS

    lines = [
        "# Conformance", "",
        "What `gw.from_torch` opens, compared with torch. `make conformance` writes this page: it installs torchvision",
        "and timm, opens each model with random weights, and takes an hour on two cores.", "",
        "- *captured*: `torch.export` has a graph of the module.",
        "- *lowered*: every operator of the graph has a row in the table of operators.",
        f"- *equal*: outputs are within {TOLERANCE:g} of torch's, relative to the largest entry, also for other sizes.",
        "- *back*: `as_module` has the keys of the module's state, loads it strictly, and computes the same.",
        "- *pruned*: a quarter of the channels, neurons or heads of an axis is removed; the outputs are those of",
        "  the program in which these units are multiplied by 0.", "",
        "| | models | captured | lowered | equal | back | pruned | wrong |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]  # fmt: skip
    kinds = list(dict.fromkeys(o.kind for o in outcomes))
    libraries = ("torch", "transformers", "torchvision", "timm", "torch-pruning", "onnx")
    found = [f"{name} {metadata.version(name).split('+')[0]}" for name in libraries if _installed(name)]
    lines[4:4] = ["", f"Versions: {', '.join(found)}."]
    for kind in kinds:
        own = [o for o in outcomes if o.kind == kind]
        counts = [sum(stage in o.passed for o in own) for stage in STAGES]
        lines.append(f"| {kind} | {len(own)} | {' | '.join(map(str, counts))} | {sum(o.wrong for o in own)} |")
    lines += [
        "",
        "## Operators",
        "",
        f"The table has {len(OPERATORS)} names of operators; torch decomposes others first.",
    ]
    if ops:
        counts = Counter[str]()
        for found in ops.values():
            counts.update(found["counts"])
        refused = sorted(name for name, found in ops.items() if {"refused", "unfinished"} & set(found["counts"]))
        lines += [
            f"Samples of {len(ops)} entries of torch's OpInfo database were captured and compared:", "",
            "| outcome | samples |", "| --- | ---: |",
            *(f"| {outcome} | {number} |" for outcome, number in sorted(counts.items())), "",
            f"wrong values, wrong gradients and untyped errors together: **{len(wrong_samples(ops))}**.",
            "*different*: torch defines no unique result, or differs by design; each case has its reason in the tests.",
            "*refused*: a typed error. *outside*: complex numbers, sparse layouts, what torch itself cannot export.",
            "", f"Entries with refused samples: {', '.join(f'`{n}`' for n in refused) or 'none'}.",
        ]  # fmt: skip
    peers = [o for o in outcomes if o.peer]
    if peers:
        lines += ["", "## Beside Torch-Pruning", ""]
        for kind in dict.fromkeys(o.kind for o in peers):
            own = [o for o in peers if o.kind == kind]
            done, ours = sum(o.peer == "pruned" for o in own), sum("pruned" in o.passed for o in own)
            lines.append(f"Of {len(own)} classification models of {kind} Torch-Pruning's MagnitudePruner prunes {done} "
                         f"in the same run (and the model still runs), `Units.prune` {ours}.")  # fmt: skip
    left = [k for k in ("transformers", "torchvision", "timm") if k not in kinds] + ["operators"] * (not ops)
    if left:
        lines[4:4] = ["", f"Not yet on this page: {', '.join(left)}."]
    lines += ["", "## ONNX", "", onnx]
    for kind in kinds:
        own = [o for o in outcomes if o.kind == kind]
        lines += ["", f"## {kind}", "", "| model | captured | lowered | equal | back | pruned | |",
                  "| --- | :-: | :-: | :-: | :-: | :-: | --- |"]  # fmt: skip
        for o in own:
            marks = " | ".join("yes" if s in o.passed else "**wrong**" if o.wrong else "no" for s in STAGES)
            units = ", ".join(o.units)
            fixed = f"fixed: {', '.join(o.fixed)}" if o.fixed else ""
            why = (o.why if len(o.why) < 140 else o.why[:140] + " ...").replace("|", "\\|").replace("<", "&lt;")
            lines.append(f"| `{o.name}` | {marks} | {'. '.join(p for p in (units, fixed, *o.notes, why) if p)} |")
    return "\n".join(lines) + "\n"


def _installed(name: str) -> bool:
    return importlib.util.find_spec(name.replace("-", "_")) is not None


def onnx_counts() -> tuple[str, int]:
    """Return what the node tests of the onnx package say about `gw.from_onnx`, and the number of wrong ones."""
    from onnx_nodes import count  # pyright: ignore[reportMissingImports]

    found = count(23)
    total = Counter()
    for outcomes in found.values():
        total += Counter(outcomes)
    lacking = [name for name, outcomes in found.items() if not outcomes.get("passed")]
    partly = [name for name, outcomes in found.items() if outcomes.get("passed") and outcomes.get("unsupported")]
    text = (
        f"Node tests of onnx, opsets 13 to 23: {total['passed']} passed, {total['unsupported']} unsupported,"
        f" {total['failed']} failed.\n\nUnsupported: {', '.join(f'`{n}`' for n in lacking)}.\n\n"
        f"In some dtypes or forms: {', '.join(f'`{n}`' for n in partly)}."
    )
    return text, total["failed"]


def main() -> int:
    """Run, print a line per model, write the page."""
    parser = argparse.ArgumentParser(description="Count what gw.from_torch opens.")
    parser.add_argument("--only", nargs="*", default=[], help="names of models or entries of operators")
    parser.add_argument("--kind", nargs="*", default=["operators", "transformers", "torchvision", "timm"])
    parser.add_argument("--json", type=Path, help="write outcomes to this file; read again, those in it are not run")
    parser.add_argument("--seconds", type=float, default=180.0, help="time limit per model or entry")
    parser.add_argument("--processes", type=int, default=1, help="how many run at once")
    parser.add_argument("--no-write", action="store_true", help="do not write docs/conformance.md")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    stored = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    outcomes = [Outcome(**o) for o in stored.get("models", [])]
    ops: dict[str, Any] = stored.get("operators") or {}
    done = {(o.kind, o.name) for o in outcomes}
    with_peer = importlib.util.find_spec("torch_pruning") is not None
    classifiers = set[str]()
    if importlib.util.find_spec("torchvision"):  # before transformers, which imports it as it is
        tv = import_torchvision()
        classifiers = set(tv.models.list_models(module=tv.models))

    def opening(case: Case) -> Callable[[Callable[[Any], None]], None]:
        peer = with_peer and (case.kind == "timm" or case.name in classifiers)

        def run(progress: Callable[[Any], None]) -> None:
            found = open_and_compare(case)
            found.peer = "took too long" if peer else ""
            progress(asdict(found))
            if peer:
                found.peer = _torch_pruning(case)
                progress(asdict(found))

        return run

    wanted = (c for c in cases(options.kind) if (not options.only or c.name in options.only)
              and (c.kind, c.name) not in done)  # fmt: skip
    for case, value, why in apart(((c, opening(c)) for c in wanted), options.seconds, options.processes):
        found = Outcome(**value) if value else Outcome(case.kind, case.name, why=why, seconds=options.seconds)
        outcomes.append(found)
        mark = "WRONG" if found.wrong else found.passed[-1] if found.passed else "failed"
        note = "; ".join([*found.notes, *([f"peer: {found.peer}"] if found.peer else []), found.why])
        print(f"{found.seconds:6.1f} s  {found.kind:13s} {found.name:42s} {mark:9s} {note}", flush=True)
        _store(options.json, outcomes, ops)
    if "operators" in options.kind:
        for name, result in operators(ops, options.seconds, options.processes, options.only):
            ops[name] = result
            print(f"operator {name:40s} {result['counts']}", flush=True)
            _store(options.json, outcomes, ops)
    wrong = sum(o.wrong for o in outcomes) + len(wrong_samples(ops))
    if not options.no_write and not options.only:
        onnx, failed = onnx_counts()
        wrong += failed
        PAGE.write_text(page(outcomes, ops, onnx), "utf-8")
    print(f"{len(outcomes)} models, {len(ops)} entries of operators, wrong: {wrong}")
    return bool(wrong)


def _store(file: Path | None, outcomes: Sequence[Outcome], ops: Mapping[str, Any]) -> None:
    if file is not None:
        text = json.dumps({"models": [asdict(o) for o in outcomes], "operators": ops}, indent=1)
        file.with_suffix(".tmp").write_text(text)
        file.with_suffix(".tmp").replace(file)


if __name__ == "__main__":
    sys.exit(main())
