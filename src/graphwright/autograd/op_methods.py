"""Methods of tensors from the table of torch's names; typed in `op_methods.pyi`."""

from graphwright.autograd import (  # noqa: F401  # fill the table
    counting,
    indexing,
    names,
    pointwise,
    products,
    queries,
    reductions,
    shapes,
)

OpMethods = type(
    "OpMethods", (), {"__slots__": (), "__doc__": "Methods of a tensor by torch's names.", **names.methods()}
)
