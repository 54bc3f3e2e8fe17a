"""What a rule looks at: the program as far as it is mended, what is known of it, and a probe if there is one.

Each finding is mended on a fork before the next rule looks, so that what follows from a defect is not reported as a
defect of its own. The program itself is only read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from graphwright.errors import GraphwrightError
from graphwright.graph import NodeId
from graphwright.program import AssemblyReport, Program
from graphwright.surgery.findings.finding import Finding
from graphwright.surgery.findings.limits import Limits
from graphwright.surgery.findings.wiring import Wiring

if TYPE_CHECKING:
    from graphwright.models import Model
    from graphwright.surgery.findings.probe import Probe


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
        from graphwright.surgery.findings.sources import best_source, empty_places

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
