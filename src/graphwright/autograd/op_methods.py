"""Methods of tensors that are one op each, from the field `method` of op definitions; typed in `op_methods.pyi`."""

from graphwright.ops import surface

OpMethods = type(
    "OpMethods", (), {"__slots__": (), "__doc__": "Methods of a tensor, one op each.", **surface.methods()}
)
