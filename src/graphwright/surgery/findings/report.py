"""Findings: the result of a diagnosis, which can be printed, drawn, stored as JSON, and fixed in one edit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphwright.errors import UsageError
from graphwright.program.draw import NodeNote
from graphwright.program.kinds import STORED
from graphwright.surgery.findings.finding import Finding, Severity

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.program import Entry, Program
    from graphwright.surgery.findings.finding import Fix

SCHEMA = 1
TOOL = "graphwright diagnose"


@dataclass(frozen=True, slots=True, repr=False)
class Findings(Sequence[Finding]):
    """The findings of a diagnosis; false if there are none.

    Attributes:
        program: the diagnosed one.
        version: of the program at that time.
        found: the findings, the most severe first.
        asked: names of the rules that ran.
        complete: False if the caller cancelled.
    """

    program: Program
    version: int
    found: tuple[Finding, ...]
    asked: tuple[str, ...]
    complete: bool = True

    # -- access ------------------------------------------------------------------------------------------------------
    def __getitem__(self, index: Any) -> Any:
        return self.found[index]

    def __len__(self) -> int:
        return len(self.found)

    def __iter__(self) -> Iterator[Finding]:
        return iter(self.found)

    def of(self, kind: str) -> tuple[Finding, ...]:
        """Findings of one kind."""
        return tuple(f for f in self.found if f.kind == kind)

    def counts(self) -> dict[str, int]:
        """Severity -> number of findings, the worst first."""
        found = Counter(f.severity for f in self.found)
        return {str(s): found[s] for s in sorted(Severity, reverse=True)}

    def to_json(self) -> dict[str, Any]:
        """The report as plain values."""
        return {
            "schema": SCHEMA,
            "program": self.program.name,
            "version": self.version,
            "complete": self.complete,
            "kinds": list(self.asked),
            "counts": self.counts(),
            "findings": [f.to_json() for f in self.found],
        }

    def __str__(self) -> str:
        if not self.found:
            return f"{self.program.name}: no defects ({len(self.asked)} kinds)"
        counts = ", ".join(f"{n} {name}" for name, n in self.counts().items() if n)
        rows = [(str(f.severity), f.kind, f.where, _sentence(f), _offer(f)) for f in self.found]
        widths = [max(len(row[i]) for row in rows) for i in range(3)]
        lines = [f"{self.program.name}: {len(self.found)} finding{'s'[: len(self.found) > 1]} ({counts})"]
        for severity, kind, where, what, offer in rows:
            lines.append(f"  {severity:<{widths[0]}}  {kind:<{widths[1]}}  {where:<{widths[2]}}  {what}")
            lines.append(f"  {'':<{widths[0]}}  {'':<{widths[1]}}  {'':<{widths[2]}}  {offer}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Findings({len(self.found)} in {self.program.name!r}: {dict(Counter(f.kind for f in self.found))})"

    def overlay(self) -> dict[NodeId, NodeNote]:
        """Marks for pictures: node -> worst severity and texts, for `program.to_html(overlay=...)`.

        Nodes that no longer exist are left out.
        """
        by_node: dict[NodeId, list[Finding]] = {}
        for f in self.found:
            ends = [self.program.graph.target(e) for e in f.edges if e in self.program.graph]
            here = [n for n in dict.fromkeys((*f.nodes, *ends)) if n in self.program.graph]
            if here and self.program.op(here[0]) in STORED:  # weights are drawn inside their readers
                here += [n for n in self.program.consumers(here[0]) if n not in here]
            for node in here:
                by_node.setdefault(node, []).append(f)
        return {
            node: NodeNote(
                int(max(f.severity for f in found)), "\n".join(f"{f.severity}: {f.kind}: {f.what}" for f in found)
            )
            for node, found in by_node.items()
        }

    # -- fixing ------------------------------------------------------------------------------------------------------
    def fix(self, finding: Finding, fix: Fix | None = None) -> Entry:
        """Fix one finding by its cheapest fix, or by another one of its fixes, as one edit.

        Raises: UsageError if there is no fix; errors of the edit, with the program as before.
        """
        chosen = fix or finding.cheapest()
        if chosen is None:
            raise UsageError("the finding has no fix", where=finding.where, got=finding.kind)
        self._make([(finding, chosen)], f"fix {finding.kind}: {chosen.what}")
        return self.program.journal[-1]

    def fix_all(self, only: str | None = "keeps_function") -> tuple[Finding, ...]:
        """Fix all fixable findings in one edit, each by its cheapest fix.

        Args:
            only: "keeps_function" uses fixes that change no result; None uses any.
        Returns: the fixed findings. Raises: UsageError for another `only`; SpecMismatch and others if the result does
            not fit, with the program as before.
        """
        if only not in ("keeps_function", None):
            raise UsageError("unknown value of only", expected='"keeps_function" or None', got=only)
        pairs = [(f, fix) for f in self.found if (fix := f.cheapest(only)) is not None]
        if pairs:
            self._make(pairs, f"fix {len(pairs)} finding{'s'[: len(pairs) > 1]}")
        return tuple(f for f, _ in pairs)

    def _make(self, pairs: list[tuple[Finding, Fix]], why: str) -> None:
        p = self.program
        if p.version != self.version:
            raise UsageError(
                "the program changed after the diagnosis",
                where=p.name,
                expected=f"version {self.version}",
                got=f"version {p.version}",
                fix="diagnose the program again",
            )
        with p.edit(why, tool=TOOL, check=p.valid) as e:
            for _, fix in pairs:
                fix.apply(e)


def _sentence(f: Finding) -> str:
    known = [f"{name} {value}" for name, value in (("expected", f.expected), ("got", f.got)) if value]
    return f.what + (f" ({', '.join(known)})" if known else "")


def _offer(f: Finding) -> str:
    fix = f.cheapest()
    if fix is None:
        return "no fix"
    return f"fix: {fix.what}" + (" (keeps the function)" if fix.keeps_function else "")
