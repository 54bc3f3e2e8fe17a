"""Plans: a program as tables with static addresses, and the memory they run in."""

from __future__ import annotations

from graphwright.plan.compile import CompiledFunction, CompiledProgram, compile, compile_program, plan_for
from graphwright.plan.lease import StaleLease
from graphwright.plan.plan import Firing, Options, Patched, Plan, StalePlan
from graphwright.plan.planner import make_plan
from graphwright.plan.table import Buffer, Instr, Schedule, Segment, Slot
from graphwright.plan.workspace import StepTorn, Workspace
from graphwright.program import Program

Program.compiler = compile_program

__all__ = [
    "Buffer",
    "CompiledFunction",
    "CompiledProgram",
    "Firing",
    "Instr",
    "Options",
    "Patched",
    "Plan",
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
