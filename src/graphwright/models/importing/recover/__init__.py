"""Recovery: regions of plain ops in an imported program as the ops that they mean."""

from __future__ import annotations

from graphwright.models.importing.recover.recovery import recover
from graphwright.models.importing.recover.report import Recovered

__all__ = ["Recovered", "recover"]
