"""What can be wrong with a network: one file per family of kinds, and the report."""

from __future__ import annotations

from graphwright.surgery.findings.diagnosis import Diagnosis
from graphwright.surgery.findings.finding import Finding, Fix, Limits, Severity
from graphwright.surgery.findings.kinds import finding
from graphwright.surgery.findings.report import Findings

__all__ = ["Diagnosis", "Finding", "Findings", "Fix", "Limits", "Severity", "finding"]
