"""The state that rules work on: a fork of the program with earlier findings fixed, cached analyses, and a probe.

Each finding is fixed on the fork before the next rule runs, so that the consequences of a defect are not reported as
further defects. The diagnosed program is not changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from graphwright.errors import GraphwrightError
from graphwright.graph import NodeId
from graphwright.progress import Progress, ProgressCallback
from graphwright.surgery.findings.finding import Finding, Limits
from graphwright.surgery.findings.wiring import Wiring, best_source, empty_ports

if TYPE_CHECKING:
    from graphwright.models.model import Model
    from graphwright.program.op_graph import Value
    from graphwright.program.program import Program
    from graphwright.program.run import Run
    from graphwright.program.validate import Mismatch


class Diagnosis:
    """The state of a diagnosis, which rules read.

    Attributes:
        original: the diagnosed program.
        program: `original`, or a fork of it in which the findings so far are fixed.
        model: the model of the program, or None; rules read its config and checkpoint.
        limits: thresholds of the rules.
        probe: a batch and a loss, or None.
    """

    def __init__(
        self, program: Program, model: Model | None = None, limits: Limits | None = None, probe: Probe | None = None
    ) -> None:
        self.original = self.program = program
        self.model, self.limits, self.probe = model, limits or Limits(), probe
        self._cached: dict[str, tuple[int, Any]] = {}

    def _of_version(self, name: str, make: Callable[[], Any]) -> Any:
        """Return the value of `make`, which is called once per version of the program and cached under a name."""
        known = self._cached.get(name)
        if known is None or known[0] != self.program.version:
            known = self._cached[name] = self.program.version, make()
        return known[1]

    @property
    def wiring(self) -> Wiring:
        """The graph of the program as lists; see `Wiring`."""
        return self._of_version("wiring", lambda: Wiring(self.program))

    @property
    def mismatches(self) -> Sequence[Mismatch]:
        """Mismatches that `program.validate()` reports; empty, without a check, if the program is known to be valid."""
        return () if self.program.valid else self._of_version("mismatches", lambda: self.program.validate().mismatches)

    @property
    def claimed(self) -> dict[NodeId, NodeId]:
        """Map each unread node that is the best source for an empty port or junction to the node with that port."""

        def claim() -> dict[NodeId, NodeId]:
            p, w = self.program, self.wiring
            best = ((node, best_source(p, w, node, port)) for node, port in empty_ports(p, w))
            return {value.node: node for node, value in best if value is not None and w.unread(w.at[value.node])}

        return self._of_version("claimed", claim)

    def apply_fix(self, finding: Finding) -> None:
        """Apply the cheapest fix of a finding to the fork; a fix that fails leaves the fork unchanged."""
        if not finding.fixes:
            return
        if self.program is self.original:
            self.program = self.original.fork()
        try:
            with self.program.edit(finding.what, author="pass", check=self.program.valid, keep_undo=False) as e:
                finding.fixes[0].apply(e)
        except GraphwrightError:
            return


class DiagnosisCancelled(Exception):
    """Internal signal that the caller cancelled the diagnosis; `diagnose` catches it and returns its findings."""


Step = Callable[[str, int, int], None]
"""Report progress: what, steps done, and all steps. Raises: DiagnosisCancelled."""


def stepper(progress: ProgressCallback | None, cancel: Callable[[], bool] | None) -> Step:
    """Return a function that reports progress, and raises DiagnosisCancelled once `cancel` returns True."""

    def step(what: str, done: int, total: int) -> None:
        if progress is not None:
            progress(Progress(what, done, total))
        if cancel is not None and done < total and cancel():
            raise DiagnosisCancelled

    return step


_Item = TypeVar("_Item")


def stepped(step: Step, what: str, items: Sequence[_Item]) -> Iterator[_Item]:
    """Iterate over items, and report progress before each of them and after the last."""
    for at, item in enumerate(items):
        step(what, at, len(items))
        yield item
    step(what, len(items), len(items))


class Probe:
    """A batch on which rules run the program.

    Attributes:
        inputs: arrays by input name.
        loss: name of an output or node whose sum is the loss; a function that adds a loss to a fork and returns the
            name of the loss; or None.
        step: function that reports progress; see `Step`.
    """

    def __init__(self, inputs: Mapping[str, Any], loss: str | Callable[[Program], str] | None, step: Step) -> None:
        self.inputs, self.loss, self.step = dict(inputs), loss, step
        self._run: tuple[Program, int, Run, str | None] | None = None

    def run(self, p: Program) -> Run:
        """Run a fork of the program on the batch; return the run, which holds all values. Cached per version."""
        return self._made(p)[2]

    def _made(self, p: Program) -> tuple[Program, int, Run, str | None]:
        if self._run is None or self._run[0] is not p or self._run[1] != p.version:
            self.step("probe", 0, 1)
            twin = p.fork()
            name = self.loss(twin) if callable(self.loss) else self.loss
            self._run = p, p.version, twin.run(self.inputs), name
            self.step("probe", 1, 1)
        return self._run

    def gradients(self, p: Program, wrt: Sequence[Value]) -> dict[Value, np.ndarray]:
        """Return a dict from value to the float64 gradient of the loss; empty if the probe has no loss."""
        _, _, made, loss = self._made(p)
        if loss is None or not wrt:
            return {}
        self.step("gradients", 0, 1)
        found = made.grad(loss, list(wrt))
        self.step("gradients", 1, 1)
        return {v: g.to_numpy("float64") for v, g in zip(wrt, found, strict=True)}
