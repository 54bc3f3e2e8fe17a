"""Compile the Triton kernels for a GPU that need not be there, and read what they use of it."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from graphwright.array.triton.kernel import Launch
from graphwright.errors import UsageError
from graphwright.report import Report

_OLDEST = 75
"""The oldest compute capability for which Triton compiles."""


@dataclass(frozen=True)
class Compiled(Report):
    """What a compiled kernel uses.

    Attributes:
        name: the kernel.
        registers: per thread.
        spills: bytes of memory that a thread uses for registers it lacks.
        shared: bytes of shared memory of a block.
        atomics: the atomic instructions in its code.
        ptx, cubin: the code.
    """

    HIDDEN = ("ptx", "cubin")

    name: str
    registers: int
    spills: int
    shared: int
    atomics: tuple[str, ...]
    ptx: str
    cubin: bytes


class _Form:
    """What Triton compiles for a launch: as when it is queued on a GPU of a compute capability."""

    def __init__(self, launch: Launch, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)
        backend, function = make_backend(self.target), launch.function
        bind = create_function_from_signature(function.signature, function.params, backend)
        arguments, self.kinds, left = bind(*launch.args, **launch.constants, **launch.options, debug=False)
        self.options, self.signature, self.constants, self.attributes = function._pack_args(
            backend, left, arguments, self.kinds, left
        )

    @property
    def key(self) -> tuple[str, str]:
        """Equal for launches that share their compiled code."""
        return str(self.kinds), str(self.options)


def form_key(launch: Launch, capability: int = 90) -> tuple[str, str, str]:
    """Return a key that is equal for launches which share their compiled code."""
    return (launch.function.__name__, *_Form(launch, capability).key)


def compile_launch(launch: Launch, capability: int = 90) -> Compiled:
    """Compile the code of a launch ahead of time.

    Args:
        launch: it may be bound to tensors of any device.
        capability: compute capability of the GPU, 10·major + minor.
    Raises: UsageError for GPUs before 7.5, for which LLVM ends the process.
    """
    if capability < _OLDEST:
        raise UsageError("Triton does not compile for this compute capability", where="compile_launch",
                         expected=f">= {_OLDEST}", got=capability, fix="90 for an H100 or H200")  # fmt: skip
    form = _Form(launch, capability)
    source = ASTSource(launch.function, form.signature, form.constants, form.attributes)
    made: Any = triton.compile(source, target=form.target, options=form.options.__dict__)
    ptx, cubin = made.asm["ptx"], made.asm["cubin"]
    registers, spills = _resources(ptx, cubin, capability)
    atomics = tuple(re.findall(r"^\s*(?:@\S+\s+)?((?:atom|red)\..*)", ptx, re.MULTILINE))
    return Compiled(launch.function.__name__, registers, spills, made.metadata.shared, atomics, ptx, cubin)


def _resources(ptx: str, cubin: bytes, capability: int) -> tuple[int, int]:
    """Return (registers of a thread, bytes of registers that it spills to memory) of the code of one kernel."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(cubin)
        text = _output(knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file))
        counts = (max(map(int, re.findall(rf"{what}:(\d+)", text))) for what in ("REG", "STACK", "LOCAL"))
        registers, stack, local = counts
        if not stack + local:
            return registers, 0
        source = Path(folder, "kernel.ptx")  # the stack may hold an array, such as one of a cosine: the assembler knows
        source.write_text(ptx)
        arch = f"--gpu-name={sm_arch_from_capability(capability)}"
        text = _output(get_ptxas(capability).path, "-v", "--regAllocOptLevel=2", arch, str(source), "-o", str(file))
    return registers, max(map(int, re.findall(r"(\d+) bytes spill stores", text)))


def _output(*command: str) -> str:
    """Return what a command prints."""
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout + done.stderr
