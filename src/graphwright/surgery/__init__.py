"""Surgery: what is wrong with a model, what it can do without, and what an operation cost it."""

from __future__ import annotations

from graphwright.surgery.diagnose import diagnose, diagnose_model
from graphwright.surgery.findings import Diagnosis, Finding, Findings, Fix, Limits, Severity, finding

__all__ = ["Diagnosis", "Finding", "Findings", "Fix", "Limits", "Severity", "diagnose", "diagnose_model", "finding"]
