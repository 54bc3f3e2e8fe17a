"""Arrays and storages: sharing, versions, refusing writes, lifetime."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import graphwright as gw
from graphwright.array import (
    CPU,
    Layout,
    MissingKernel,
    NDArray,
    ReadOnlyArray,
    Spec,
    Storage,
    UnboundDim,
    backend,
    bfloat16,
    broadcast_shapes,
    dtype,
    empty,
    float32,
    from_numpy,
    int64,
)
from graphwright.array.storage import StorageClosed
from graphwright.autograd import Parameter
from graphwright.errors import ShapeError, UsageError
from graphwright.ops import call, compute, get


@given(axes=st.permutations(range(3)), step=st.sampled_from([1, 2, -1]), fortran=st.booleans())
def test_arrays_made_from_numpy_views_share_their_memory(axes, step: int, fortran: bool) -> None:
    block = np.arange(60.0).reshape(3, 4, 5)
    block = np.asfortranarray(block) if fortran else block
    host = block.transpose(axes)[::step]
    array = from_numpy(host, copy=False)
    assert np.array_equal(array.to_numpy(), host)
    assert array.storage.kind == "borrowed"
    host[0, 0, 0] = -7
    assert array.to_numpy()[0, 0, 0] == -7
    assert np.array_equal(call("neg", array).to_numpy(), -host)
    array.copy_from(from_numpy(np.full(host.shape, 5.0)))
    assert (host == 5).all()


@pytest.mark.parametrize(
    "host", [np.float32(3.5), np.zeros((0, 4)), np.zeros((3, 0, 2)).transpose(2, 0, 1), np.ones((), np.int64)]
)
def test_scalars_and_empty_arrays_round_trip(host: np.ndarray) -> None:
    array = from_numpy(host)
    assert array.shape == np.shape(host)
    assert array.to_numpy().shape == np.shape(host)
    assert array.copy().tobytes() == np.asarray(host).tobytes()


def test_each_write_raises_the_version_by_one() -> None:
    array = from_numpy(np.zeros(4))
    array.copy_from(from_numpy(np.ones(4)))
    assert array.storage.version == 1
    view = array.view(Layout((2,), (2,), 1))
    view.copy_from(from_numpy(np.full(2, 5.0)))
    assert array.storage.version == 2
    assert array.to_numpy().tolist() == [1, 5, 1, 5]
    compute(get("neg"), [from_numpy(np.ones(4))], {}, [array])
    assert array.storage.version == 3
    call("neg", array)
    assert array.storage.version == 3


def test_read_only_memory_refuses_writes_and_keeps_its_bytes() -> None:
    host = np.arange(4.0)
    host.flags.writeable = False
    array = from_numpy(host)
    for write in (
        lambda: array.copy_from(from_numpy(np.ones(4))),
        lambda: compute(get("neg"), [array.copy()], {}, [array]),
        lambda: array.view(Layout((2,), (1,))).copy_from(from_numpy(np.ones(2))),
    ):
        with pytest.raises(ReadOnlyArray):
            write()
    assert host.tolist() == [0, 1, 2, 3]
    assert array.storage.version == 0
    assert call("neg", array).to_numpy().tolist() == [0, -1, -2, -3]
    assert from_numpy(np.broadcast_to(np.ones(1), (3,))).storage.readonly


def test_a_mapped_file_is_opened_at_the_first_use_and_never_written(tmp_path) -> None:
    path = tmp_path / "w.bin"
    np.arange(6, dtype=np.float32).tofile(path)
    opened = []

    def touch() -> memoryview:
        opened.append(1)
        return np.memmap(path, np.uint8, "r").data

    array = NDArray(Storage.mapped(touch, 24, CPU), float32, (2, 3))
    assert array.spec == Spec((2, 3), float32)
    assert not opened
    assert not array.storage.touched
    assert array.to_numpy().tolist() == [[0, 1, 2], [3, 4, 5]]
    assert opened == [1]
    with pytest.raises(ReadOnlyArray):
        array.copy_from(array.copy())
    assert np.fromfile(path, np.float32).tolist() == list(range(6))


@pytest.mark.parametrize("offset", [0, 1, 3])
def test_unaligned_bytes_are_read_correctly(offset: int) -> None:
    raw = bytearray(offset) + np.arange(5, dtype=np.float32).tobytes()
    storage = Storage(memoryview(raw)[offset:], 20, CPU, readonly=True)
    assert NDArray(storage, float32, (5,)).to_numpy().tolist() == [0, 1, 2, 3, 4]


def test_a_view_keeps_only_its_storage_alive() -> None:
    gc.disable()
    try:
        base = empty((4, 4), float32)
        header, storage = weakref.ref(base), weakref.ref(base.storage)
        view = call("permute", base, axes=(1, 0))
        del base
        assert header() is None
        assert storage() is view.storage
        del view
        assert storage() is None
    finally:
        gc.enable()


def test_owned_memory_is_aligned() -> None:
    for shape in ((1,), (3, 5), (1000,)):
        assert empty(shape, float32).to_numpy().ctypes.data % 64 == 0
    assert backend(CPU).allocate(100).memory.data_ptr() % 64 == 0


@pytest.mark.parametrize(
    "host", [np.arange(12.0).reshape(3, 4).T[::-1], np.zeros((0, 3)), np.float32(2), np.ones(3, "?")]
)
def test_numpy_converts_an_array_with_its_dtype_and_values(host: np.ndarray) -> None:
    for array in (from_numpy(host), from_numpy(host).copy()):
        seen = np.asarray(array)
        assert seen.dtype == host.dtype
        assert np.array_equal(seen, host)
        assert not host.size or np.shares_memory(seen, array.to_numpy())
        assert not np.shares_memory(np.array(array, copy=True), array.to_numpy())
        assert np.array_equal(np.array(array, copy=False), host)
        wide = np.asarray(array, dtype=np.complex128)
        assert wide.dtype == np.complex128
        assert np.array_equal(wide, host)
        if host.size:
            with pytest.raises(UsageError, match="needs a copy"):
                np.array(array, dtype=np.complex128, copy=False)
    assert np.array_equal(host + from_numpy(np.ones((), host.dtype)), host + np.ones((), host.dtype))
    assert np.stack([from_numpy(host)] * 2).dtype == host.dtype


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_numpy_widens_every_value_of_the_dtypes_that_it_lacks_as_torch_does(name) -> None:
    kind, torch_kind = dtype(name), getattr(torch, name)
    bits = np.arange(2 ** (8 * kind.itemsize), dtype=kind.numpy)
    narrow = from_numpy(bits, bits=kind)
    wanted = torch.from_numpy(bits.view(f"i{kind.itemsize}")).view(torch_kind).float().numpy()
    for seen in (np.asarray(narrow), narrow.to_numpy(), np.asarray(gw.Tensor(narrow)), gw.Tensor(narrow).numpy()):
        assert seen.dtype == np.float32
        np.testing.assert_array_equal(seen, wanted)
    with pytest.raises(UsageError, match="needs a copy"):
        np.array(narrow, copy=False)
    with pytest.raises(UsageError, match="needs a copy"):
        np.array(gw.Tensor(narrow), copy=False)


def test_numpy_copies_arrays_of_other_devices(sim) -> None:
    there = from_numpy(np.ones(3)).to(sim.device)
    assert np.asarray(there).tolist() == [1, 1, 1]
    with pytest.raises(UsageError, match="needs a copy"):
        np.array(there, copy=False)


def test_numpy_cannot_read_a_closed_array() -> None:
    array = empty((3,), float32)
    array.storage.close()
    with pytest.raises(StorageClosed):
        np.asarray(array)


@pytest.mark.parametrize("kind", ["?", "i1", "i8", "f2", "f4", "f8"])
def test_a_number_is_copied_with_its_bits(kind: str) -> None:
    for value in (2**53 + 1, -1, 0.1, float("nan"), float("inf"), -0.0):
        if kind[0] == "f" or np.isfinite(value):
            with np.errstate(over="ignore"):
                source = np.asarray(value).astype(kind)
            target = empty((), from_numpy(source).dtype)
            assert target.copy_from(from_numpy(source)).tobytes() == source.tobytes()
    raw = from_numpy(np.frombuffer(bytes([3]), "u1")).copy()
    assert empty((1,), raw.dtype).copy_from(raw).tobytes() == bytes([3])
    with pytest.raises(ReadOnlyArray):
        from_numpy(np.broadcast_to(np.float64(1), ())).copy_from(from_numpy(np.float64(2)))


@pytest.mark.parametrize("host", [np.arange(6.0), np.zeros((0, 2)), np.arange(6).reshape(2, 3).T, np.arange(6)[::-2]])
def test_an_address_is_that_of_the_first_element(host: np.ndarray) -> None:
    frozen = host.copy("K")
    frozen.flags.writeable = False
    for a in (host, frozen):
        found = from_numpy(a, copy=False)
        assert not a.size or backend(CPU).address(found) == a.ctypes.data


def test_item_and_repr_of_scalars_and_large_arrays() -> None:
    assert from_numpy(np.array([[7]])).item() == 7
    low = call("cast", from_numpy(np.array(1.5)), dtype=bfloat16)
    assert low.item() == 1.5
    assert low.nbytes == 2
    assert repr(low) == "NDArray(1.5, bf16[], cpu)"
    assert repr(from_numpy(np.eye(2, dtype="f4"))) == "NDArray([[1., 0.],\n         [0., 1.]], f32[2, 2], cpu)"
    wide = call("cast", from_numpy(np.arange(1e6, dtype="f4").reshape(1000, 1000) / 8), dtype=bfloat16)
    assert repr(wide).splitlines()[0] == "NDArray([[0, 0.125, 0.25, ..., 124.5, 125, 125],"
    assert repr(wide).endswith(", bf16[1000, 1000], cpu)")
    assert repr(empty((0, 3), int64)) == "NDArray([], i64[0, 3], cpu)"


def test_a_repr_reads_no_file() -> None:
    def touch() -> memoryview:
        raise AssertionError("read")

    array = NDArray(Storage.mapped(touch, 24, CPU), float32, (2, 3))
    assert repr(array) == "NDArray(f32[2, 3], cpu, not read from its file)"
    assert repr(Parameter(array)) == "Tensor(f32[2, 3], not yet read from its file, requires_grad=True)"
    assert not array.storage.touched


def test_missing_kernels_are_named() -> None:
    with pytest.raises(MissingKernel, match="conv9d"):
        backend(CPU).bind("conv9d", [], [], {}, [])


def test_a_bfloat16_scalar_converts_to_a_0_d_array() -> None:
    one = empty((), bfloat16).copy_from(from_numpy(np.array(1.5, np.float32))).to_numpy("float32")
    assert isinstance(one, np.ndarray)
    assert (one.shape, one.item()) == ((), 1.5)


def test_specs_bind_named_sizes_and_round_trip() -> None:
    spec = Spec(("B", 8), float32)
    assert spec.symbolic
    assert repr(spec) == "f32[B, 8]"
    assert Spec.from_json(spec.to_json()) == spec
    for ask in (lambda: spec.size, lambda: spec.sizes, lambda: spec.nbytes):
        with pytest.raises(UnboundDim, match="B, 8"):
            ask()
    assert spec.bind({"B": 3}).sizes == (3, 8)
    dims: dict[str, int] = {}
    assert spec.match((3, 8), dims)
    assert dims == {"B": 3}
    assert not spec.match((4, 8), dims)
    assert not spec.match((3, 8, 1), dims)
    assert spec.bind(dims) == Spec((3, 8), float32)
    assert spec.bind(dims).nbytes == 96
    assert (repr(Spec((), int64)), repr(Spec((2,), bfloat16))) == ("i64[]", "bf16[2]")


@given(st.lists(st.lists(st.sampled_from([0, 1, 1, 3]), max_size=4).map(tuple), min_size=1, max_size=3))
def test_broadcast_shapes_match_numpy(shapes: list[tuple[int, ...]]) -> None:
    try:
        theirs = np.broadcast_shapes(*shapes)
    except ValueError:
        with pytest.raises(ShapeError, match="axis"):
            broadcast_shapes(*shapes)
        return
    assert broadcast_shapes(*shapes) == theirs


def test_a_named_size_broadcasts_with_one_and_itself_only() -> None:
    assert broadcast_shapes(("B", 1), (1, 4), ("B", 4)) == ("B", 4)
    with pytest.raises(ShapeError):
        broadcast_shapes(("B",), (3,))
    with pytest.raises(ShapeError):
        broadcast_shapes(("B",), ("C",))


def test_one_element_is_formatted_and_rounded_as_a_number():
    for array in (from_numpy(np.array(2.34567, np.float32)), from_numpy(np.array([2.34567]))):
        assert (f"{array:.2f}", round(array, 2), round(array)) == ("2.35", pytest.approx(2.35), 2)
    assert f"{from_numpy(np.array(7)):04d}" == "0007"
    many = from_numpy(np.ones(3))
    assert f"{many}" == str(many)
    with pytest.raises(ShapeError, match="exactly one element"):
        f"{many:.2f}"
    with pytest.raises(ShapeError):
        round(many, 2)
