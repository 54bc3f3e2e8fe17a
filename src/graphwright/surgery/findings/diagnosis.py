"""What a rule looks at: the program as far as it is mended, what is known of it, and a probe if there is one.

Each finding is mended on a fork before the next rule looks, so that what follows from a defect is not reported as a
defect of its own. The program itself is only read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.errors import GraphwrightError
from graphwright.program import AssemblyReport
from graphwright.progress import Progress
from graphwright.surgery.findings.wiring import Wiring

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.models import Model
    from graphwright.program import Program, Run, Value
    from graphwright.progress import Report
    from graphwright.surgery.findings.finding import Finding, Limits


class Diagnosis:
    """One look at a program.

    Attributes:
        original: the program asked about.
        program: a fork of it as soon as something was mended.
        model: what it belongs to, if that is known: config, checkpoint.
        limits: from where on something is a finding.
        probe: a batch and a loss, if given.
    """

    def __init__(self, program: Program, model: Model | None, limits: Limits, probe: Probe | None) -> None:
        self.original = self.program = program
        self.model, self.limits, self.probe = model, limits, probe
        self._known: tuple[int, Wiring] | None = None
        self._report: tuple[int, AssemblyReport] | None = None
        self._claimed: tuple[int, dict[NodeId, NodeId]] | None = None

    @property
    def wiring(self) -> Wiring:
        """Its graph as lists."""
        if self._known is None or self._known[0] != self.program.version:
            self._known = self.program.version, Wiring(self.program)
        return self._known[1]

    @property
    def assembly(self) -> AssemblyReport:
        """What `validate()` says of it; what is valid fits by the invariant of `Program`."""
        p = self.program
        if p.valid:
            return AssemblyReport((), len(p), p.graph.edge_count)
        if self._report is None or self._report[0] != self.program.version:
            self._report = self.program.version, self.program.validate()
        return self._report[1]

    @property
    def claimed(self) -> dict[NodeId, NodeId]:
        """Unread nodes that an empty port or junction misses -> who misses them."""
        from graphwright.surgery.findings.interface import best_source, empty_places

        if self._claimed is None or self._claimed[0] != self.program.version:
            found: dict[NodeId, NodeId] = {}
            w = self.wiring
            for node, port in empty_places(self.program, w):
                best = best_source(self.program, w, node, port)
                if best is not None and w.unread(w.at[best.node]):
                    found[best.node] = node
            self._claimed = self.program.version, found
        return self._claimed[1]

    def mend(self, finding: Finding) -> None:
        """Make the first fix of a finding on the fork; one that fails there leaves it as it is."""
        if not finding.fixes:
            return
        if self.program is self.original:
            self.program = self.original.fork()
        try:
            with self.program.edit(finding.what, author="pass", check=self.program.valid, keep_undo=False) as e:
                finding.fixes[0].apply(e)
        except GraphwrightError:
            return


class Cancelled(Exception):
    """The caller wants no more; what was found so far is kept."""


class Probe:
    """What rules of the kind `probe` run.

    Attributes:
        inputs: arrays by input name.
        loss: name of an output or node whose sum is the loss; or a function that adds one to a fork and gives its name;
            None if none was given.
    """

    def __init__(
        self,
        inputs: Mapping[str, Any],
        loss: str | Callable[[Program], str] | None,
        report: Report | None = None,
        cancel: Callable[[], bool] | None = None,
    ) -> None:
        self.inputs, self.loss = dict(inputs), loss
        self._report, self._cancel = report, cancel
        self._run: tuple[Program, int, Run, str | None] | None = None

    def step(self, what: str, done: int, total: int) -> None:
        """Report progress. Raises: Cancelled."""
        if self._report is not None:
            self._report(Progress(what, done, total))
        if self._cancel is not None and self._cancel():
            raise Cancelled

    def run(self, p: Program) -> Run:
        """All values of one run; states are written on a fork only."""
        return self._made(p)[2]

    def _made(self, p: Program) -> tuple[Program, int, Run, str | None]:
        if self._run is None or self._run[0] is not p or self._run[1] != p.version:
            self.step("probe", 0, 1)
            twin = p.fork()
            name = self.loss(twin) if callable(self.loss) else self.loss
            self._run = p, p.version, twin.run(self.inputs), name
        return self._run

    def gradients(self, p: Program, wrt: Sequence[Value]) -> dict[Value, np.ndarray]:
        """D loss / d of some values, as float64 arrays."""
        _, _, made, loss = self._made(p)
        if loss is None or not wrt:
            return {}
        self.step("gradients", 0, 1)
        found = made.grad(loss, list(wrt))
        return {v: g.to_numpy("float64") for v, g in zip(wrt, found, strict=True)}
