"""Plans: a program as tables with static addresses, and the memory they run in."""

from __future__ import annotations

from graphwright.plan.compile import CompiledFunction, CompiledProgram, compile, compile_program, plan_for
from graphwright.plan.describe import PlanDiff
from graphwright.plan.errors import DeviceFailed, OutOfMemory, StepTorn
from graphwright.plan.plan import Options, Plan, StalePlan
from graphwright.plan.planning.buffer_layout import Patched
from graphwright.plan.planning.hazards import Region
from graphwright.plan.planning.planner import make_plan
from graphwright.plan.planning.remat import BudgetImpossible
from graphwright.plan.running.capture import CaptureRefused, CaptureState, CaptureTimeout, CaptureWorkspace
from graphwright.plan.running.executable import StaleLease, Workspace
from graphwright.plan.running.override import OverrideFailed, OverrideMismatch
from graphwright.plan.running.parallel import Cancelled, CancelToken, DeadlineExceeded, ParallelWorkspace
from graphwright.plan.table import Buffer, Firing, Instr, Placed, Schedule, Segment, Slot

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
