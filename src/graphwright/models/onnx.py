"""Write a program as an ONNX file, and compare it with onnxruntime."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from itertools import count, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from graphwright.array import Dim, Spec
from graphwright.array.sizes import folded, is_dim_name
from graphwright.errors import MissingExtra, UsageError
from graphwright.files import StrPath, check_free, target_path, writing
from graphwright.graph import NodeId
from graphwright.models.errors import ExportError, VerificationFailed
from graphwright.models.export.static_attention import static_program
from graphwright.models.generation.cached_program import LENGTH, derive
from graphwright.models.masked import check_masked, with_masks
from graphwright.ops import OPS, traits
from graphwright.ops.onnx import ONNX_DTYPES, OPSET, OPSETS, OnnxRow, OnnxUse
from graphwright.program.agreement import largest_difference
from graphwright.program.kinds import INPUT, STORED
from graphwright.program.op_graph import Value
from graphwright.program.state import State

if TYPE_CHECKING:
    from graphwright.program.program import Program


try:
    import onnx
    from onnx import TensorProto, helper, numpy_helper
except ImportError as error:
    raise MissingExtra("onnx", "ONNX") from error

EXTERNAL = 1_500_000_000
"""Bytes of weights above which they are stored in a second file; a protobuf message is limited to 2 GiB."""
TOLERANCE = 1e-4
"""Tolerated difference of float32 results between kernels, relative to the largest entry."""
_SMALL = 1e-2
"""Size of an output below which differences are not compared with it: it may be a difference of larger values."""
_STEPS = 8
"""Tokens after each prompt on which a file with cache is checked."""


def need_onnx() -> None:
    """Raise MissingExtra if onnx or onnxruntime is not installed."""
    if find_spec("onnx") is None or find_spec("onnxruntime") is None:
        raise MissingExtra("onnx", "ONNX")


def save_onnx(p: Program, path: StrPath, *, overwrite: bool = False, opset: int = OPSET, cache: bool = False) -> Path:
    """Write a program as an ONNX file, e.g. `model.onnx`; named sizes stay dynamic.

    A state that the program assigns is an input with the state's name and an output `<name>.next`: feed the output of a
    run to the next run. A state that is never assigned, such as a running statistic in evaluation, is a weight.

    Weights above 1.5 GB go into `model.onnx.data` beside it. See `to_model` for `opset` and `cache`. Raises:
    MissingExtra; ExportError naming every op that ONNX cannot express; DestinationExists; UnwritableTarget; UsageError
    for the opset.
    """
    need_onnx()
    target = target_path(path)
    check_free(target, overwrite, file=True)
    model = to_model(p, opset=opset, cache=cache)
    large = sum(len(t.raw_data) for t in model.graph.initializer) > EXTERNAL
    with writing(target), TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        made = Path(folder) / target.name
        beside = {"save_as_external_data": True, "location": f"{target.name}.data"} if large else {}
        onnx.save(model, str(made), **beside)
        onnx.checker.check_model(str(made), full_check=True)
        for file in sorted(Path(folder).iterdir(), reverse=True):  # the data file before the file that refers to it
            os.replace(file, target.with_name(file.name))
    return target


def run_onnx(path: StrPath, feeds: Sequence[Mapping[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
    """Run a file with onnxruntime on the CPU; return for each feed a dict of outputs by name. Raises: MissingExtra."""
    session = _session(path)
    return [_run(session, feed) for feed in feeds]


def run_cached(path: StrPath, ids: np.ndarray, cuts: Sequence[int]) -> np.ndarray:
    """Run a file with a KV cache on ids [B, T], in chunks that end at `cuts`; return the logits [B, T, V]."""
    session = _session(path)
    held = [i for i in session.get_inputs() if i.name.startswith("past_key_values.")]
    kinds = {"tensor(float)": np.float32, "tensor(double)": np.float64, "tensor(float16)": np.float16}
    rows = {i.name: np.zeros((len(ids), i.shape[1], 0, i.shape[3]), kinds[i.type]) for i in held}
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
    found = []
    for start, end in pairwise((0, *cuts, ids.shape[1])):
        made = _run(session, {"ids": ids[:, start:end], "positions": positions[:, start:end].copy(), **rows})
        found.append(made["logits"])
        rows = {name: made[name.replace("past_key_values", "present")] for name in rows}
    return np.concatenate(found, axis=1)


def _session(path: StrPath) -> Any:
    need_onnx()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    try:
        return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its errors have no other common class
        fix = 'open the model with compute="float32"; other runtimes may support this file'
        got = str(error).splitlines()[0][:300]
        what = "onnxruntime cannot run this file"
        raise VerificationFailed(what, where=Path(path).name, got=got, fix=fix) from error


def _run(session: Any, feed: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Run a session and return its outputs by name; feeds that the file does not read are ignored."""
    names, wanted = [o.name for o in session.get_outputs()], {i.name for i in session.get_inputs()}
    return dict(zip(names, session.run(names, {k: v for k, v in feed.items() if k in wanted}), strict=True))


def check_onnx(p: Program, path: StrPath, seed: int = 0) -> dict[str, float]:
    """Run a file and its program once on random inputs, and compare all outputs and the next values of states.

    Named sizes are 2; floating inputs are N(0, 1), integers and booleans 0; states have their present values, and the
    program's do not change. Returns: the largest difference `max_abs`, and `max_rel`, relative to the largest entry of
    that output. Raises: VerificationFailed if a difference exceeds 1e-4 of the largest entry, or 1e-6 if that is more.
    """
    rng, state = np.random.default_rng(seed), State(p, own=True)
    feeds: dict[str, np.ndarray] = {}
    for node in p.inputs():
        spec = p.spec(node)
        shape = tuple(2 if isinstance(d, str) else d for d in spec.shape)
        values = rng.normal(size=shape) if spec.dtype.is_float else np.zeros(shape)
        feeds[p.path(node)] = values.astype(spec.dtype.name)
    assigned = {p.path(n): state[p.key(n)] for n in _assigned(p, {})}
    (theirs,) = run_onnx(path, [feeds | {name: v.data.to_numpy() for name, v in assigned.items()}])
    with p.run(feeds, keep="outputs", state=state) as run:
        ours = {name: run[name] for name in p.output_names()}
        ours |= {f"{name}.next": v.data for name, v in assigned.items()}
    worst = {"max_abs": 0.0, "max_rel": 0.0}
    for name, array in ours.items():
        error, scale = largest_difference(array.to_numpy(), theirs[name])
        if not error <= (most := TOLERANCE * max(scale, _SMALL)):
            raise VerificationFailed("the outputs of onnxruntime differ from the program's", where=name, got=error,
                                     expected=f"difference <= {most:.3g}")  # fmt: skip
        worst = {"max_abs": max(worst["max_abs"], error), "max_rel": max(worst["max_rel"], error / (scale or 1.0))}
    return worst


def compare_onnx(
    path: Path, prompts: Sequence[np.ndarray], logits: Sequence[np.ndarray], greedy: Sequence[np.ndarray] | None = None
) -> dict[str, Any]:
    """Compare logits [T, V] of a file with those of the program, for prompts of ids [T]; return the differences.

    For a file with a KV cache, pass also the program's `greedy` tokens after each prompt: in the file's logits, each
    must be within 2e-4 of the best, relative to the largest logit. Raises: VerificationFailed if logits differ by more
    than 1e-4, relative to the largest, or a greedy token is too far from the best.
    """
    if greedy is None:
        feeds = [{"ids": ids[None], "positions": np.arange(len(ids), dtype=np.int64)[None]} for ids in prompts]
        found = [run["logits"][0] for run in run_onnx(path, feeds)]
    else:
        texts = [np.concatenate([ids, tokens[:_STEPS]]) for ids, tokens in zip(prompts, greedy, strict=True)]
        found = [run_cached(path, t[None], range(len(p), len(t)))[0] for p, t in zip(prompts, texts, strict=True)]
    scale = max(float(np.abs(a).max()) for a in logits)
    pairs = zip(logits, found, strict=True)
    worst = max(float(np.abs(a - b[: len(a)].astype(np.float32)).max()) for a, b in pairs)
    if not worst <= TOLERANCE * scale:
        what, expected = "the logits of onnxruntime differ from the program's", f"difference <= {TOLERANCE * scale:.3g}"
        raise VerificationFailed(what, where=path.name, expected=expected, got=worst)
    for n, (ids, tokens, scores) in enumerate(zip(prompts, greedy, found, strict=True) if greedy is not None else ()):
        rows = scores[len(ids) - 1 : -1]
        short = rows.max(-1) - rows[np.arange(len(rows)), tokens[: len(rows)]]
        if not short.max(initial=0) <= 2 * TOLERANCE * scale:
            at = int(short.argmax())
            raise VerificationFailed("the best token of onnxruntime differs from the program's",
                                     where=f"{path.name}, prompt {n}, token {at}", expected=int(tokens[at]),
                                     got=int(rows[at].argmax()))  # fmt: skip
    import onnxruntime

    return {"onnxruntime": onnxruntime.__version__, "max_abs": worst, "max_rel": worst / scale, "tol": TOLERANCE}


TRAINED = "graphwright.trained"
"""Key of a file's metadata with the names of the weights that are trained, as JSON; other tensors are constants."""
PAST, TOTAL = "past", "total"
"""Dimensions of a graph with cache: the number of cached entries, and that of cached plus new entries."""
_IR = {20: 9, 23: 11}
"""Opset -> version of the file format; runtimes that were released with the opset reject later versions."""


def to_model(p: Program, name: str | None = None, *, opset: int = OPSET, cache: bool = False) -> onnx.ModelProto:
    """Convert a program to an ONNX model.

    Args:
        p: the program.
        name: name of the graph, by default that of the program.
        opset: 20, or 23, which has one node for each norm, RoPE and attention. Attention over a pattern is one with a
            constant mask, or with a window if the pattern is one.
        cache: add inputs `past_key_values.<n>.key` and `.value` [B, G, past, D] of the n-th attention with
            G key heads of D entries, and outputs `present.<n>.key` and `.value` [B, G, past + T, D].
    States are as in `save_onnx`.
    Raises: ExportError naming every op that ONNX cannot express, with the reason; UsageError for an unknown opset, or
        an attention that cannot be cached.
    """
    if opset not in OPSETS:
        raise UsageError("unknown opset", expected=" or ".join(map(str, OPSETS)), got=opset)
    caches: dict[str, str] = {}
    p = static_program(p)
    check_masked(p)
    if cache:
        derived = derive(p, TOTAL, last_only=False)
        for n, key in enumerate(key.removesuffix(".k") for key in derived.states if key.endswith(".k")):
            caches |= {f"{key}.k": f"{n}.key", f"{key}.v": f"{n}.value"}
        p, name = derived.program, name or p.name
    g = _OnnxGraph(_simpler(with_masks(p), opset, caches), opset, caches)
    g.write()
    graph = helper.make_graph(g.nodes, name or p.name, g.inputs, g.outputs, g.tensors)
    opsets = [helper.make_opsetid("", opset)]
    model = helper.make_model(graph, opset_imports=opsets, producer_name="graphwright")
    model.ir_version = _IR[opset]
    helper.set_model_props(model, {TRAINED: json.dumps(g.trained())})
    return model


def _needed(p: Program, assigned: Mapping[NodeId, Value]) -> list[NodeId]:
    reached = p.reachable([*p.outputs(), *assigned.values()])
    return [n for n in p.order() if n in reached or n in assigned]


def _assigned(p: Program, caches: Mapping[str, str]) -> dict[NodeId, Value]:
    """Map each assigned state (or param), except cache states, to the value that is assigned to it."""
    following = (p.operands(assign) for assign in p.assigns())
    return {state.node: new for state, new in following if p.key(state.node) not in {*caches, LENGTH}}


def _appends(p: Program, caches: Mapping[str, str]) -> dict[NodeId, str]:
    """Map each node that appends to a KV cache to the key of the cache state to which its result is assigned."""
    following = (p.operands(assign) for assign in p.assigns())
    return {new.node: p.key(state.node) for state, new in following if p.key(state.node) in caches}


def _simpler(p: Program, opset: int, caches: Mapping[str, str]) -> Program:
    """Return a copy with the ops that ONNX lacks expanded. Raises: ExportError for unsupported ops."""
    twin = p.fork()
    while True:
        appends = _appends(twin, caches)
        ops = [
            n for n in _needed(twin, _assigned(twin, caches)) if twin.op(n) not in (INPUT, *STORED) and n not in appends
        ]
        bare = [n for n in ops if _row(twin, n, opset) is None]
        _refuse(twin, {n: f": {why}" for n in bare if (why := OPS[twin.op(n)].why.get("onnx")) is not None})
        if not bare:
            return twin
        twin.expand(bare)


def _refuse(p: Program, nodes: Mapping[NodeId, str]) -> None:
    """Raise ExportError if `nodes` (node -> text to append to its name, such as a reason) is not empty."""
    if nodes:
        lines = [f"{p.path(n)} ({p.op(n)}){why}" for n, why in nodes.items()]
        raise ExportError(f"ONNX cannot express {len(nodes)} nodes:\n  " + "\n  ".join(lines),
                          where=p.path(next(iter(nodes))), got=", ".join(dict.fromkeys(map(p.op, nodes))))  # fmt: skip


def _row(p: Program, node: NodeId, opset: int) -> OnnxRow | None:
    return OPS[p.op(node)].onnx_row([p.spec(v) for v in p.operands(node)], p.attrs(node), opset)


class _OnnxGraph:
    """An ONNX graph under construction; `caches` maps the key of a cache state to `<n>.key` or `<n>.value`."""

    def __init__(self, p: Program, opset: int, caches: Mapping[str, str]) -> None:
        self.p, self.opset, self.caches = p, opset, caches
        self._appends, self._assigned = _appends(p, caches), _assigned(p, caches)
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[TensorProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.names: dict[Value, str] = {}
        self._constants: dict[tuple[str, tuple[int, ...], bytes], str] = {}
        self._sizes: dict[str, str] = {}
        self._where: dict[str, tuple[str, int]] = {}
        self._weights: dict[tuple[str, str | None], str] = {}  # (key, wide dtype) -> name
        self._taken: set[str] = set()  # names of inputs, outputs and tensors
        self._at, self._numbers = "", count(1)

    # -- called by ops to emit ONNX ----------------------------------------------------------------------------------
    def node(self, kind: str, inputs: Sequence[str], outputs: int, attributes: Mapping[str, Any]) -> tuple[str, ...]:
        """Add a node; return the names of its outputs."""
        made = tuple(f"{self._at}#{next(self._numbers)}" for _ in range(outputs))
        self.nodes.append(helper.make_node(kind, list(inputs), list(made), name=made[0], **attributes))
        return made

    def constant(self, array: np.ndarray) -> str:
        """Add a constant tensor and return its name; equal arrays share one tensor."""
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            self._constants[key] = self._free(f"constant_{len(self._constants)}")
            self.tensors.append(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape),
                                                        self._constants[key]))  # fmt: skip
        return self._constants[key]

    def body(
        self, nodes: Sequence[tuple[str, Sequence[str], str]], inputs: Mapping[str, Spec], outputs: Mapping[str, Spec]
    ) -> onnx.GraphProto:
        """Return a graph for an attribute of a node; its names get numbers, as names of one file must differ."""
        number = next(self._numbers)
        name = f"{self._at}#{number}.{{}}".format
        made = [helper.make_node(kind, list(map(name, ins)), [name(out)]) for kind, ins, out in nodes]
        given, results = ([_info(name(n), spec) for n, spec in side.items()] for side in (inputs, outputs))
        return helper.make_graph(made, name("body"), given, results)

    def size(self, dim: str) -> str:
        """Return the name of a tensor with a dynamic size, read from the shape of a value that has this size."""
        if dim not in self._sizes:
            if is_dim_name(dim):
                if dim not in self._where:  # of an input whose values no result needs
                    self._add_input(next(n for n in self.p.inputs() if dim in self.p.spec(n).shape))
                name, axis = self._where[dim]
                self._sizes[dim] = self.node("Shape", [name], 1, {"start": axis, "end": axis + 1})[0]
            else:
                self._sizes[dim] = folded(dim, self._number, lambda kind, a, b: self.node(kind, [a, b], 1, {})[0])
        return self._sizes[dim]

    def _add_input(self, node: NodeId) -> None:
        name = self.names[Value(node)] = self.p.path(node)
        self.inputs.append(_info(name, self.p.spec(node)))
        for axis, dim in enumerate(self.p.spec(node).shape):
            if isinstance(dim, str):
                self._where.setdefault(dim, (name, axis))

    def _number(self, dim: Dim) -> str:
        """Return the name of an int64 tensor [1] that holds a number or a named size."""
        return self.size(dim) if isinstance(dim, str) else self.constant(np.array([dim], np.int64))

    # -- the graph ---------------------------------------------------------------------------------------------------
    def write(self) -> None:
        p, order = self.p, _needed(self.p, self._assigned)
        self._taken = {*p.input_names(), *p.output_names()}
        for node in self._assigned:
            self._taken |= {p.path(node), f"{p.path(node)}.next"}
        for what in self.caches.values():
            self._taken |= {f"past_key_values.{what}", f"present.{what}"}
        for node in order:
            if p.op(node) == INPUT or node in self._assigned:
                self._add_input(node)
        self._take_caches()
        refused = [node for node in order if Value(node) not in self.names and not self._write(node)]
        _refuse(p, {n: f", with the attributes {dict(p.attrs(n))}" for n in refused})
        grown = {key: Value(node) for node, key in self._appends.items()}
        results = dict(zip(p.output_names(), p.outputs(), strict=True))
        for node, new in self._assigned.items():
            if (name := f"{p.path(node)}.next") in results:
                raise ExportError("an output has the name of the next value of a state", where=name,
                                  fix="rename the output")  # fmt: skip
            results[name] = new
        results |= {f"present.{what}": grown[key] for key, what in self.caches.items()}
        for name, value in results.items():
            self.nodes.append(helper.make_node("Identity", [self.names[value]], [name], name=f"output {name}"))
            self.outputs.append(_info(name, p.spec(value)))

    def _take_caches(self) -> None:
        """Add an input for each cache state; the number of cached entries is read from the shape of the first."""
        p, self._at = self.p, LENGTH
        nodes = {p.key(n): n for n in p.states()}
        for key, what in self.caches.items():
            shape = [PAST if d == TOTAL else d for d in p.spec(nodes[key]).shape]
            name = self.names[Value(nodes[key])] = f"past_key_values.{what}"
            self.inputs.append(_info(name, Spec(tuple(shape), p.spec(nodes[key]).dtype)))
        if self.caches:
            first = self.inputs[-len(self.caches)].name
            size = self.node("Shape", [first], 1, {"start": 2, "end": 3})[0]
            zero = self.constant(np.zeros(1, np.int64))
            self.names[Value(nodes[LENGTH])] = self.node("Squeeze", [size, zero], 1, {})[0]

    def _write(self, node: NodeId) -> bool:
        """Write a node; return False if ONNX cannot express the op with these attributes or an output that is read."""
        p, op, self._at = self.p, self.p.op(node), self.p.path(node)
        if op in STORED:
            key = p.key(node)
            self.names[Value(node)] = key if self._only_widened(key) else self._weight(key)
            return True
        operands = p.operands(node)
        if any(v not in self.names for v in operands):
            return True  # an operand could not be written, and the error names that one
        if self._widened(node):
            self.names[Value(node)] = self._weight(p.key(operands[0].node), p.spec(node).dtype.name)
            return True
        if node in self._appends:
            past, rows = operands[:2]
            made = self.node("Concat", [self.names[past], self.names[rows]], 1, {"axis": 2})[0]
            self.names[Value(node)] = made
            self._where.setdefault(TOTAL, (made, 2))
            return True
        ins, row = tuple(p.spec(v) for v in operands), _row(p, node, self.opset)
        assert row is not None, "ops without an ONNX form were expanded"
        made = row(OnnxUse(self, tuple(self.names[v] for v in operands), p.attrs(node), ins, tuple(p.specs(node))))
        if made is None:
            return False
        results = (made,) if isinstance(made, str) else made
        for port in range(len(p.specs(node))):
            if port < len(results):
                self.names[Value(node, port)] = results[port]
            elif p.consumers(Value(node, port)) or Value(node, port) in p.outputs():
                return False
        return True

    def _widened(self, node: NodeId) -> bool:
        """Return True for a cast of a 16-bit weight to float32 or wider, for which the file stores the wide weight."""
        p = self.p
        if not traits(p.op(node)).casts or not p.spec(node).dtype.is_float or p.spec(node).dtype.is_low:
            return False
        source = p.operands(node)[0].node
        stored = p.op(source) in STORED and source not in self._assigned
        return stored and p.spec(source).dtype.is_low

    def _weight(self, key: str, wide: str | None = None) -> str:
        """Return the name of a weight's tensor in its stored dtype or in `wide`; add the tensor if it is new."""
        array = self.p.weights.array(key)
        if (key, wide) not in self._weights:
            label = key if wide is None or self._only_widened(key) else f"{key}.{wide}"
            name = self._weights[key, wide] = self._free(label)
            if wide is None and array.dtype.is_low:
                raw = array.to_numpy(bits=True).tobytes()
                self.tensors.append(helper.make_tensor(name, ONNX_DTYPES[array.dtype.name], array.shape, raw, raw=True))
            else:
                host = np.ascontiguousarray(array.to_numpy(wide)).reshape(array.shape)
                self.tensors.append(numpy_helper.from_array(host, name))
        return self._weights[key, wide]

    def trained(self) -> list[str]:
        """Return the names of the tensors that are trainable params."""
        keys = {self.p.key(n) for n in self.p.params() if self.p.attrs(n)["trainable"]}
        return sorted(name for (key, _), name in self._weights.items() if key in keys)

    def _free(self, wanted: str) -> str:
        """Return a name that no input, output or other tensor has: `wanted`, `wanted_2`, ..."""
        name = next(n for i in count(1) if (n := f"{wanted}_{i}" if i > 1 else wanted) not in self._taken)
        self._taken.add(name)
        return name

    def _only_widened(self, key: str) -> bool:
        """Return True if nodes read the weight, all of them casts, and it is no output: only the wide one is stored."""
        sources = self.p.readers(key)
        readers = [m for n in sources for m in self.p.consumers(n)]
        outputs = {v.node for v in self.p.outputs()}
        return bool(readers) and all(map(self._widened, readers)) and outputs.isdisjoint(sources)


def _info(name: str, spec: Spec) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, ONNX_DTYPES[spec.dtype.name], list(spec.shape))
