"""Methods of tensors from the table of torch's names; typed in `op_methods.pyi`."""

from graphwright.autograd import counting, indexing, names, pointwise, products, reductions, shapes  # noqa: F401  # fill the table

OpMethods = type(
    "OpMethods", (), {"__slots__": (), "__doc__": "Methods of a tensor by torch's names.", **names.methods()}
)
