"""Plans: a program as tables with static addresses, and the memory they run in."""

from __future__ import annotations

from graphwright.plan.compile import CompiledFunction, CompiledProgram, compile, compile_program, plan_for
from graphwright.plan.plan import Plan, StalePlan, make_plan
from graphwright.plan.table import Buffer, Instr, Slot
from graphwright.plan.workspace import Workspace
from graphwright.program import Program

Program.compiler = compile_program

__all__ = ["Buffer", "CompiledFunction", "CompiledProgram", "Instr", "Plan", "Slot", "StalePlan", "Workspace", "compile",
           "compile_program", "make_plan", "plan_for"]  # fmt: skip
