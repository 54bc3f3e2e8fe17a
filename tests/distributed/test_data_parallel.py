"""The step of a data-parallel training in one process: its plan, its executors, its buckets, its errors."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import training_on_ranks as on_ranks

import graphwright as gw
from graphwright import distributed
from graphwright.array.world import World
from graphwright.distributed.data_parallel import DataParallel, buckets
from graphwright.distributed.sharded import ShardedOptimizer
from graphwright.errors import UsageError
from graphwright.plan import Executable, ParallelExecutable


def shared(kind=DataParallel, **options):
    """A step that exchanges with a world of one."""
    p, step = on_ranks.compiled(12, **options)
    step.trace_again(kind(World(), 1 << 10, step.optimizer, step.source), "auto")
    return p, step


@pytest.mark.parametrize("kind", [DataParallel, ShardedOptimizer])
@pytest.mark.parametrize("options", [{}, {"clip": 0.05}, {"accumulate": 3, "clip": 0.5}, {"remat": 16_000}])
def test_a_world_of_one_trains_bit_for_bit_as_without(kind, options):
    given = on_ranks.batches(7, 12)
    p, step = on_ranks.compiled(12, deterministic=True, **options)
    plain = on_ranks.trained(step, given)
    q, with_exchange = on_ranks.compiled(12, deterministic=True, **options)
    with_exchange.trace_again(kind(World(), 1 << 10, with_exchange.optimizer, with_exchange.source), "aten")
    assert on_ranks.trained(with_exchange, given) == plain
    if kind is DataParallel or "clip" not in options:  # the norm over ranks is the root of a square
        assert on_ranks.weights(q) == on_ranks.weights(p)
    np.testing.assert_allclose(on_ranks.weights(q), on_ranks.weights(p), atol=1e-7)


def test_memory_of_a_bucket_is_its_own_until_its_last_reader():
    """A poisoned run fills memory with NaN after its last use, and the parallel executor runs in other orders."""
    (x, targets), *_ = on_ranks.batches(1, 12)
    for make in (lambda plan: Executable(plan, poison=True), lambda plan: ParallelExecutable(plan, threads=2)):
        p, step = shared()
        make(step.plan).run({"x": x, "targets": targets})
        q, again = shared()
        again(x=x, targets=targets)
        assert on_ranks.weights(p) == on_ranks.weights(q)


def test_collectives_keep_their_order_in_the_parallel_executor():
    from graphwright.plan.planning.hazards import dependencies

    _, step = shared()
    plan = step.plan
    together = [i for i, instr in enumerate(plan.instrs) if "all_reduce" in instr.op]
    pairs = {(d.before, d.after) for d in dependencies(plan)}
    assert pairs >= set(pairwise(together))


def test_a_plan_runs_collectives_whose_results_are_not_read():
    b = gw.Builder("unread")
    x = b.input("x", (3,))
    b.op("all_reduce", x, ranks=1)
    b.op("tanh", x)
    b.output(b.op("exp", x), "y")
    assert [i.op for i in b.build().compile(x=(3,)).instrs] == ["all_reduce", "exp"]


def test_equal_collectives_are_neither_merged_nor_folded():
    b = gw.Builder("twice")
    w = b.param("w", np.ones(3, np.float32))
    b.output(b.op("add", b.op("all_reduce", w, ranks=1), b.op("all_reduce", w, ranks=1)), "y")
    plan = b.build().compile(freeze=True)
    assert [i.op for i in plan.instrs] == ["all_reduce", "all_reduce", "add"]


def test_starts_keep_the_order_of_the_program_among_collectives():
    """The second bucket is ready before the first: it is sent after it."""
    b = gw.Builder("order")
    x, y = b.input("x", (8, 8)), b.input("y", (8, 8))
    late = b.op("matmul", b.op("matmul", x, x), x)
    first = b.op("all_reduce_start", late, ranks=1)
    second = b.op("all_reduce_start", b.op("tanh", y), ranks=1)
    work = b.op("matmul", y, y)
    for name, bucket in (("a", first), ("b", second)):
        b.output(b.op("exp", b.op("all_reduce_wait", bucket, ranks=1)), name)
    b.output(work, "c")
    ops = [i.op for i in b.build().compile(x=(8, 8), y=(8, 8), deterministic=True).instrs]
    assert ops == [
        "matmul", "matmul", "all_reduce_start", "tanh", "all_reduce_start", "matmul", "all_reduce_wait", "exp",
        "all_reduce_wait", "exp",
    ]  # fmt: skip


def test_buckets_keep_the_order_and_their_size():
    of = lambda *sizes: [gw.Parameter(np.zeros(n, np.float32)) for n in sizes]  # noqa: E731
    members = of(10, 10, 30, 5, 5)
    made = buckets(members, 80)
    assert [[p.numel() for p in bucket] for bucket in made] == [[10, 10], [30], [5, 5]]
    assert [p for bucket in made for p in bucket] == members
    large = of(*[1 << 18] * 32)  # of 1 MiB each
    assert [len(b) for b in buckets(large, 25 << 20)] == [4] * 8
    assert buckets([], 10) == []


def test_the_loss_scale_and_skips_work_with_an_exchange():
    from graphwright.amp import GradScaler

    given = on_ranks.batches(4, 12)
    found = []
    for kind in (None, DataParallel, ShardedOptimizer):
        p, step = on_ranks.compiled(12, scaler=GradScaler(2.0**10), clip=0.5)
        if kind is not None:
            step.trace_again(kind(World(), 1 << 10, step.optimizer, step.source), "auto")
        on_ranks.trained(step, given)
        bad = given[0][0].copy()
        bad[0] = np.inf
        on_ranks.trained(step, [(bad, given[0][1])])
        found.append((on_ranks.weights(p), step.settings.scaler.get_scale()))
    for weights, scale in found[1:]:
        np.testing.assert_allclose(weights, found[0][0], atol=1e-7)
        assert scale == found[0][1] == 2.0**9


def test_a_training_is_saved_after_an_update_not_with_sums_of_one_rank(tmp_path):
    p, step = shared(accumulate=2)
    on_ranks.trained(step, on_ranks.batches(1, 12))
    step.exchange.ranks = 2
    with pytest.raises(UsageError, match="sums of gradients on other ranks"):
        gw.save_state(tmp_path / "s", p, step.optimizer, compiled=step)
    assert not (tmp_path / "s").exists()
    on_ranks.trained(step, on_ranks.batches(1, 12))
    gw.save_state(tmp_path / "s", p, step.optimizer, compiled=step)


def test_a_world_of_one_needs_no_exchange_and_bad_sizes_are_refused():
    _, step = on_ranks.compiled(12)
    assert distributed.data_parallel(step) is step
    assert step.exchange is None
    with pytest.raises(UsageError, match="size of a bucket"):
        distributed.data_parallel(step, bucket_mb=0)
