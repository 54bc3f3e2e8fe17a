"""Loaders: each index once over ranks, orders from seed and epoch, resuming at any batch; token windows."""

from __future__ import annotations

from itertools import count, islice, permutations, zip_longest
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

import graphwright as gw
from graphwright.array import world
from graphwright.autograd import Tensor
from graphwright.data import DataLoader, Dataset, IterableDataset, TensorDataset, TokenWindows, pad, stack
from graphwright.errors import GraphwrightError, IndexOutOfRange, ShapeError, UsageError
from graphwright.files import UnreadableFile


class Numbers(Dataset):
    """0, 1, ... as items, without a fast batch."""

    def __init__(self, n: int) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    def __init__(self, n: int) -> None:
        self.n = n

    def __iter__(self):
        return iter(range(self.n))


def epoch(loader: DataLoader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("n", [0, 1, 8, 13])
def test_each_index_occurs_once_over_all_ranks(kind, ranks, size, n):
    for shuffle in (False, True) if kind is Numbers else (False,):
        loaders = [DataLoader(kind(n), size, shuffle=shuffle, seed=5, rank=r, ranks=ranks) for r in range(ranks)]
        for _ in range(2):
            batches = [epoch(loader) for loader in loaders]
            assert sorted(i for rank in batches for b in rank for i in b) == list(range(n))
            if kind is Numbers:
                assert [len(rank) for rank in batches] == [len(loader) for loader in loaders]


@pytest.mark.parametrize("ranks", [1, 3])
def test_drop_last_gives_all_ranks_the_same_number_of_full_batches(ranks):
    loaders = [DataLoader(Numbers(20), 3, drop_last=True, rank=r, ranks=ranks) for r in range(ranks)]
    batches = [epoch(loader) for loader in loaders]
    assert {len(rank) for rank in batches} == {20 // (3 * ranks)}
    assert all(len(b) == 3 for rank in batches for b in rank)
    assert [len(b) for b in DataLoader(Stream(7), 3, drop_last=True)] == [3, 3]


def test_orders_depend_only_on_seed_and_epoch():
    a, b, other = (DataLoader(Numbers(50), 50, shuffle=True, seed=s) for s in (1, 1, 2))
    first, second = epoch(a), epoch(a)
    assert first != second
    assert (epoch(b), epoch(b)) == (first, second)
    assert epoch(other) != first
    positions = np.mean([np.argsort(a.order(e)) for e in range(2000)], axis=0)
    assert np.abs(positions - 24.5).max() < 5 * 50 / 12**0.5 / 2000**0.5  # each index is as often early as late


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("at", range(9))
def test_a_loader_resumes_from_another_loaders_state(kind, at):
    def make() -> DataLoader:
        return DataLoader(kind(10), 3, shuffle=kind is Numbers, seed=3)

    def flow(loader: DataLoader):
        for _ in count():
            yield from epoch_of(loader)

    def epoch_of(loader: DataLoader):
        for batch in loader:
            yield loader.state_dict(), batch.tolist()

    whole = list(islice(flow(make()), 12))
    loader = make()
    if at:
        loader.load_state_dict(whole[at - 1][0])
    assert [b for _, b in islice(flow(loader), 12 - at)] == [b for _, b in whole[at:]]


@pytest.mark.parametrize("kind", [Numbers, Stream])
@pytest.mark.parametrize("sizes", [{1: 12, 2: 6, 3: 4}, {1: 5, 2: 3, 3: 4}])
def test_an_epoch_continues_on_other_numbers_of_ranks(kind, sizes):
    whole = [i for b in DataLoader(kind(100), 7, shuffle=kind is Numbers, seed=3, rank=0, ranks=1) for i in b.tolist()]
    for order in permutations((1, 2, 3)):
        state: dict[str, Any] | None = None
        seen: list[int] = []
        for ranks in order:
            loaders = [
                DataLoader(kind(100), sizes[ranks], shuffle=kind is Numbers, seed=3, rank=r, ranks=ranks)
                for r in range(ranks)
            ]
            if state is not None:
                for loader in loaders:
                    loader.load_state_dict(state)
            steps = [
                [b.tolist() for b in islice(iter(loader), 2 if ranks != order[-1] else None)] for loader in loaders
            ]
            for step in zip_longest(*steps, fillvalue=[]):
                seen += [i for row in zip_longest(*step) for i in row if i is not None]
            state = loaders[0].state_dict()
        assert seen == whole, order


def test_lengths_refuse_a_state_of_ranks_with_another_batch_together():
    lengths = np.arange(100)
    two = DataLoader(Numbers(100), 6, lengths=lengths, rank=0, ranks=2)
    next(iter(two))
    DataLoader(Numbers(100), 4, lengths=lengths, rank=0, ranks=3).load_state_dict(two.state_dict())
    with pytest.raises(UsageError, match="another size together"):
        DataLoader(Numbers(100), 6, lengths=lengths, rank=0, ranks=3).load_state_dict(two.state_dict())


def test_ranks_are_those_of_the_run():
    world.enter(world.World(1, 3))
    try:
        own = DataLoader(Numbers(10), 2)
        assert [b.tolist() for b in own] == [[1, 4], [7]]
        assert DataLoader(Numbers(10), 2, rank=0, ranks=1).ranks == 1
    finally:
        world.enter(None)


def test_an_aborted_epoch_is_followed_by_the_next():
    loader = DataLoader(Numbers(6), 2, shuffle=True)
    for _ in loader:
        break
    assert epoch(loader) == [list(loader.order(1)[i : i + 2]) for i in (0, 2, 4)]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"epoch": 0, "done": -1, "seed": 0, "batch_size": 2},
        {"epoch": 0.0, "done": 0, "seed": 0, "batch_size": 2},
        {"epoch": 0, "done": 0, "seed": 1, "batch_size": 2},
        {"epoch": 0, "done": 0, "seed": 0, "batch_size": 3},
    ],
)
def test_states_of_other_loaders_are_refused(state):
    loader = DataLoader(Numbers(6), 2)
    with pytest.raises(UsageError, match="state"):
        loader.load_state_dict(state)
    own = {"first": 0, "ranks": loader.ranks}
    assert loader.state_dict() == {"epoch": 0, "done": 0, "seed": 0, "batch_size": 2, **own}


def test_batches_stack_each_entry():
    x, y = np.arange(12, dtype=np.float32).reshape(6, 2), np.arange(6)
    (a, b), _ = DataLoader(TensorDataset(x, y), 3)
    assert (a.shape, a.dtype.name, b.shape, b.dtype.name) == ((3, 2), "float32", (3,), "int64")
    np.testing.assert_array_equal(a.numpy(), x[:3])
    items = [{"x": x[i], "pair": (i, 0.5)} for i in range(3)]
    made = stack(items)
    np.testing.assert_array_equal(made["x"].numpy(), x[:3])
    assert made["pair"][0].tolist() == [0, 1, 2]
    assert isinstance(made["pair"][1], Tensor)
    assert DataLoader(Numbers(4), 2, collate_fn=sum).__iter__().__next__() == 1
    assert TensorDataset(x, y)[2][1] == 2
    with pytest.raises(ShapeError, match="differ in shape"):
        stack([x[0], x[0, :1]])


@pytest.mark.parametrize(
    "make",
    [
        lambda: DataLoader(Numbers(3), 0),
        lambda: DataLoader(Numbers(3), 1, rank=2, ranks=2),
        lambda: DataLoader(Stream(3), shuffle=True),
        lambda: len(DataLoader(Stream(3))),
        lambda: TensorDataset(),
        lambda: TensorDataset(np.zeros(3), np.zeros(4)),
        lambda: TensorDataset(np.zeros(())),
    ],
)
def test_invalid_loaders_are_refused(make):
    with pytest.raises(GraphwrightError):
        make()


# -- tokens ------------------------------------------------------------------------------------------------------------
def write(path, ids, dtype: npt.DTypeLike = "<u2"):
    np.asarray(ids, dtype).tofile(path)
    return path


@pytest.mark.parametrize("dtype", ["uint16", "uint32", "int32", "int64"])
@pytest.mark.parametrize("stride", [None, 1, 3, 7])
def test_token_windows_match_a_loop_over_the_files(tmp_path, dtype, stride):
    texts = [np.arange(100, 123), np.arange(7), np.arange(1000, 1006)]
    paths = [write(tmp_path / f"{i}.bin", t, np.dtype(dtype).newbyteorder("<")) for i, t in enumerate(texts)]
    data = TokenWindows(paths, 5, stride=stride, dtype=dtype)
    expected = [t[s : s + 6] for t in texts for s in range(0, len(t) - 5, stride or 5)]
    assert len(data) == len(expected)
    for i, ids in enumerate(expected):
        np.testing.assert_array_equal(data[i][0], ids[:-1])
        np.testing.assert_array_equal(data[i][1], ids[1:])
    x, y = data.batch(np.arange(len(data)))
    np.testing.assert_array_equal(x.numpy(), [e[:-1] for e in expected])
    np.testing.assert_array_equal(y.numpy(), [e[1:] for e in expected])
    with pytest.raises(IndexOutOfRange):
        data[len(data)]


def test_token_files_without_a_window_are_refused(tmp_path):
    short = write(tmp_path / "short.bin", range(5))
    odd: Any = tmp_path / "odd.bin"
    odd.write_bytes(bytes(21))
    empty: Any = tmp_path / "empty.bin"
    empty.write_bytes(b"")
    for path in (short, odd):
        with pytest.raises(UsageError, match=r"too short for one window|partial id"):
            TokenWindows(path, 5)
    for path in (empty, tmp_path / "absent.bin"):
        with pytest.raises(UnreadableFile):
            TokenWindows([path], 5)
    refused: list[dict[str, Any]] = [{"window": 0}, {"window": 2, "stride": 0}, {"window": 2, "dtype": "float32"}]
    for options in refused:
        with pytest.raises(UsageError):
            TokenWindows(short, **options)
    with pytest.raises(UsageError, match="no token files"):
        TokenWindows([], 4)
    assert len(TokenWindows(str(short), 4)) == 1


SEQUENCES = [list(range(7)), tuple(range(7)), np.arange(14.0).reshape(7, 2), [(i, np.full(2, i)) for i in range(5)],
             [{"x": np.ones(3) * i, "y": i} for i in range(5)]]  # fmt: skip


@pytest.mark.parametrize("data", SEQUENCES)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_list_tuple_or_array_is_batched_as_by_torch(data, drop_last):
    from torch.utils.data import DataLoader as TorchLoader

    ours = list(DataLoader(data, 3, drop_last=drop_last))
    theirs = list(TorchLoader(data, 3, drop_last=drop_last))
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(other, dict):
            assert mine.keys() == other.keys()
            pairs = [(mine[key], other[key]) for key in other]
        else:
            pairs = zip(mine, other, strict=True) if isinstance(other, list) else [(mine, other)]
        for a, b in pairs:
            assert np.array_equal(a.numpy(), b.numpy())
            assert str(a.numpy().dtype) == str(b.dtype).removeprefix("torch.")


def test_a_shuffled_list_has_the_order_of_a_dataset_and_resumes():
    first = DataLoader(list(range(10)), 3, shuffle=True, seed=5)
    assert np.concatenate([b.numpy() for b in first]).tolist() == first.order(0).tolist()


@pytest.mark.parametrize("data", [{0: 1}, 5, iter([1])])
def test_a_dataset_without_indexed_items_is_refused(data):
    with pytest.raises(UsageError, match="no items by index"):
        DataLoader(data)


# -- lengths -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("shuffle", [False, True])
def test_items_of_similar_length_share_a_batch(ranks, shuffle):
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, 500, 1003)
    loaders = [
        DataLoader(list(range(1003)), 8, shuffle=shuffle, lengths=lengths, rank=r, ranks=ranks) for r in range(ranks)
    ]
    for _ in range(2):
        batches = [[batch.tolist() for batch in loader] for loader in loaders]
        assert sorted(i for rank in batches for b in rank for i in b) == list(range(1003))
        assert {len(b) for rank in batches for b in rank[:-1]} == {8}
        spent = sum(len(b) * lengths[b].max() for rank in batches for b in rank)
        assert spent < 1.06 * lengths.sum()
    unsorted = DataLoader(list(range(1003)), 8, shuffle=True)
    assert sum(len(b) * lengths[b.numpy()].max() for b in unsorted) > 1.6 * lengths.sum()


def test_batches_of_lengths_change_with_the_epoch_and_are_not_in_order_of_length():
    lengths = np.random.default_rng(0).integers(1, 500, 1000)
    loader = DataLoader(list(range(1000)), 8, shuffle=True, lengths=lengths)
    first, second = ([frozenset(b.tolist()) for b in loader] for _ in range(2))
    assert set(first) != set(second)
    means = [lengths[list(b)].mean() for b in first]
    assert abs(np.corrcoef(means, np.arange(len(means)))[0, 1]) < 0.4
    again = DataLoader(list(range(1000)), 8, shuffle=True, lengths=lengths)
    again.load_state_dict({"epoch": 1, "done": 3, "seed": 0, "batch_size": 8})
    assert [frozenset(b.tolist()) for b in again] == second[3:]
    with pytest.raises(ShapeError, match="one length per item"):
        DataLoader(list(range(3)), lengths=[1, 2])
    with pytest.raises(UsageError, match="lengths"):
        DataLoader(Stream(3), lengths=[1, 2, 3])


def test_padded_rows_match_torch():
    import torch

    rows = [np.arange(n) for n in (3, 0, 5)]
    made, mask = pad(rows, -1)
    truth = torch.nn.utils.rnn.pad_sequence([torch.tensor(r) for r in rows], batch_first=True, padding_value=-1)
    np.testing.assert_array_equal(made.numpy(), truth.numpy())
    np.testing.assert_array_equal(mask.numpy(), np.arange(5) < [[3], [0], [5]])
    wide, _ = pad([np.ones((2, 3), "f4"), np.ones((1, 3), "f4")])
    assert (wide.shape, wide.dtype.name, wide.numpy().sum()) == ((2, 2, 3), "float32", 9)
    loader = DataLoader([list(range(1, 1 + n)) for n in (1, 3, 2)], 3, collate_fn=pad)
    assert next(iter(loader))[0].tolist() == [[1, 0, 0], [1, 2, 3], [1, 2, 0]]
    for wrong in ([np.ones(()), np.ones(1)], [np.ones((2, 3)), np.ones((2, 4))]):
        with pytest.raises(ShapeError, match="first axis"):
            pad(wrong)


def test_items_that_do_not_fit_together_raise_typed_errors() -> None:
    for error, call in (
        (UsageError, lambda: list(DataLoader([{"a": 1}, {"b": 2}], batch_size=2))),
        (ShapeError, lambda: list(DataLoader([(1, 2), (1,)], batch_size=2))),
        (UsageError, lambda: DataLoader([1, 2], batch_size=1.5)),  # pyright: ignore[reportArgumentType]
        (UsageError, lambda: pad([])),
    ):
        with pytest.raises(error):
            call()


def test_concatenated_datasets_and_torch_arguments_match_torch() -> None:
    parts = [[1, 2, 3], [4], [], [5, 6]]
    mine, theirs = gw.data.ConcatDataset(parts), torch.utils.data.ConcatDataset(parts)  # type: ignore[arg-type]
    assert len(mine) == len(theirs)
    assert [mine[i] for i in range(-6, 6)] == [theirs[i] for i in range(-6, 6)]
    with pytest.raises(IndexError):
        mine[6]
    with pytest.raises(UsageError):
        gw.data.ConcatDataset([])
    batches = [b.tolist() for b in DataLoader(mine, 4, False, num_workers=0, pin_memory=True, drop_last=True)]
    assert batches == [b.tolist() for b in torch.utils.data.DataLoader(theirs, 4, False, drop_last=True)]
