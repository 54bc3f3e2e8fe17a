"""Attention written out as products and a softmax -> `sdpa`; masks -> its attributes, a key mask or a bias."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any

from graphwright.array import bool_
from graphwright.models.importing.recover.masks import Mask, recognise
from graphwright.models.importing.recover.regions import IN_ORDER, VIEWS, Draw, Regions, bias, some_hidden
from graphwright.ops import get
from graphwright.program.op_graph import Value

KIND = "sdpa"


@dataclass(slots=True)
class _Scores:
    """What a softmax reads: q and kᵀ of the product, and what happens to it on the way.

    Attributes:
        added: value that is added to the scores, or None.
        hidden: bool mask of the scores that -inf replaces, or None.
        cap: scores s become cap · tanh(s / cap); None without.
        sinks: a score of each head [H] that is one more key of the softmax, or None.
    """

    q: Value
    k: Value
    scale: float = 1.0
    added: Value | None = None
    hidden: Value | None = None
    cap: float | None = None
    sinks: Value | None = None


def recover_attention(s: Regions) -> None:
    """Replace attentions around a softmax; attentions that are `sdpa` already read keys before they are repeated.

    A query without visible keys gives 0 in `sdpa`; where -inf hides all its keys, the region gives NaN.
    """
    known: dict[Any, Mask | None] = {}
    masks: dict[Value, Value] = {}
    for root in s.values("softmax"):
        why = _recover(s, root, known, masks)
        if why:
            s.leave(KIND, root, why)
    for root in s.values("sdpa"):
        _regroup(s, root)
    for root in s.values("sdpa"):
        s.found(KIND, root)


# -- one softmax -------------------------------------------------------------------------------------------------------
def _recover(s: Regions, root: Value, known: dict[Any, Mask | None], masks: dict[Value, Value]) -> str:
    """Replace the attention around a softmax; return why not, or "" also if the softmax is of no attention."""
    x, *mask = s.p.operands(root.node)
    x, sinks = _without_sinks(s, root, _unshifted(s, x))
    chosen = s.parts(x, "where")
    filled = chosen is not None and s.number(chosen[1]) == -inf
    scores, result = (
        _scores(s, chosen[2] if chosen is not None and filled else x, with_mask=not filled),
        _result(s, root, scores_of=x if sinks is not None else None),
    )
    if scores is None or result is None:
        return ""
    scores.sinks = sinks
    if s.attr(root, "axis") not in (-1, len(s.shape(root)) - 1):
        return "its softmax is over another axis than that of the keys"
    if scores.cap is not None and "softcap" not in get("sdpa").attrs:
        return "the op has no softcap"
    out, v = result
    seen = _mask_operand(s, scores, mask)
    if chosen is not None and filled:
        scores.hidden = chosen[0]
        seen = None if mask else (s.add("logical_not", [chosen[0]], f"{s.module(root)}seen", out),)
    if seen is None:
        return "it has a mask besides what is added to its scores"
    shape = _score_shape(s, x if sinks is not None else root)
    if shape is None:
        return "its scores have no axes of batch, heads, queries and keys"
    for operands, factor in _operands(s, scores, v, shape):
        made = _build(s, root, out, operands, scores, factor, seen, shape)
        if made is None:
            continue
        _attributes(s, made, seen, shape, known, masks, out)
        return ""
    s.sweep(v.node for v in seen if scores.hidden is not None)
    return "no operands of sdpa give the same result"


def _scores(s: Regions, value: Value, *, with_mask: bool) -> _Scores | None:
    """Return the product of queries and keys that scores are made of; None if they are made otherwise."""
    if (pair := s.parts(value, "matmul")) is not None:
        return _Scores(pair[0], pair[1])
    if s.is_op(value, "cast", *IN_ORDER):
        return _scores(s, s.p.operands(value.node)[0], with_mask=with_mask)
    if (scaled := s.scaled(value)) is not None:
        found = _scores(s, scaled[0], with_mask=False)
        if found is not None and s.is_op(s.above(scaled[0], "cast", *IN_ORDER)[-1], "tanh"):
            found.cap, found.scale = scaled[1], found.scale * scaled[1]
        elif found is not None:
            found.scale *= scaled[1]
        return found
    if (inner := s.parts(value, "tanh")) is not None:
        return _scores(s, inner[0], with_mask=False)
    terms = s.parts(value, "add", "junction") if with_mask else None
    for at in range(len(terms or ()) if len(terms or ()) == 2 else 0):
        assert terms is not None
        found = _scores(s, terms[at], with_mask=False)
        if found is not None and s.shape(terms[at]) == s.shape(value):
            found.added = terms[1 - at]
            return found
    return None


def _unshifted(s: Regions, x: Value) -> Value:
    """Return the scores from which their largest one of each row is subtracted, else the value itself."""
    terms = s.parts(x, "sub")
    if terms is None:
        return x
    largest = s.above(terms[1], "expand", *IN_ORDER)[-1]
    found = s.parts(largest, "max", "gather")
    return terms[0] if found is not None and found[0] == terms[0] else x


def _without_sinks(s: Regions, root: Value, x: Value) -> tuple[Value, Value | None]:
    """Return the scores [B, H, Tq, Tk] and the sinks [H] that a softmax reads one after the other, else (x, None)."""
    terms = s.parts(x, "concat")
    if terms is None or len(terms) != 2 or len(s.shape(x)) != 4 or s.attr(x, "axis") not in (-1, 3):
        return x, None
    heads = (s.shape(x)[1],)
    sinks = next((v for v in s.above(terms[1], "cast", "expand", *IN_ORDER) if s.shape(v) == heads), None)
    return (terms[0], sinks) if sinks is not None and s.shape(terms[1])[3] == 1 else (x, None)


def _result(s: Regions, root: Value, scores_of: Value | None = None) -> tuple[Value, Value] | None:
    """Return the product of the weights and the values, and the values [.., Tk, Dv].

    With `scores_of`, the weights are the part of the softmax that has the shape of these scores.
    """
    at = root
    if scores_of is not None:
        part = s.next(root, "slice")
        if part is None or s.shape(part) != s.shape(scores_of) or s.attr(part, "start") != 0:
            return None
        at = part
    while (onward := s.next(at, "cast", *IN_ORDER)) is not None:
        at = onward
    product = s.next(at, "matmul")
    if product is None or s.p.operands(product.node)[0] != at:
        return None
    return product, s.p.operands(product.node)[1]


def _mask_operand(s: Regions, scores: _Scores, mask: list[Value]) -> tuple[Value, ...] | None:
    """Return (the one operand that hides keys,), () if nothing does, or None for two of them."""
    if not mask:
        return () if scores.added is None else (scores.added,)
    if scores.added is None:
        return tuple(mask)
    compared = s.with_number(s.above(mask[0], "expand")[-1], "gt")
    return (scores.added,) if compared is not None and compared == (scores.added, -inf) else None


def _score_shape(s: Regions, root: Value) -> tuple[Any, ...] | None:
    """Return [B, H, Tq, Tk] of a softmax over scores of these axes, or with heads in two axes."""
    shape = s.shape(root)
    if len(shape) == 5 and all(isinstance(n, int) for n in shape[1:3]):
        return (shape[0], int(shape[1]) * int(shape[2]), *shape[3:])
    return shape if len(shape) == 4 else None


def _operands(s: Regions, scores: _Scores, v: Value, shape: tuple[Any, ...]) -> Iterator[tuple[list[Value], float]]:
    """Yield operands q, k and v of fitting shapes, and the factor between them and the product: far from it first."""
    batch, heads, queries, keys = shape

    def fitting(value: Value, length: Any) -> list[tuple[Value, float]]:
        found, factor, last = [], 1.0, value
        for at in s.above(value, "mul", "div", "cast", "repeat_interleave", *VIEWS):
            if at != last and (scaled := s.scaled(last)) is not None:
                factor *= scaled[1]
            last, own = at, s.shape(at)
            if len(own) == 4 and own[0] == batch and own[2] == length and isinstance(own[1], int):
                found.append((at, factor))
        return [f for f in found[::-1] if heads % s.shape(f[0])[1] == 0]

    tried = 0
    for q, q_factor in fitting(scores.q, queries):
        for k, k_factor in fitting(scores.k, keys):
            for value, v_factor in fitting(v, keys):
                fits = s.shape(q)[1] == heads and s.shape(k)[1] == s.shape(value)[1] and v_factor == 1.0
                fits = fits and len({s.p.spec(x).dtype for x in (q, k, value)}) == 1
                if fits and s.shape(q)[3] == s.shape(k)[3] and tried < 12:
                    tried += 1
                    yield [q, k, value], q_factor * k_factor


def _build(
    s: Regions, root: Value, out: Value, operands: list[Value], scores: _Scores, factor: float,
    seen: tuple[Value, ...], shape: tuple[Any, ...],
) -> Value | None:  # fmt: skip
    """Add an `sdpa` with what hides keys as its bias; return it if it computes the same, else None."""
    attrs: dict[str, Any] = {"scale": scores.scale * factor, "causal": False}
    if scores.cap is not None:
        attrs["softcap"] = scores.cap
    before = len(s.p)
    extra, draws = [], dict[Value, Draw | None].fromkeys(operands)
    if seen:
        narrow = _narrow(s, seen[0], shape)
        if narrow is None:
            return None
        if scores.hidden is not None:
            draws[s.p.operands(narrow.node)[0]] = some_hidden
        else:
            draws[narrow] = bias if s.p.spec(narrow).dtype.is_float else None
        extra = [_four_axes(s, narrow, f"{s.module(root)}bias", out)]
        attrs["optional"] = ("bias",)
    if scores.sinks is not None:
        extra, draws[scores.sinks] = [*extra, scores.sinks], None
        attrs["optional"] = (*attrs.get("optional", ()), "sinks")
    made = s.add("sdpa", [*operands, *extra], f"{s.module(root)}sdpa", out, **attrs)
    new = made if s.shape(made) == s.shape(out) else s.add(
        "reshape", [made], f"{s.module(root)}sdpa.reshape", made, shape=s.shape(out))  # fmt: skip
    if s.p.spec(new) == s.p.spec(out) and s.agree(out, new, draws):
        s.redirect(out, new)
        s.sweep([out.node])
        _skip_views(s, made)
        return made
    s.sweep([new.node])
    assert len(s.p) <= before, "what was tried is gone"
    return None


def _narrow(s: Regions, mask: Value, shape: tuple[Any, ...]) -> Value | None:
    """Return a mask before it was expanded and reshaped, while it broadcasts to [B, H, Tq, Tk]; None if it does not."""
    fits = [v for v in s.above(mask, "expand") if _broadcasts(s.shape(v), shape)]
    return fits[-1] if fits else None


def _broadcasts(shape: tuple[Any, ...], full: tuple[Any, ...]) -> bool:
    return len(shape) <= 4 and all(n in (1, m) for n, m in zip(shape[::-1], full[::-1], strict=False))


def _four_axes(s: Regions, value: Value, name: str, after: Value) -> Value:
    missing = 4 - len(s.shape(value))
    return value if not missing else s.add("unsqueeze", [value], name, axes=tuple(range(missing)))


def _skip_views(s: Regions, made: Value) -> None:
    """Let what reads a result through views that change nothing read it itself."""
    at = made
    while (onward := s.next(at, *IN_ORDER)) is not None:
        at = onward
        if s.p.spec(at) == s.p.spec(made):
            s.replace(at, made)
            at = made


# -- masks -------------------------------------------------------------------------------------------------------------
def _attributes(
    s: Regions, made: Value, seen: tuple[Value, ...], shape: tuple[Any, ...], known: dict[Any, Mask | None],
    masks: dict[Value, Value], out: Value,
) -> None:  # fmt: skip
    """Replace the bias of an `sdpa` by attributes and a key mask, if it is a mask of these."""
    if not seen:
        return
    q, k, v, hidden, *sinks = s.p.operands(made.node)
    operands = [q, k, v]
    form = s.above(hidden, "expand", "unsqueeze")[-1]
    if (form, shape[2:]) not in known:
        known[form, shape[2:]] = recognise(s, form, *shape[2:])
    mask = known[form, shape[2:]]
    if mask is None:
        s.leave("mask", made, f"{s.p.path(hidden)} is an operand of the attention")
        return
    given = {n: v for n, v in s.p.attrs(made.node).items() if n not in ("optional", "causal", "window")}
    extra, optional = sinks, ("sinks",) * len(sinks)
    if mask.key_mask is not None:
        extra, optional = [_key_mask(s, mask.key_mask, masks), *sinks], ("key_mask", *optional)
    path = s.p.path(made.node)
    new = s.add("sdpa", [*operands, *extra], path, made, causal=mask.causal, window=mask.window, optional=optional,
                **given)  # fmt: skip
    s.redirect(made, new)
    s.sweep([made.node])
    s.rename(new, path)
    s.found("mask", new)


def _key_mask(s: Regions, value: Value, masks: dict[Value, Value]) -> Value:
    if s.p.spec(value).dtype is bool_:
        return value
    if value not in masks:
        masks[value] = s.add("cast", [value], f"{s.p.path(value)}.seen", value, dtype=bool_)
    return masks[value]


# -- attentions that are whole -----------------------------------------------------------------------------------------
def _regroup(s: Regions, root: Value) -> None:
    """Let an `sdpa` read q, k and v before views that change nothing, and before key heads are repeated."""
    q, k, v, *extra = s.p.operands(root.node)
    (batch, heads, queries, _), keys, path = s.shape(q), s.shape(k)[2], s.p.path(root.node)
    for operands, factor in _operands(s, _Scores(q, k), v, (batch, heads, queries, keys)):
        if operands == [q, k, v]:
            return
        attrs = {**s.p.attrs(root.node), "scale": s.attr(root, "scale") * factor}
        new = s.add("sdpa", [*operands, *extra], path, root, **attrs)
        if s.agree(root, new, dict.fromkeys((*operands, *extra))):
            s.replace(root, new)
            s.rename(new, path)
            _skip_views(s, new)
            return
        s.sweep([new.node])
