"""The CUDA programs of the BF16 GEMM in the emulator: every layout, ragged edges, cuts, and no detector fires."""

import math

import pytest
import torch

from cake_shared.emulator import AsyncInFlight, Options, OutOfBounds
from cake_shared.gemm.problem import GemmProblem
from cake_shared.target import TARGETS
from cake_shared.testing.emulated import EmulatedPackage, emulated_or_skip
from dense_projection_det_gemm import cuda
from dense_projection_det_gemm.cuda_plan import NATIVE, plan_gemm_cuda, units_of

BF16, FP32 = torch.bfloat16, torch.float32
ORDERS = (
    Options(order="eager"),
    Options(order="lazy"),
    Options(order="random", seed=1),
)
LIMIT = {BF16: 4e-3, FP32: 1e-6}
LAYOUTS = [("k", "k"), ("k", "n"), ("m", "n"), ("m", "k")]


@pytest.fixture(scope="module")
def emulated():
    return emulated_or_skip(cuda.PACKAGE)


def matrix(batch, rows, cols, rows_are_major, seed, dtype=BF16):
    """A view `[batch, rows, cols]` of a buffer with 8 elements more in each row of memory."""
    generator = torch.Generator().manual_seed(seed)
    inner, outer = (rows, cols) if rows_are_major else (cols, rows)
    pitch = math.ceil(inner / 8) * 8 + 8
    buffer = torch.randn(batch, outer, pitch, generator=generator).to(dtype)[:, :, :inner]
    return buffer.transpose(1, 2) if rows_are_major else buffer


def beyond(view):
    """The eight elements of memory after each row of a `matrix`, and the gap to them."""
    inner = 2 if view.stride(2) == 1 else 1
    count = view.stride(3 - inner) - view.shape[inner]
    shape, strides = list(view.shape), view.stride()
    shape[inner] = count
    return view.as_strided(shape, strides, view.storage_offset() + view.shape[inner])


def compute(
    package,
    architecture,
    size,
    layout,
    dtype=BF16,
    out_major="n",
    *,
    accumulate=False,
    stage=None,
    pieces=None,
    whole=0,
    halved=False,
    swapped=None,
    multiprocessors=4,
):
    """Run one product and compare it with float64; returns a contiguous copy of the result and its plan."""
    batch, m, n, k = size
    a = matrix(batch, m, k, layout[0] == "m", 1)
    b = matrix(batch, k, n, layout[1] == "k", 2)
    out = matrix(batch, m, n, out_major == "m", 3, dtype)
    exact = torch.matmul(a.double(), b.double()) + (out.double() if accumulate else 0)
    name = {BF16: "bfloat16", FP32: "float32"}[dtype]
    problem = GemmProblem(batch, m, n, k, *layout, name, out_major, accumulate, "cuda")
    padding = beyond(out).clone()
    if not accumulate:
        out.fill_(math.nan)
    with package:
        backend = cuda.GemmBackend(package.module, architecture, multiprocessors, lambda: 0)
        plan = plan_gemm_cuda(
            problem, backend.native, stage=stage, pieces=pieces, whole=whole, halved=halved, swapped=swapped
        )
        backend.prepare("gemm_out", problem, a, b, out, plan)[1]()
    error = float((out.double() - exact).norm() / exact.norm().clamp(min=1e-30))
    assert error < LIMIT[dtype], (error, plan)
    assert torch.equal(beyond(out), padding)
    return out.clone(memory_format=torch.contiguous_format), plan


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
@pytest.mark.parametrize("stage", NATIVE)
@pytest.mark.parametrize("architecture", TARGETS)
def test_every_layout(emulated, architecture, stage, layout):
    """Each program under every order of completion, layout by layout."""
    package = emulated(architecture)
    package.options = ORDERS[LAYOUTS.index(layout) % len(ORDERS)]
    results = [
        compute(package, architecture, (1, 137, 72, 100), layout, dtype, stage=stage)[0].to(BF16) for dtype in LIMIT
    ]
    assert torch.equal(*results)  # rounded once, from the same sum


@pytest.mark.parametrize("architecture", TARGETS)
def test_every_order_of_completion(emulated, architecture):
    package = emulated(architecture)
    for package.options in ORDERS:
        compute(package, architecture, (2, 300, 136, 200), ("k", "n"), stage="middle_out")
        compute(package, architecture, (2, 40, 520, 700), ("m", "n"), FP32, pieces=3)


@pytest.mark.parametrize("stage", ["slim_out", "wide_out", "middle_out"])
@pytest.mark.parametrize("architecture", TARGETS)
def test_cut_contraction(emulated, architecture, stage):
    """Pieces give the same bits whatever the multiprocessors, accumulate after their sum, and are rounded once."""
    package = emulated(architecture)
    package.options = Options(order="random", seed=2)
    size = (1, 72, 264, 330)
    results = [
        compute(
            package,
            architecture,
            size,
            ("m", "n"),
            FP32,
            stage=stage,
            pieces=3,
            multiprocessors=count,
        )[0]
        for count in (2, 7)
    ]
    assert torch.equal(*results)
    compute(
        package,
        architecture,
        size,
        ("m", "n"),
        FP32,
        stage=stage,
        pieces=3,
        accumulate=True,
    )
    rounded, plan = compute(package, architecture, size, ("m", "n"), BF16, stage=stage, pieces=3)
    assert plan.cut.pieces == 3
    assert torch.equal(results[0].to(BF16), rounded)


@pytest.mark.parametrize("architecture", TARGETS)
def test_last_units_cut(emulated, architecture):
    """The first units contract everything, the others are cut, over batches."""
    package = emulated(architecture)
    package.options = Options(order="lazy")
    for dtype in LIMIT:
        _, plan = compute(
            package,
            architecture,
            (2, 300, 264, 200),
            ("m", "n"),
            dtype,
            stage="middle_out",
            pieces=2,
            whole=3,
        )
        assert (plan.cut.whole_units, plan.cut.pieces) == (3, 2)
    compute(
        package,
        architecture,
        (2, 300, 264, 200),
        ("m", "n"),
        FP32,
        stage="wide_out",
        pieces=4,
        whole=1,
        accumulate=True,
    )


@pytest.mark.parametrize("layout", LAYOUTS, ids="".join)
def test_halved_units(emulated, layout):
    """The same bits as whole ones, in every layout, beside whole ones and ragged."""
    package = emulated("sm_90a")
    size = (2, 300, 456, 200)
    for dtype, stage, package.options in zip(LIMIT, ("wide_out", "wide_out"), ORDERS[1:]):
        whole, _ = compute(package, "sm_90a", size, layout, dtype, stage=stage)
        halved, plan = compute(package, "sm_90a", size, layout, dtype, stage=stage, whole=3, halved=True)
        assert plan.cut.halved
        assert torch.equal(whole, halved)


@pytest.mark.parametrize("layout", [("k", "k"), ("m", "n")], ids="".join)
def test_one_cluster_walks_many_units(emulated, layout):
    """Stages and results go on from unit to unit, over batches."""
    package = emulated("sm_90a")
    package.options = Options(order="lazy")
    for stage in ("wide_out", "broad_out", "square_out"):
        compute(package, "sm_90a", (2, 600, 136, 200), layout, stage=stage, pieces=1, multiprocessors=2)
    for stage in ("broad_out", "square_out"):  # several batches at a stride
        compute(package, "sm_90a", (5, 400, 72, 72), layout, stage=stage, pieces=1, multiprocessors=6)


@pytest.mark.parametrize("layout", LAYOUTS[:2] + LAYOUTS[3:], ids="".join)
def test_last_rows_by_two_ctas_with_columns_of_their_own(emulated, layout):
    """An odd and an even number of column units, over batches, beside halved units, direct stores and added results."""
    package = emulated("sm_90a")
    sizes = (2, 380, 600, 200), (1, 290, 450, 136), (2, 100, 512, 72), (1, 280, 514, 136)
    for package.options, dtype, size in zip((*ORDERS, ORDERS[0]), (BF16, FP32, FP32, BF16), sizes):
        if layout[1] == "n" and size[2] % 8:
            continue
        expected, _ = compute(package, "sm_90a", size, layout, dtype, stage="middle_out", pieces=1)
        for options in ({"pieces": 1}, {"whole": 2, "halved": True}):
            actual, plan = compute(
                package, "sm_90a", size, layout, dtype, stage="wide_out", multiprocessors=4, **options
            )
            columns, batch = math.ceil(size[2] / 256), size[0]
            assert units_of(plan.tile, *size[:3], True) == batch * (size[1] // 256 * columns + math.ceil(columns / 2))
            assert torch.equal(actual, expected)


@pytest.mark.parametrize("depth", [24, 32, 56])
def test_units_that_write_whole_rows(emulated, depth):
    """A last column of units apart, units found by strides, half of a block that is neither copied nor multiplied."""
    package = emulated("sm_90a")
    for package.options, layout, batch in zip((*ORDERS, ORDERS[0]), LAYOUTS, (1, 2, 1, 1)):
        size = (batch, 600, 456, depth)
        expected, plan = compute(package, "sm_90a", size, layout, stage="middle_out", pieces=1)
        assert plan.group_rows == 1
        for count in (4, 10):
            actual, _ = compute(package, "sm_90a", size, layout, stage="broad_out", pieces=1, multiprocessors=count)
            assert torch.equal(actual, expected)


KEPT = [stage for stage, tile in NATIVE.items() if tile.kept_blocks]


@pytest.mark.parametrize("stage", KEPT)
def test_a_kept_operand_changes_with_batch_and_columns(emulated, stage):
    """While A streams on, however units are dealt out: the bits of a program that reads B with every tile."""
    package, tile = emulated("sm_90a"), NATIVE[stage]
    depth = 64 * tile.kept_blocks - 40
    for package.options, layout in zip(ORDERS, LAYOUTS[:3]):
        size = (2, 270, tile.columns + 8, depth)
        expected, _ = compute(package, "sm_90a", size, layout, stage="middle_out", pieces=1)
        for count in (2, 6):
            assert torch.equal(
                compute(package, "sm_90a", size, layout, stage=stage, pieces=1, multiprocessors=count)[0], expected
            )
    compute(package, "sm_90a", (1, 130, 72, depth), ("k", "k"), FP32, stage=stage, accumulate=True)


@pytest.mark.parametrize("stage", KEPT)
def test_what_a_kept_operand_has_no_room_for_is_refused(emulated, stage):
    most = 64 * NATIVE[stage].kept_blocks
    with pytest.raises(ValueError, match=f"b: expected at most {most} rows in this program, got {most + 8}"):
        compute(emulated("sm_90a"), "sm_90a", (1, 130, 72, most + 8), ("k", "k"), stage=stage)


def test_a_transpose_that_is_stored_transposed(emulated):
    """FP32, overwriting and adding, ragged: the bits of the straight product."""
    package, layout, stage = emulated("sm_90a"), ("m", "n"), "broad_out"
    for package.options, size in zip(ORDERS, ((2, 150, 304, 330), (1, 72, 264, 130), (2, 200, 264, 70))):
        for accumulate in (False, True):
            expected, _ = compute(
                package, "sm_90a", size, layout, FP32, stage="wide_out", pieces=1, accumulate=accumulate
            )
            turned, plan = compute(
                package, "sm_90a", size, layout, FP32, stage=stage, pieces=1, swapped=True, accumulate=accumulate
            )
            assert plan.swapped
            assert torch.equal(turned, expected)


@pytest.mark.parametrize("dtype", LIMIT, ids=str)
@pytest.mark.parametrize("architecture", TARGETS)
def test_transposed_result(emulated, architecture, dtype):
    """Also where its rows are no multiple of 16 bytes, which tensor copies cannot store."""
    package = emulated(architecture)
    package.options = Options(order="lazy")
    for m in (144, 73):
        compute(package, architecture, (2, m, 72, 60), ("k", "n"), dtype, "m")
        compute(package, architecture, (1, m, 72, 300), ("m", "n"), dtype, "m", pieces=2)


@pytest.mark.parametrize("size", [(1, 1, 8, 1), (3, 1, 8, 64), (1, 129, 8, 17), (2, 5, 1000, 3)], ids=str)
@pytest.mark.parametrize("architecture", TARGETS)
def test_small_sizes(emulated, architecture, size):
    package = emulated(architecture)
    package.options = Options(order="random", seed=3)
    for layout in LAYOUTS:
        compute(package, architecture, size, layout)
    compute(package, architecture, size, ("k", "k"), FP32, accumulate=True)


@pytest.mark.parametrize("architecture", TARGETS)
def test_empty_contraction(emulated, architecture):
    package = emulated(architecture)
    package.options = Options()
    assert not compute(package, architecture, (2, 9, 16, 0), ("k", "n"))[0].any()
    compute(package, architecture, (2, 9, 16, 0), ("k", "n"), FP32, accumulate=True)


@pytest.mark.parametrize("architecture", TARGETS)
def test_rows_do_not_depend_on_their_number(emulated, architecture):
    package = emulated(architecture)
    package.options = Options()
    x, w = matrix(1, 140, 200, False, 5), matrix(1, 200, 72, True, 6)
    results = []
    for rows in (140, 3):
        problem = GemmProblem(1, rows, 72, 200, "k", "k", "bfloat16", target="cuda")
        out = torch.empty(1, rows, 72, dtype=BF16)
        with package:
            backend = cuda.GemmBackend(package.module, architecture, 6, lambda: 0)
            backend.prepare("gemm_out", problem, x[:, :rows], w, out)[1]()
        results.append(out[:, :3])
    assert torch.equal(*results)


@pytest.mark.parametrize("architecture", TARGETS)
def test_one_matrix_serves_a_batch(emulated, architecture):
    """A batch stride of 0, and heads that are slices of wider rows."""
    package = emulated(architecture)
    package.options = Options(order="lazy")
    rows = matrix(1, 70, 3 * 24, False, 7)[0].unflatten(1, (3, 24)).transpose(0, 1)
    w, out = (
        matrix(1, 24, 40, False, 8).expand(3, -1, -1),
        torch.empty(70, 3, 40, dtype=BF16),
    )
    problem = GemmProblem(3, 70, 40, 24, "k", "n", "bfloat16", target="cuda")
    with package:
        backend = cuda.GemmBackend(package.module, architecture, 6, lambda: 0)
        backend.prepare("gemm_out", problem, rows, w, out.transpose(0, 1))[1]()
    exact = torch.einsum("ltk,kn->tln", rows.double(), w[0].double())
    assert float((out - exact).norm() / exact.norm()) < LIMIT[BF16]


class Short(EmulatedPackage):
    """Takes the last 16 bytes of the result away."""

    def _on_tensor(self, name, address, size_bytes, writable):
        super()._on_tensor(name, address, size_bytes - 16 if name == "out" else size_bytes, writable)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_a_write_beyond_the_result_is_seen(emulated, architecture):
    emulated(architecture)
    package = Short(cuda.PACKAGE, architecture)
    with pytest.raises(RuntimeError):
        compute(package, architecture, (1, 64, 64, 64), ("k", "n"))
    assert isinstance(package.error, (OutOfBounds, AsyncInFlight))
