"""Plans: a program as tables with static addresses, and the memory they run in."""

from __future__ import annotations

from graphwright.plan.arranged import Patched
from graphwright.plan.capture import CaptureRefused, CaptureState, CaptureTimeout, CaptureWorkspace
from graphwright.plan.compare import PlanDiff
from graphwright.plan.compile import CompiledFunction, CompiledProgram, compile, compile_program, plan_for
from graphwright.plan.decoded import Options
from graphwright.plan.errors import DeviceFailed, OutOfMemory, StepTorn
from graphwright.plan.lease import StaleLease
from graphwright.plan.override import OverrideFailed, OverrideMismatch
from graphwright.plan.parallel import Cancelled, CancelToken, DeadlineExceeded, ParallelWorkspace
from graphwright.plan.plan import Plan, StalePlan
from graphwright.plan.planner import make_plan
from graphwright.plan.regions import Region
from graphwright.plan.remat import BudgetImpossible
from graphwright.plan.table import Buffer, Firing, Instr, Placed, Schedule, Segment, Slot
from graphwright.plan.workspace import Workspace

__all__ = [
    "BudgetImpossible",
    "Buffer",
    "CancelToken",
    "Cancelled",
    "CaptureRefused",
    "CaptureState",
    "CaptureTimeout",
    "CaptureWorkspace",
    "CompiledFunction",
    "CompiledProgram",
    "DeadlineExceeded",
    "DeviceFailed",
    "Firing",
    "Instr",
    "Options",
    "OutOfMemory",
    "OverrideFailed",
    "OverrideMismatch",
    "ParallelWorkspace",
    "Patched",
    "Placed",
    "Plan",
    "PlanDiff",
    "Region",
    "Schedule",
    "Segment",
    "Slot",
    "StaleLease",
    "StalePlan",
    "StepTorn",
    "Workspace",
    "compile",
    "compile_program",
    "make_plan",
    "plan_for",
]
