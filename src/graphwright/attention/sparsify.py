"""Replace dense attention by attention over the edges of a pattern, in one edit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from graphwright.errors import UsageError, check_type
from graphwright.models.generation.padding import hide_keys
from graphwright.ops import traits
from graphwright.patterns import HeadMismatch, Pattern, PatternShape
from graphwright.program.editing.replace import take_over
from graphwright.program.errors import EmptySelection
from graphwright.program.op_graph import Ref, Value
from graphwright.program.selection import Selection
from graphwright.surgery.matrices import program_of

if TYPE_CHECKING:
    from graphwright.graph import NodeId
    from graphwright.models.model import Model
    from graphwright.program.editing.transaction import Transaction
    from graphwright.program.program import Program

AnyModel = TypeVar("AnyModel", bound="Model | Program")
Source = Pattern | Callable[[int], Pattern]
"""A pattern, or a function from the number of tokens to a pattern."""
TOOL = "graphwright.attention"
LONGEST = 4096
"""Number of tokens of a pattern that is made for a model; it grows by its rule when a longer text runs."""


def sparsify(
    model: AnyModel, where: str | Selection | Iterable[Ref], pattern: Source | Mapping[str, Source],
    name: str | None = None,
) -> AnyModel:  # fmt: skip
    """Replace dense attention by attention over the edges of a pattern, in one edit; return the model.

    The window of the attention no longer counts. The pattern belongs to the program from then on: its edits are
    entries of the journal, and change the next run without a new plan. `program.undo()` restores the dense attention.

    Args:
        model: a model or program.
        where: the attentions: paths of `sdpa` nodes or of modules that contain them, such as `layers.*.attn`.
        pattern: a pattern that all of them share; a function from a number of tokens to such a pattern; or a dict from
            the path of an attention or its module to its own pattern. A pattern of the program is shared further.
        name: name of the shared pattern in `program.patterns`.
    Raises: EmptySelection; HeadMismatch if the planes fit neither heads nor key heads; PatternShape if the lengths do
        not fit; UsageError for a pattern of another program, or one that is not causal in place of causal attention.
    """
    p = program_of(model)
    nodes, tokens = _attentions(p, where), _length(model)
    if isinstance(pattern, Mapping):
        made = {path: _made(source, tokens) for path, source in pattern.items()}
        chosen = {node: _own(p, node, made) for node in nodes}
    else:
        chosen = dict.fromkeys(nodes, _made(pattern, tokens))
    for node, own in chosen.items():
        _check(p, node, own)
    with p.edit(f"sparsify {len(nodes)} attentions", tool=TOOL) as e:
        tables: dict[int, Value] = {}
        for node, own in chosen.items():
            if id(own) not in tables:
                path = f"{_module(p, node)}.pattern" if isinstance(pattern, Mapping) else name or own.name or "pattern"
                tables[id(own)] = _table(e, own, path)
            _replace(e, node, own, tables[id(own)])
    return model


def patterns(model: Model | Program) -> dict[str, Pattern]:
    """Return the attention patterns of a model or program by name."""
    return program_of(model).patterns


# -- what is replaced --------------------------------------------------------------------------------------------------
def _attentions(p: Program, where: str | Selection | Iterable[Ref]) -> list[NodeId]:
    """Return the dense attentions among the nodes that `where` selects, or in the modules that it names."""
    found = {*p.select(where), *p.select(f"{where}.**")} if isinstance(where, str) else set(p.nodes_of(where))
    dense = [n for n in p.order() if n in found and _dense(p, n)]
    if not dense:
        known = ", ".join(p.path(n) for n in p.nodes() if _dense(p, n)) or "a program with dense attention"
        raise EmptySelection("no dense attention is selected", where=p.name, expected=known[:200], got=str(where)[:80])
    return dense


def _dense(p: Program, node: NodeId) -> bool:
    row = traits(p.op(node))
    return row.attention and row.table is None


def _module(p: Program, node: NodeId) -> str:
    return p.path(node).rpartition(".")[0] or p.path(node)


def _length(model: Model | Program) -> int:
    """Return the number of tokens of a pattern that is made for a model: the longest text, but at most `LONGEST`."""
    sizes = getattr(model, "dims", None)
    return LONGEST if sizes is None else min(int(getattr(sizes, "positions", LONGEST)), LONGEST)


def _made(source: object, tokens: int) -> Pattern:
    made = source(tokens) if callable(source) and not isinstance(source, Pattern) else source
    check_type("pattern", made, Pattern, "an attention pattern, or a function from a number of tokens to one",
               "at.sliding_window(tokens, window=512)")  # fmt: skip
    assert isinstance(made, Pattern)
    return made


def _own(p: Program, node: NodeId, made: Mapping[str, Pattern]) -> Pattern:
    """Return the pattern of an attention from those by path. Raises: UsageError unless there is exactly one."""
    found = {path: own for path, own in made.items() if p.path(node) == path or p.path(node).startswith(f"{path}.")}
    if len(found) != 1:
        got = ", ".join(found) or f"patterns of {', '.join(made)}"
        raise UsageError("an attention needs one pattern", where=p.path(node), got=got,
                         expected="its path, or that of its module")  # fmt: skip
    return next(iter(found.values()))


def _check(p: Program, node: NodeId, pattern: Pattern) -> None:
    """Raise an error if a pattern cannot replace the mask of an attention."""
    attrs, path = p.attrs(node), p.path(node)
    q, k = (p.spec(v) for v in p.operands(node)[:2])
    heads, groups = q.shape[1], k.shape[1]
    if {"bias", "sinks"} & set(attrs["optional"]):
        raise UsageError("an attention over a pattern has no bias of scores, and no sinks", where=path,
                         expected="an attention without them", got=f"optional={attrs['optional']}")  # fmt: skip
    if pattern.planes not in (1, heads, groups):
        raise HeadMismatch(int(heads), int(groups), pattern.planes)
    if attrs["causal"] and not pattern.causal:
        raise UsageError("the pattern is not causal, but the attention is", where=path,
                         expected="a pattern with causal=True", got=repr(pattern))  # fmt: skip
    rows, columns = q.shape[2], k.shape[2]
    if rows == columns and isinstance(rows, str):
        fits = pattern.tokens[0] == pattern.tokens[1]
    elif isinstance(rows, str) or isinstance(columns, str):
        fits = pattern.tokens[0] == pattern.tokens[1] or "q_start" in attrs["optional"]
    else:
        start = pattern.tokens[1] - pattern.tokens[0]
        fits = rows <= pattern.tokens[0] and columns <= pattern.tokens[1]
        fits &= "q_start" in attrs["optional"] or not attrs["causal"] or start == columns - rows
    if not fits:
        error = PatternShape("the pattern does not have the lengths of the queries and keys",
                             expected=f"{rows} queries, {columns} keys", got=repr(pattern))  # fmt: skip
        error.where = path
        raise error


# -- the edit ----------------------------------------------------------------------------------------------------------
def _table(e: Transaction, pattern: Pattern, wanted: str) -> Value:
    """Return the node of a pattern of the program, or add one."""
    p = e.program
    for key, known in p.patterns.items():
        if known is pattern:
            return Value(p.readers(key)[0])
    name = p.free_name(wanted)
    return Value(e.pattern(name, pattern, key=p.weights.free_key(name)))


def _replace(e: Transaction, old: NodeId, pattern: Pattern, table: Value) -> None:
    """Replace an attention by one over the edges of a pattern, under the same name."""
    p, attrs, path = e.program, e.program.attrs(old), e.program.path(old)
    q, k, v, *more = p.operands(old)
    extra = dict(zip(attrs["optional"], more, strict=True))

    def add(op: str, operands: list[Value], label: str, **given: Any) -> Value:
        return Value(e.add_op(op, operands, given, p.free_name(f"{path}.{label}")))

    if "key_mask" in extra:
        q, k = hide_keys(p, add, q, k, extra["key_mask"], attrs["scale"], attrs["softcap"])
    operands, optional = [q, k, v, table], ()
    if "q_start" in extra:
        operands, optional = [*operands, extra["q_start"]], ("q_start",)
    given = {"scale": attrs["scale"], "softcap": attrs["softcap"], "planes": pattern.planes, "optional": optional}
    take_over(e, old, Value(e.add_op("block_sdpa", operands, given, p.free_name(f"{path}.block"))).node)
