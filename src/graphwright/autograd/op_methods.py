"""Methods of tensors that are one op each, from the `method` cells of ops; `op_methods.pyi` has the signatures."""

from graphwright.ops import surface

OpMethods = type(
    "OpMethods", (), {"__slots__": (), "__doc__": "Methods of a tensor, one op each.", **surface.methods()}
)
