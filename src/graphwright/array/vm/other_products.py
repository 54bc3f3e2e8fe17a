"""Products for the loops of other groups than `products`: an instruction on the stack, run by that group's function.

A group that called the functions of `products` itself would contain them once more, and they take seconds to compile.
Compiled code knows the address of the group's function by a symbol, so that code from numba's cache finds it in any
process.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import binding, ir
from numba.core import cgutils

from graphwright.array.vm import vector as vec
from graphwright.array.vm.code import CELLS, Code

LOOPS_OF_GROUP = ir.FunctionType(vec.I64, [vec.I64] * 4)
"""The C function of a group: (opcode, address of the instruction, turn, scratch) -> as its loops return."""
ADDRESS = np.zeros(1, np.int64)
"""The address of the function of `products`, once it is compiled or loaded."""
_SYMBOL = "graphwright_vm_products"
binding.add_symbol(_SYMBOL, ADDRESS.ctypes.data)


def _instruction(code: Code, words: int) -> Any:
    """Return a function of words 1 to `words` of an instruction and the scratch, which runs the instruction."""

    def run(builder: Any, *args: Any) -> None:
        row = cgutils.alloca_once(builder, vec.I64, size=CELLS)
        for k, word in enumerate((vec.I64(int(code)), *args[:words])):
            builder.store(word, builder.gep(row, [vec.I64(k)]))
        address = builder.module.globals.get(_SYMBOL) or ir.GlobalVariable(builder.module, vec.I64, _SYMBOL)
        function = builder.inttoptr(builder.load(address), LOOPS_OF_GROUP.as_pointer())
        builder.call(function, [vec.I64(int(code)), builder.ptrtoint(row, vec.I64), vec.I64(0), args[words]])

    return vec.define(code.name.lower(), vec.void, (vec.i64,) * (words + 1), vec.effect(run))


gemm = _instruction(Code.PRODUCT, 13)
"""`products.gemm`."""
rows_f32, rows_bf16, many_bf16 = (_instruction(c, 9) for c in (Code.ROWS_F32, Code.ROWS_BF16, Code.PANELS_BF16))
"""Products with stored weights, of few rows by `rows_f32` and `rows_bf16`, else by `many_bf16`."""
