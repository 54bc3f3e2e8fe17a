"""Data-parallel training steps: gradients are averaged over the ranks in the plan of the step, beside the backward.

Invariant: all ranks hold the same parameters after each step, because they apply the same update to the same values.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from graphwright.array import DType, float32
from graphwright.array.world import World, joined, world
from graphwright.autograd import Parameter, Tensor, Variable
from graphwright.errors import UsageError, check_type
from graphwright.files import blake2b_128
from graphwright.ops import call
from graphwright.optim.checkpoint import training_variables
from graphwright.optim.exchange import Exchange
from graphwright.optim.optimizer import Optimizer, wide
from graphwright.optim.training_step import CompiledStep
from graphwright.plan.options import ATEN
from graphwright.program.axes.divide import common_structure, divided_weights

if TYPE_CHECKING:
    from graphwright.program.program import Program

MB = 1 << 20
_LEAST, _MOST_BUCKETS = MB, 8
"""A model smaller than 8 buckets is divided into as many, of at least 1 MiB."""


def agree(value: str, what: str) -> None:
    """Compare a hash on all ranks; `what` says in the error what differs.

    Raises: ProgramsDiffer; CollectivesDiffer if a rank does something else, as after an edit on one rank; RankLost.
    """
    if (group := world().group) is not None:
        group.compare(f"comparison of {what}, as for a step that is traced", programs=[f"{what} {value}"])


def buckets(members: Sequence[Parameter], most: int) -> list[list[Parameter]]:
    """Divide parameters into buckets of at most `most` bytes of gradients of one dtype, keeping their order.

    A parameter that is larger alone has a bucket of its own.
    """
    total = sum(nbytes(p) for p in members)
    most = min(most, max(_LEAST, -(-total // _MOST_BUCKETS)))
    made: list[list[Parameter]] = []
    open_: dict[DType, tuple[list[Parameter], int]] = {}
    for p in members:
        kind, size = p.dtype, nbytes(p)
        bucket, held = open_.get(kind, ([], most))
        if held + size > most:
            bucket, held = [], 0
            made.append(bucket)
        bucket.append(p)
        open_[kind] = bucket, held + size
    return made


def nbytes(p: Parameter) -> int:
    """Return the bytes of the gradient of a parameter."""
    return p.numel() * wide(p.dtype).itemsize


def parts(bucket: Tensor, shapes: Sequence[tuple[int, ...]], start: int = 0) -> list[Tensor]:
    """Return the arrays of these shapes that are one after another in a bucket, as views."""
    found = []
    for shape in shapes:
        size = 1
        for n in shape:
            size *= n
        flat = call("slice", bucket, axis=0, start=start, size=size)
        found.append(call("reshape", flat, shape=shape))
        start += size
    return found


class DataParallel(Exchange):
    """Averages gradients, and the loss, over the ranks: buckets of gradients in the order in which they become ready.

    Attributes:
        world: the ranks.
        bucket_bytes: most bytes of a bucket.
        optimizer: the optimizer of the step.
    """

    def __init__(self, world: World, bucket_bytes: int, optimizer: Optimizer, source: Program) -> None:
        self.world, self.bucket_bytes, self.ranks = world, bucket_bytes, world.ranks
        self.optimizer, self.source = optimizer, source
        self._local: list[Parameter] = []  # divided among the ranks, with a gradient in the present trace
        self._sent: list[str] = []  # which parameters are in the buckets, in order

    def traced(self, source: Program) -> None:
        """Compare the program and the order of gradients with the other ranks; raises the errors of `agree`."""
        agree(common_structure(source), "structure")
        agree(blake2b_128(repr(self._sent).encode()), "order of gradients")

    def mean(self, loss: Tensor, skip: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Return the mean loss of all ranks, and whether a rank skips the update."""
        n, given = self.world.ranks, [loss.to(float32) if loss.dtype.is_low else loss]
        if skip is not None:
            given.append(skip.to(given[0].dtype))
        found = call("all_reduce_wait", call("all_reduce_start", *given, ranks=n, scale=1.0 / n), ranks=n)
        both = parts(found, [()] * len(given))
        return both[0].to(loss.dtype), None if skip is None else both[1] > 0.0

    def gradients(self, members: Sequence[Parameter], gate: Tensor | None) -> None:
        """Replace the gradients by their means over all ranks.

        A divided parameter has the gradient of the sum of the losses of the ranks of its copy already, by their sums.
        """
        here, local = world(), local_variables(self.source)
        self._note(members)
        self._local = [p for p in members if id(p) in local and p.grad is not None]
        whole, everywhere = [p for p in members if id(p) not in local], {"ranks": here.ranks, "group": "run"}
        summed = [(bucket, everywhere) for bucket in buckets(whole, self.bucket_bytes)]
        if here.copies > 1:
            among = {"ranks": here.copies, "group": "data"}
            summed += [(bucket, among) for bucket in buckets(self._local, self.bucket_bytes)]
        else:
            for p in self._local:
                assert p.grad is not None
                p.grad = p.grad * (1.0 / here.ranks)
        gates = () if gate is None else (gate,)
        started = []
        for bucket, among in summed:
            grads = [p.grad.to(wide(p.dtype)) for p in bucket if p.grad is not None]
            attrs = {**among, "scale": 1.0 / here.ranks, "gated": gate is not None}
            started.append((bucket, among, call("all_reduce_start", *grads, *gates, **attrs)))
        for bucket, among, begun in started:
            found = call("all_reduce_wait", begun, **among)
            for p, g in zip(bucket, parts(found, [p.shape for p in bucket]), strict=True):
                p.grad = g

    def _note(self, members: Sequence[Parameter]) -> None:
        """Remember the parameters of the buckets by key, else by number: equal shapes do not tell them apart."""
        names = {id(p): str(i) for i, p in enumerate(self.optimizer.parameters())}
        names |= {id(v): key for key, v in self.source.weights.items()}
        self._sent = [names[id(p)] for p in members]

    def norm(self, norm: Tensor) -> Tensor:
        """Return the norm of the gradients of all ranks of a copy, where parameters of all of them count once."""
        if not self._local:
            return norm
        n, among = world().parts, {"ranks": world().parts, "group": "model"}
        squares = [(p.grad.to(norm.dtype) ** 2).sum() for p in self._local if p.grad is not None]
        divided = call("all_reduce", sum(squares[1:], squares[0]), **among)
        return ((call("all_reduce", norm * norm, **among) - divided) / n + divided).sqrt()

    def found(self, found: Tensor) -> Tensor:
        """Return whether a gradient of any rank is not finite."""
        return found if not self._local else (call("all_reduce", found, ranks=self.ranks) > 0.0).to("float32")


def data_parallel(step: CompiledStep, *, bucket_mb: float = 25.0, shard_optimizer: bool = False) -> CompiledStep:
    """Make a compiled step average its gradients over all ranks; return the step. Each rank feeds its own batch.

    All ranks then compute the update of the mean of their losses, which the step returns. Parameters, states of the
    program and of the optimizer are those of rank 0. The gradients are summed inside the plan of the step: a bucket is
    sent as soon as its last gradient is computed, while the backward continues. With `accumulate=k`, gradients are sent
    on the last of k batches only. After an edit, which all ranks make, the step is traced again, and the programs are
    compared.

    Args:
        step: made by `compile_step`, with equal arguments on all ranks.
        bucket_mb: most MiB of gradients that are sent together. A small model is divided into 8 buckets of at least
            1 MiB.
        shard_optimizer: divide the optimizer's states among the ranks (ZeRO-1): each parameter has an owner, which
            alone receives its gradient, updates it and sends the new value to the others. All ranks must then call
            `save_state`, and gradients are sent on each batch of `accumulate`.
    In a world of one, nothing changes.

    Raises: UsageError for a step of another type, for a size that is not positive, for several ranks without `setup`,
        or for divided states or a Muon of a divided program; ProgramsDiffer; CollectivesDiffer; RankLost.
    """
    check_type("data_parallel, step", step, CompiledStep, "a compiled step", "gw.compile_step(program, ...)")
    if not bucket_mb > 0:
        raise UsageError("the size of a bucket is out of range", where="data_parallel", expected="> 0 MiB",
                         got=bucket_mb)  # fmt: skip
    now = joined("data_parallel")
    if now.group is not None:
        start_equal(step)
        from graphwright.distributed.sharded import ShardedOptimizer

        if step.optimizer.of_matrices and divided_weights(step.source):
            raise UsageError("the update of a divided matrix would be that of its parts", where="data_parallel",
                             got=f"{type(step.optimizer).__name__}, and a program divided by tensor_parallel",
                             fix="another optimizer, such as AdamW")  # fmt: skip
        if shard_optimizer and divided_weights(step.source):
            raise UsageError("the states of divided parameters are divided already", where="data_parallel",
                             got="shard_optimizer=True, and a program divided by tensor_parallel",
                             fix="shard_optimizer=False")  # fmt: skip
        kind = ShardedOptimizer if shard_optimizer else DataParallel
        step.trace_again(kind(now, int(bucket_mb * MB), step.optimizer, step.source), _executor(step))
    return step


def start_equal(step: CompiledStep) -> None:
    """Compare the program with that of the other ranks, and take the values of all variables from rank 0."""
    agree(common_structure(step.source), "structure")
    variables, _ = training_variables(step.source, step.optimizer, step.settings.scaler, step)
    local = local_variables(step.source)
    for p in [p for p in step.optimizer.state if id(p) in local]:
        local |= {id(v) for v in step.optimizer.state[p].variables().values()}
    described = [(name, repr(v.spec)) for name, v in variables.items() if id(v) not in local]
    agree(blake2b_128(repr(described).encode()), "parameters or optimizer states")
    _take_from_first(variables, local)


def local_variables(p: Program) -> set[int]:
    """Return the ids of the variables of which other ranks have parts."""
    return {id(p.weights[key]) for key in divided_weights(p)}


def _take_from_first(variables: Mapping[str, Variable], local: Collection[int]) -> None:
    """Overwrite variables by those of rank 0, and those with an id in `local` by those of the first copy.

    What all ranks have already stays where it is: in a file that they opened, whose weights the hashes of the journal
    name by reference. What one rank has to copy, all copy, so that these hashes stay equal.
    """
    here, other = world(), set[str]()
    for name, variable in variables.items():
        among = {"ranks": here.ranks, "group": "run"}
        if id(variable) in local:
            among = {"ranks": here.copies, "group": "data"}
        value = call("broadcast", variable.detach(), root=0, **among)
        if variable.data.tobytes() != value.data.tobytes():
            variable.assign(value)
            other.add(name)
    if here.group is not None:
        for names in map(json.loads, here.group.exchange(json.dumps(sorted(other)), "values of rank 0")):
            for name in names:
                variables[name].data = variables[name].data.copy()


def _executor(step: CompiledStep) -> str:
    """Return the executor of the step: ATen if a rank has no VM, so that all ranks compute the same bits."""
    group, asked = world().group, step.executor
    if group is None or asked == ATEN:
        return asked
    from graphwright.array.vm.machine import part  # loads numba

    ready = group.exchange(str(part.wait()), "comparison of executors")
    return asked if set(ready) == {"True"} else ATEN
