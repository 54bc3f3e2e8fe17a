"""`from_onnx`: an ONNX file as a program."""

from __future__ import annotations

import json
import mmap
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from math import prod
from os import fspath
from pathlib import Path
from typing import Any

import numpy as np

from graphwright.array import NDArray, Spec, from_numpy
from graphwright.array.sizes import is_dim_name
from graphwright.autograd import Tensor
from graphwright.errors import GraphwrightError, MissingExtra, UsageError
from graphwright.files import StrPath
from graphwright.models.errors import ModelNotFound, OnnxFileError, UnsupportedOperator
from graphwright.models.importing.onnx_joins import join_linear
from graphwright.models.importing.onnx_lower import LoweredGraph, OnnxGraph, OnnxNode, clean
from graphwright.models.importing.onnx_operators import OPERATORS, NotExpressible
from graphwright.models.importing.onnx_operators.table import MOST_ENTRIES, dtype_of, type_name
from graphwright.models.importing.recover import recover as recover_meaning
from graphwright.models.importing.report import Imported
from graphwright.models.onnx import TRAINED
from graphwright.program.builder import record
from graphwright.program.patterns import adopt_all
from graphwright.program.program import Program
from graphwright.program.residual_sums import join_residuals

try:
    import onnx
    import onnx.external_data_helper
    import onnx.version_converter
    from onnx import AttributeProto, ModelProto, TensorProto, numpy_helper
except ImportError as error:
    raise MissingExtra("onnx", "ONNX") from error

OPSETS = range(13, 29)
"""Versions of the operator set that can be imported."""
OLDEST = 7
"""The first version of the operator set that onnx converts to a later one."""
MOST_NODES = 1_000_000
"""Nodes of a graph, after its functions are inlined, above which a file counts as hostile."""
_EXAMPLES = ((11, 13, 17, 19, 23, 29, 31, 37), (211, 223, 227, 229, 233, 239, 241, 251),
             (192, 320, 448, 576, 704, 832, 960, 1088))  # fmt: skip
"""Values of the named sizes while a graph is traced. They decide nothing; a later row is tried where sizes are too
small, or do not divide."""

Shape = Sequence[int | str | None]


def from_onnx(
    source: StrPath | ModelProto, *, sizes: Mapping[str, Shape] | None = None, name: str | None = None,
    recover: bool = True,
) -> Program:  # fmt: skip
    """Open an ONNX file as a program, which can be edited, trained, drawn and exported.

    Args:
        source: path of a file, or a model in memory. Its operators are those of the opsets 13 to 28 of `ai.onnx`; onnx
            itself converts the opsets 7 to 12 to 13 first.
        sizes: input -> its shape of ints and names, where the file's own are not wanted; None keeps the file's size.
            A size that the file leaves open has the file's name for it and stays variable.
        name: name of the program; by default that of the graph.
        recover: replace regions of plain ops by the ops that they mean, each proved on random values first.
    Returns: a program whose inputs, outputs and weights have the names of the file, and whose nodes the names of its
        nodes; `program.imported` reports what was recovered. Weights are floating initializers with axes; they are
        mapped from the file where it stores them outside, and copied before an edit or a training step writes them.
    Raises: UnsupportedOperator naming all operators that cannot be imported; OnnxFileError for a damaged file;
        ModelNotFound; UsageError for sizes that do not fit; MissingExtra.

    >>> program = gw.from_onnx("model.onnx", sizes={"x": ("B", 3, 224, 224)})
    """
    model, folder = _opened(source)
    model = _inlined(_current(model, folder))
    graph, shapes = _read(model, folder)
    wanted = _shapes(shapes, sizes or {})
    lowered = LoweredGraph(graph)
    program = _traced(lowered, wanted, recover)
    program.name = name or model.graph.name or "onnx"
    return program


def _traced(lowered: LoweredGraph, inputs: Mapping[str, tuple[Shape, Any]], recover: bool) -> Program:
    """Record a graph for inputs of these shapes and dtypes."""
    names = list(dict.fromkeys(n for shape, _ in inputs.values() for n in shape if isinstance(n, str)))
    labels = _distinct(inputs)
    first: GraphwrightError | None = None
    for row in _EXAMPLES if names else _EXAMPLES[:1]:
        numbers = (v * i for i in count(1) for v in row)
        values = dict(zip(names, numbers, strict=False))
        specs = [Spec(tuple(values[n] if isinstance(n, str) else n or 0 for n in shape), kind)
                 for shape, kind in inputs.values()]  # fmt: skip
        sizes = {label: shape for label, (shape, _) in zip(labels, inputs.values(), strict=True)
                 if any(isinstance(n, str) for n in shape)}  # fmt: skip
        try:
            program, recorder, _ = record(lowered, specs, None, labels, sizes or None, stops=True)
        except UnsupportedOperator:
            raise
        except GraphwrightError as error:
            first = first or error
            continue
        join_residuals(program, {program.node(recorder.program.path(n)) for n in recorder.recomputed.backward})
        found = recover_meaning(program) if recover else None
        adopt_all(program)
        operators = Counter(node.kind for node in lowered.graph.nodes)
        program.imported = Imported.of("ONNX file", operators, found, {})
        return program
    assert first is not None
    if names:
        first.add_note(f"traced with the named sizes {', '.join(names)}; sizes= can make sizes equal, or fix them")
    raise first


# -- the file ----------------------------------------------------------------------------------------------------------
def _opened(source: Any) -> tuple[ModelProto, Path | None]:
    if isinstance(source, ModelProto):
        return source, None
    path = Path(fspath(source))
    if not path.is_file():
        raise ModelNotFound("there is no such file", where=path, expected="an ONNX file")
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's errors have no common class
        raise OnnxFileError("the file is not an ONNX file, or is damaged", where=path, got=str(error)[:200]) from error
    if not model.HasField("graph") or not model.opset_import:
        raise OnnxFileError("the file has no graph or no version of an operator set", where=path)
    return model, path.parent


def _current(model: ModelProto, folder: Path | None) -> ModelProto:
    """Return a model of an opset before those that can be imported as one of the first of these, by onnx's converter.

    Raises: OnnxFileError if the converter cannot.
    """
    versions = [o.version for o in model.opset_import if o.domain in ("", "ai.onnx")]
    if not versions or not OLDEST <= versions[0] < OPSETS[0]:
        return model
    try:
        if folder is not None:
            onnx.external_data_helper.load_external_data_for_model(model, str(folder))
        return onnx.version_converter.convert_version(model, OPSETS[0])
    except Exception as error:  # of its C++ code, without a common class
        raise OnnxFileError("onnx cannot convert the file to a later version of the operator set", where="opset_import",
                            expected=f"{OPSETS[0]} to {OPSETS[-1]}", got=f"{versions[0]}: {str(error)[:200]}",
                            fix="export the network again with a later version") from error  # fmt: skip


def _inlined(model: ModelProto) -> ModelProto:
    """Return a model without functions of its own: each call is replaced by the nodes of the function."""
    if not model.functions:
        return model
    from onnx.inliner import inline_local_functions

    bodies = {(f.domain, f.name): [(n.domain, n.op_type) for n in f.node] for f in model.functions}
    counts: dict[tuple[str, str], int] = {}

    def size(key: tuple[str, str], inside: tuple[tuple[str, str], ...]) -> int:
        if key not in bodies:
            return 1
        if key in inside or len(inside) > 100:
            raise OnnxFileError("a function of the file calls itself", where=key[1])
        if key not in counts:
            counts[key] = sum(size(k, (*inside, key)) for k in bodies[key])
        return counts[key]

    total = sum(size((n.domain, n.op_type), ()) for n in model.graph.node)
    if total > MOST_NODES:
        raise OnnxFileError("the graph is too large", expected=f"at most {MOST_NODES} nodes", got=total)
    return inline_local_functions(model)


def _read(model: ModelProto, folder: Path | None) -> tuple[OnnxGraph, dict[str, Any]]:
    """Return the graph, and the types of its inputs. Raises: OnnxFileError, UnsupportedOperator."""
    graph = model.graph
    versions = {o.domain if o.domain != "ai.onnx" else "": o.version for o in model.opset_import}
    opset = versions.get("", 0)
    if opset not in OPSETS:
        raise OnnxFileError("this version of the operator set cannot be imported", where="opset_import",
                            expected=f"{OPSETS[0]} to {OPSETS[-1]}", got=opset,
                            fix="export the network again with one of these")  # fmt: skip
    _check_names(graph)
    generated = model.producer_name == "graphwright"
    refused: dict[str, list[str]] = {}
    nodes = [_node(n, opset, generated, refused) for n in graph.node]
    stored = {t.name for t in graph.initializer}
    inputs = {i.name: i.type for i in graph.input if i.name not in stored}
    for sparse in graph.sparse_initializer:
        refused.setdefault("sparse initializer", []).append(sparse.values.name)
    for tensor in graph.initializer:
        number = int(tensor.data_type)
        wide = number in _UNPACKED and all(n.kind in _UNPACKS for n in nodes if tensor.name in n.inputs)
        _check_type(_UNPACKED[number] if wide else number, tensor.name, refused)
    for label, kind in inputs.items():
        if kind.WhichOneof("value") != "tensor_type":
            refused.setdefault(f"input that is a {str(kind.WhichOneof('value')).removesuffix('_type')}", []).append(
                label
            )
        else:
            _check_type(kind.tensor_type.elem_type, label, refused)
    for output in graph.output:
        if output.type.WhichOneof("value") not in (None, "tensor_type"):
            refused.setdefault("output that is not a tensor", []).append(output.name)
    _check_order(nodes, stored, inputs, [o.name for o in graph.output])
    _check_known(nodes, stored, opset, refused)
    if refused:
        lines = [f"{name} ({len(where)}x): {where[0]}" for name, where in sorted(refused.items())]
        raise UnsupportedOperator("the graph has operators that cannot be imported", got="; ".join(lines),
                                  operators={n: tuple(p) for n, p in sorted(refused.items())})  # fmt: skip
    read = _Tensors(folder)
    tensors = {t.name: read(t) for t in graph.initializer}
    _check_declared(graph, tensors)
    trained = next((frozenset(_names(p.value)) for p in model.metadata_props if p.key == TRAINED), None)
    outputs = tuple(o.name for o in graph.output)
    return OnnxGraph(opset, join_linear(nodes, tensors, outputs), tuple(inputs), outputs, tensors, trained), inputs


def _check_names(graph: Any) -> None:
    """Raise OnnxFileError for a name that is not UTF-8, which protobuf returns as bytes."""
    for node in graph.node:
        _check_text(node.name, node.op_type, node.domain, *node.input, *node.output, *(a.name for a in node.attribute))
    for value in (*graph.input, *graph.output, *graph.value_info):
        _check_text(value.name, *(d.dim_param for d in value.type.tensor_type.shape.dim))
    for tensor in graph.initializer:
        _check_text(tensor.name, *(text for e in tensor.external_data for text in (e.key, e.value)))
    _check_text(graph.name)


def _check_text(*texts: Any) -> None:
    for text in texts:
        if not isinstance(text, str):
            raise OnnxFileError("a name in the file is not valid UTF-8", got=repr(text)[:80])


def _names(text: str) -> list[str]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise OnnxFileError("the metadata are not JSON", where=TRAINED, got=text[:80]) from error
    return [str(n) for n in found] if isinstance(found, list) else []


def _check_type(number: int, where: str, refused: dict[str, list[str]]) -> bool:
    """Return whether tensors of this data type can be imported; if not, add it to those that are refused."""
    try:
        dtype_of(number)
    except NotExpressible:
        refused.setdefault(f"tensor of {type_name(number)}", []).append(where)
        return False
    return True


_UNPACKED: dict[int, int] = {TensorProto.INT4: TensorProto.INT8, TensorProto.UINT4: TensorProto.UINT8}
"""Data types of stored tensors that are imported as wider ones, for operators that read no range from the type."""
_UNPACKS = {"DequantizeLinear", "Gather", "Reshape", "Transpose", "Squeeze", "Unsqueeze", "Slice"}


def _node(node: Any, opset: int, generated: bool, refused: dict[str, list[str]]) -> OnnxNode:
    domain = "" if node.domain == "ai.onnx" else node.domain
    name = re.sub(r"#\d+$", "", node.name) if generated else node.name
    where = name or next((o for o in node.output if o), "unnamed")
    row = OPERATORS.get(node.op_type) if not domain else None
    if row is None:
        refused.setdefault(f"{domain}.{node.op_type}" if domain else node.op_type, []).append(where)
        return OnnxNode(node.op_type, name, tuple(node.input), tuple(node.output), {})
    attributes: dict[str, Any] = {}
    for a in node.attribute:
        if a.type in (AttributeProto.GRAPH, AttributeProto.GRAPHS) or a.ref_attr_name:
            refused.setdefault(f"{node.op_type} (attribute {a.name})", []).append(where)
        elif a.name in row.attributes:
            if a.name in _DTYPES and a.i:
                _check_type(a.i, where, refused)
            attributes[a.name] = _attribute(a, where, next(iter(node.output), where), refused)
        elif not _is_default(node, a, opset):
            refused.setdefault(f"{node.op_type} (attribute {a.name})", []).append(where)
    return OnnxNode(node.op_type, name, tuple(node.input), tuple(node.output), attributes)


_DTYPES = ("to", "dtype", "output_dtype", "output_datatype")
"""Attributes that are a data type."""


def _attribute(a: Any, where: str, value: str, refused: dict[str, list[str]]) -> Any:
    """Return the value of an attribute; `value`: the name of a tensor."""
    if a.type in (AttributeProto.TENSOR, AttributeProto.SPARSE_TENSOR, AttributeProto.TYPE_PROTO):
        if a.type != AttributeProto.TENSOR or a.t.data_type == TensorProto.STRING:
            refused.setdefault(f"attribute {a.name} of an unknown type", []).append(where)
            return None
        known = _check_type(a.t.data_type, where, refused)
        return Tensor(_Tensors(None)(a.t), name=clean(value)) if known else None
    try:
        return onnx.helper.get_attribute_value(a)
    except ValueError as error:
        raise OnnxFileError("an attribute cannot be read", where=f"{where}.{a.name}", got=str(error)[:200]) from error


def _is_default(node: Any, a: Any, opset: int) -> bool:
    try:
        known = onnx.defs.get_schema(node.op_type, opset, node.domain).attributes
    except Exception:  # SchemaError is no public name in all versions
        return False
    return a.name in known and known[a.name].default_value == a


def _check_order(
    nodes: Sequence[OnnxNode], stored: set[str], inputs: Mapping[str, Any], outputs: Sequence[str]
) -> None:
    """Raise OnnxFileError for a value that is read before it is computed, or that two nodes compute."""
    seen = {*stored, *inputs}
    for node in nodes:
        where = node.name or node.kind
        missing = next((n for n in node.inputs if n and n not in seen), None)
        if missing is not None:
            raise OnnxFileError("a node reads a value that no earlier node computes", where=where, got=missing)
        twice = next((n for n in node.outputs if n and n in seen), None)
        if twice is not None:
            raise OnnxFileError("two nodes, inputs or weights have the same name", where=where, got=twice)
        seen.update(n for n in node.outputs if n)
    lost = next((n for n in outputs if n not in seen), None)
    if lost is not None or not outputs:
        raise OnnxFileError("an output is never computed" if outputs else "the graph has no output", where=lost)
    if len(set(outputs)) < len(outputs):
        raise OnnxFileError("two outputs have the same name", got=", ".join(outputs))


def _check_known(nodes: Sequence[OnnxNode], stored: set[str], opset: int, refused: dict[str, list[str]]) -> None:
    """Add the operators whose shapes depend on values that only a run knows."""
    known = {"", *stored}
    for node in nodes:
        row = OPERATORS.get(node.kind)
        if row is None:
            known.update(node.outputs)  # it is refused itself
            continue
        late = [i for i in row.known if i < len(node.inputs) and node.inputs[i] not in known]
        if late:
            refused.setdefault(f"{node.kind} (input {late[0]} is computed in a run)", []).append(
                node.name or next((o for o in node.outputs if o), node.kind)
            )
        if node.kind in ("Shape", "Size") or all(n in known for n in node.inputs):
            known.update(node.outputs)


def _check_declared(graph: Any, tensors: Mapping[str, NDArray]) -> None:
    """Raise OnnxFileError if the graph declares another shape for a weight than it stores."""
    for declared in (*graph.input, *graph.value_info):
        array = tensors.get(declared.name)
        if array is None or not declared.type.tensor_type.HasField("shape"):
            continue
        dims = declared.type.tensor_type.shape.dim
        shape = [d.dim_value if d.HasField("dim_value") else None for d in dims]
        if len(shape) != len(array.shape) or any(n not in (None, m) for n, m in zip(shape, array.shape, strict=True)):
            raise OnnxFileError("a weight has another shape than the graph declares", where=declared.name,
                                expected=shape, got=array.shape)  # fmt: skip


# -- tensors -----------------------------------------------------------------------------------------------------------
class _Tensors:
    """Reads tensors of a file; those stored outside are mapped from files in the same folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.maps = folder, dict[Path, np.ndarray]()

    def __call__(self, tensor: Any) -> NDArray:
        dims = tuple(tensor.dims)
        if min(dims, default=0) < 0 or prod(dims) > MOST_ENTRIES * 8:
            raise OnnxFileError("a tensor has impossible sizes", where=tensor.name, got=dims)
        kind = dtype_of(_UNPACKED.get(number := int(tensor.data_type), number))
        if tensor.data_type in _UNPACKED:
            return from_numpy(self._values(tensor, dims).astype(kind.numpy))
        if tensor.data_location == TensorProto.EXTERNAL:
            raw = self._external(tensor)
        elif tensor.HasField("raw_data"):
            raw = np.frombuffer(tensor.raw_data, np.uint8)
        else:
            host = self._values(tensor, dims)
            return from_numpy(host.view(kind.numpy), bits=kind) if kind.as_bits else from_numpy(host)
        if raw.nbytes != prod(dims) * kind.itemsize:
            raise OnnxFileError("the bytes of a tensor do not match its shape", where=tensor.name, got=raw.nbytes,
                                expected=f"{prod(dims) * kind.itemsize} for {kind.name}{list(dims)}")  # fmt: skip
        if raw.ctypes.data % kind.itemsize:
            raw = raw.copy()
        return from_numpy(raw.view(kind.numpy).reshape(dims), bits=kind)

    def _values(self, tensor: Any, dims: tuple[int, ...]) -> np.ndarray:
        try:
            host = numpy_helper.to_array(tensor)
        except Exception as error:  # the data may be shorter than the shape says, or of another type
            raise OnnxFileError("the data of a tensor do not match its shape", where=tensor.name, expected=dims,
                                got=str(error)[:200]) from error  # fmt: skip
        return np.ascontiguousarray(host).reshape(dims)

    def _external(self, tensor: Any) -> np.ndarray:
        facts = {e.key: e.value for e in tensor.external_data}
        location = facts.get("location", "")
        if self.folder is None:
            raise OnnxFileError("a model in memory has weights in another file", where=tensor.name, got=location,
                                fix="pass the path of the file, or load the weights with onnx.load")  # fmt: skip
        root = self.folder.resolve()
        path = (root / location).resolve()
        if (
            not location
            or Path(location).is_absolute()
            or ".." in Path(location).parts
            or not path.is_relative_to(root)
        ):
            raise OnnxFileError("the weights are not in the folder of the file", where=tensor.name, got=location,
                                expected="a relative path inside of it")  # fmt: skip
        if not path.is_file():
            raise OnnxFileError("the file of the weights is missing", where=tensor.name, got=location)
        if path not in self.maps:
            with path.open("rb") as file:
                size = path.stat().st_size
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
            self.maps[path] = np.frombuffer(mapped, np.uint8)
        whole = self.maps[path]
        try:
            start, length = int(facts.get("offset", 0)), int(facts.get("length", -1))
        except ValueError as error:
            raise OnnxFileError(
                "offset or length of the weights is not a number", where=tensor.name, got=facts
            ) from error
        length = whole.nbytes - start if length < 0 else length
        if start < 0 or length < 0 or start + length > whole.nbytes:
            raise OnnxFileError("the file of the weights is too short", where=tensor.name, got=whole.nbytes,
                                expected=f"at least {start + length} bytes")  # fmt: skip
        return whole[start : start + length]


# -- inputs ------------------------------------------------------------------------------------------------------------
def _shapes(inputs: Mapping[str, Any], sizes: Mapping[str, Shape]) -> dict[str, tuple[Shape, Any]]:
    """Return for each input its shape, of ints and names, and its dtype. Raises: UsageError."""
    labels = dict(zip(_distinct(inputs), inputs, strict=True))
    unknown = [n for n in sizes if n not in inputs and n not in labels]
    if unknown:
        raise UsageError("sizes are given for an unknown input", where="sizes", expected=", ".join(inputs),
                         got=unknown[0])  # fmt: skip
    given = {labels.get(n, n): shape for n, shape in sizes.items()}
    taken: dict[str, str] = {}
    found: dict[str, tuple[Shape, Any]] = {}
    for name, kind in inputs.items():
        tensor = kind.tensor_type
        declared = [_dim(d, taken) for d in tensor.shape.dim] if tensor.HasField("shape") else None
        shape = given.get(name)
        if declared is None and shape is None:
            raise UsageError("the file does not say the rank of an input", where=name,
                             fix=f"pass sizes={{{name!r}: (...)}}")  # fmt: skip
        wanted = list(declared or ()) if shape is None else list(shape)
        own = [None] * len(wanted) if declared is None else declared
        if len(wanted) != len(own):
            raise UsageError("the sizes of an input do not match the file", where=f"sizes[{name!r}]", expected=own,
                             got=tuple(wanted))  # fmt: skip
        wanted = [o if w is None else w for w, o in zip(wanted, own, strict=True)]
        clash = [(w, o) for w, o in zip(wanted, own, strict=True) if isinstance(o, int) and w != o]
        if clash:
            raise UsageError("a size of an input is fixed in the file", where=f"sizes[{name!r}]", expected=clash[0][1],
                             got=clash[0][0])  # fmt: skip
        if None in wanted:
            raise UsageError("the file leaves a size of an input open and without a name", where=name, got=wanted,
                             expected="an int or a name for each axis",
                             fix=f"pass sizes={{{name!r}: {tuple(n or 'N' for n in wanted)}}}")  # fmt: skip
        found[name] = (tuple(wanted), dtype_of(tensor.elem_type))
    return found


def _dim(dim: Any, taken: dict[str, str]) -> int | str | None:
    """Return a size as an int, as an identifier made of its name, or None if the file does not say it."""
    if dim.HasField("dim_value"):
        return dim.dim_value if dim.dim_value >= 0 else None
    if not dim.dim_param:
        return None
    label = re.sub(r"\W", "_", dim.dim_param, flags=re.ASCII).strip("_") or "size"
    label = label if is_dim_name(label) else f"size_{label}"
    names = (label, *(f"{label}_{i}" for i in range(2, 1000)))
    found = next(n for n in names if taken.get(n, dim.dim_param) == dim.dim_param)
    taken[found] = dim.dim_param
    return found


def _distinct(names: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names of inputs as names of nodes, all different."""
    found: list[str] = []
    for name in names:
        label = clean(name)
        found.append(next(n for n in _numbered(label) if n not in found))
    return tuple(found)


def _numbered(label: str) -> Iterator[str]:
    yield label
    yield from (f"{label}_{i}" for i in count(2))
