"""Few plans for many lengths: valid parts are equal, and padding that would change them is noticed."""

from __future__ import annotations

import numpy as np
import pytest

import graphwright as gw
from graphwright.errors import UsageError
from graphwright.plan.running.buckets import BucketMismatch
from graphwright.program import Builder, FeedError, Program

SIZES = {"T": [8, 16]}


def attention(masked: bool) -> Program:
    """Every row looks at every other: padding reaches the valid part unless it is masked."""
    rng = np.random.default_rng(0)
    b = Builder("attention")
    x = b.input("x", ("B", "T", 6))
    k = b.linear(x, b.param("k", rng.normal(size=(6, 6)).astype("f4")), b.param("bias", np.ones(6, np.float32)))
    scores = b.matmul(x, b.permute(k, axes=(0, 2, 1)))
    if masked:
        seen = b.input("seen", ("B", "T"), "bool")
        low = b.mul(
            b.sub(b.cast(seen, dtype="float32"), b.const("one", np.float32(1.0))), b.const("far", np.float32(1e9))
        )
        scores = b.add(scores, b.unsqueeze(low, axes=(1,)))
    b.output(b.matmul(b.softmax(scores), k), "y")
    b.output(b.tanh(x), "rows")
    return b.build()


def feed(n: int) -> np.ndarray:
    return np.random.default_rng(n).normal(size=(2, n, 6)).astype("f4")


def test_masked_padding_keeps_valid_results() -> None:
    p = attention(True)
    run = gw.compile(p, buckets=SIZES, mask="seen")
    plain = gw.compile(p)
    for n in (3, 8, 5, 16, 12, 3, 7, 11, 20):
        seen = np.ones((2, n), bool)
        seen[1, n // 2 :] = False
        for given in ({}, {"seen": seen}):
            ours, theirs = run({"x": feed(n), **given}), plain({"x": feed(n), "seen": np.ones((2, n), bool), **given})
            for name, value in theirs.items():
                assert ours[name].shape == value.shape
                np.testing.assert_allclose(ours[name].numpy(), value.numpy(), rtol=1e-5, atol=1e-6)


def test_few_plans_serve_all_lengths() -> None:
    p = attention(True)
    run = gw.compile(p, buckets=SIZES, mask="seen")
    for n in (2, 9):
        run(x=feed(n))
    made = len(p.derived["plans"])
    for n in range(1, 17):
        run(x=feed(n))
    assert len(p.derived["plans"]) == made == 4  # two sizes, and the two that they were compared with


def test_padding_that_changes_valid_results_raises() -> None:
    run = gw.compile(attention(False), buckets=SIZES)
    assert run(x=feed(8))["y"].shape == (2, 8, 6)  # nothing to pad
    for _ in range(2):
        with pytest.raises(BucketMismatch, match="y: off by") as caught:
            run(x=feed(5))
        assert "rows" not in str(caught.value)


def test_after_an_edit_padding_is_checked_again() -> None:
    p = attention(True)
    run = gw.compile(p, buckets=SIZES, mask="seen")
    run(x=feed(5))
    with p.edit("no mask") as e:
        e.rewire(p.in_edges("softmax")[0], "matmul")
    with pytest.raises(BucketMismatch, match="y: off by"):
        run(x=feed(5))
    p.undo()
    run(x=feed(5))
    with p.edit("another input") as e:
        e.set_outputs(y=e.add("mul", "matmul_2", e.input("z", ("B", "T", 6))))
    assert run(x=feed(5), z=feed(5))["y"].shape == (2, 5, 6)
    with p.edit("a state") as e:
        e.assign("s", e.add("tanh", e.state("s", np.zeros(3, np.float32))))
    with pytest.raises(UsageError, match="writes state"):
        run(x=feed(5), z=feed(5))


def test_invalid_buckets_raise() -> None:
    p = attention(True)
    for sizes, mask in (({"S": [4]}, None), ({"T": []}, None), ({"T": [0]}, None), (SIZES, "x"), (SIZES, "nothing")):
        with pytest.raises(UsageError, match="invalid buckets"):
            gw.compile(p, buckets=sizes, mask=mask)
    b = Builder("step")
    total, x = b.state("total", np.zeros(3, np.float32)), b.input("x", ("T", 3))
    b.assign(total, b.add(total, b.sum(x, axes=(0,))))
    with pytest.raises(UsageError, match="writes state"):
        gw.compile(b.build(), buckets=SIZES)
    run = gw.compile(p, buckets=SIZES, mask="seen")
    with pytest.raises(FeedError, match="x: missing"):
        run()
    with pytest.raises(FeedError, match="z: not an input"):
        run(x=feed(3), z=feed(3))


def test_an_output_that_joins_sizes_has_no_buckets():
    """Of [B·T] rows, the first B·T of a padded run are those without padding only if B is 1."""
    rows = gw.trace(lambda x: x.flatten(0, 1) * 2, np.ones((2, 3, 4), "f4"), sizes={"x": ("B", "T", 4)})
    with pytest.raises(UsageError, match=r"output out: its size B\*T interleaves"):
        gw.compile(rows, buckets={"T": [8]})
    shifted = gw.compile(gw.trace(lambda x: x[:, 1:] * 2, np.ones((2, 3, 4), "f4"), sizes={"x": ("B", "T", 4)}),
                         buckets={"T": [8]})  # fmt: skip
    x = np.random.default_rng(0).normal(size=(3, 5, 4)).astype("f4")
    np.testing.assert_array_equal(shifted(x=x)["out"], x[:, 1:] * 2)
