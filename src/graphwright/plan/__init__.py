"""Plans: programs compiled to tables of instructions with static memory offsets, and the executables that run them."""

from __future__ import annotations

from graphwright.plan.chrome_trace import Event
from graphwright.plan.compile import compile_program, plan_for
from graphwright.plan.compiled import CompiledFunction, CompiledProgram, compile
from graphwright.plan.describe import PlanDiff
from graphwright.plan.errors import DeviceFailed, PlanOutOfMemory, StalePlan, StepTorn
from graphwright.plan.options import CompileOptions
from graphwright.plan.plan import Plan, make_plan
from graphwright.plan.planning.hazards import Region
from graphwright.plan.planning.planner import Patched
from graphwright.plan.planning.remat import BudgetImpossible
from graphwright.plan.profiler import OpTimes, profile
from graphwright.plan.running.capture import CaptureExecutable, CaptureRefused, CaptureState, CaptureTimeout
from graphwright.plan.running.executable import BoundCall, Executable
from graphwright.plan.running.memory import StaleBorrow
from graphwright.plan.running.override import OverrideFailed, OverrideMismatch
from graphwright.plan.running.parallel import Cancelled, CancelToken, DeadlineExceeded, ParallelExecutable
from graphwright.plan.table import ArenaSpan, Buffer, DispatchSchedule, Firing, Instr, Segment, Slot

__all__ = [
    "ArenaSpan", "BoundCall", "BudgetImpossible", "Buffer", "CancelToken", "Cancelled", "CaptureExecutable",
    "CaptureRefused", "CaptureState", "CaptureTimeout", "CompileOptions", "CompiledFunction", "CompiledProgram",
    "DeadlineExceeded", "DeviceFailed", "DispatchSchedule", "Event", "Executable", "Firing", "Instr", "OpTimes",
    "OverrideFailed", "OverrideMismatch", "ParallelExecutable", "Patched", "Plan", "PlanDiff", "PlanOutOfMemory",
    "Region", "Segment", "Slot", "StaleBorrow", "StalePlan", "StepTorn", "compile", "compile_program", "make_plan",
    "plan_for", "profile",
]  # fmt: skip
