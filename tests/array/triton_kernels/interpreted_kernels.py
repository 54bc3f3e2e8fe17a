"""Runs Triton kernels in Triton's interpreter and prints a JSON line for each case: its name and what is wrong.

A process of its own, with TRITON_INTERPRET=1: Triton reads the variable when it defines a function.
Arguments: "quick" (key cases, the first of each op, every sixth one) or "deep", then names of families.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
import warnings

import interpreter_rounding
import kernel_cases
import torch
from kernel_checks import wrong

__all__ = ["interpreter_rounding"]

if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy's, for infinities and NaN in the interpreter
    deep, families = sys.argv[1] == "deep", sys.argv[2:] or kernel_cases.FAMILIES
    twice: set[str] = set()  # ops of which a case has run twice
    for family in families:
        started = time.process_time()
        for number, (name, case) in enumerate(kernel_cases.FAMILIES[family](deep)):
            if not deep and case.op in twice and number % 6 and not case.key:
                continue
            try:
                found = wrong(case, 2 if deep or case.op not in twice else 1)
            except Exception:  # an interpreter error is a result
                found = traceback.format_exc()[-1500:]
            twice.add(case.op)
            print(json.dumps([f"{family} {name}", found]), flush=True)
        print(json.dumps([f"{family} seconds", round(time.process_time() - started, 2)]), flush=True)
