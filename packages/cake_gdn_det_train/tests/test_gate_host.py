"""The host code of the gate stage (bind.cu) on the CPU: what it checks, what it launches, with which parameters."""

import ctypes

import pytest
import torch

from cake_gdn_det_train import cuda
from cake_shared import jit
from cake_shared.errors import BuildError, MalformedPackError
from cake_shared.gdn.cuda.tables import plan_tables
from cake_shared.program import programs_of
from cake_shared.target import TARGETS
from cake_shared.testing.gate_cases import GATE_CASES


class PackTables(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_uint64) for name in ("status", "chunks", "segments")),
        *((name, ctypes.c_uint64) for name in ("token_offsets", "chunk_offsets", "segment_offsets")),
        *((name, ctypes.c_int32) for name in ("sequences", "chunk_capacity", "segment_capacity")),
    )


class PackOffsetsParams(ctypes.Structure):
    _fields_ = (
        ("cu_seqlens", ctypes.c_uint64),
        *((name, ctypes.c_int32) for name in ("cu_seqlens_is_int64", "tokens_per_row", "rows")),
        ("tables", PackTables),
        ("error_word", ctypes.c_uint64),
    )


class GateOption(ctypes.Structure):
    _fields_ = (
        ("g", ctypes.c_uint64),
        *((name, ctypes.c_int64) for name in ("row_stride", "token_stride", "head_stride")),
        ("g_is_bf16", ctypes.c_int32),
        ("a_log_and_dt_bias", ctypes.c_uint64 * 6),
    )


class PrologueParams(ctypes.Structure):
    """The rows to normalise and the results that follow are not for the gate stage."""

    _fields_ = (
        ("pack", PackOffsetsParams),
        *((name, ctypes.c_int32) for name in ("scans_offsets", "key_heads", "heads")),
        *((name, ctypes.c_int32) for name in ("gate_ctas", "uncovered_ctas", "row_ctas")),
        ("gate", GateOption),
        ("sums", ctypes.c_uint64),
        ("rest", ctypes.c_char * 200),
    )


PARAMS = {"pack_offsets_any": PackOffsetsParams, "prologue_any": PrologueParams}


class Recorder:
    """Takes the launches of the host module instead of a GPU."""

    def __init__(self, module):
        self.module = module
        self.launches = []
        self.tensors = {}

    def on_launch(self, kernel, launch, params):
        assert len(params) == ctypes.sizeof(PARAMS[kernel])
        shape = (tuple(launch.grid), tuple(launch.block), tuple(launch.cluster), launch.smem_bytes, launch.programmatic)
        self.launches.append((kernel, shape, PARAMS[kernel].from_buffer_copy(params)))

    def on_tensor(self, name, address, size_bytes, writable):
        self.tensors[name] = (address, size_bytes, writable)


@pytest.fixture(scope="module")
def module():
    try:
        return jit.build_host_for_emulator(cuda.PACKAGE)
    except BuildError as error:
        pytest.skip(f"a C++ compiler is what this needs: {error}")


@pytest.fixture
def recorder(module):
    made = Recorder(module)
    jit.install_emulator(module, made.on_launch, made.on_tensor)
    yield made
    jit.install_emulator(module, None)


@pytest.fixture
def word():
    return cuda.ErrorWord(torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("case", GATE_CASES, ids=lambda case: case.name)
def test_launches_of_every_case(recorder, word, case):
    g, cu_seqlens = case.gates(), case.cu_seqlens()
    stage = cuda.launch_gate_sums(recorder.module, g, cu_seqlens, word, 0)
    plan, (batch, tokens, heads) = stage.plan, case.shape
    entries = max(plan.chunk_capacity * max(heads, 1), plan.segment_capacity, 1)
    expected = [("pack_offsets_any", 1, 1024, 0)] if plan.sequences > 1024 else []
    expected.append(("prologue_any", -(-entries // 128), 128, 0))
    found = [(k, s[0], s[1], s[4]) for k, s, _ in recorder.launches]
    assert found == [(k, (x, 1, 1), (t, 1, 1), early) for k, x, t, early in expected]
    assert all(shape[2:4] == ((1, 1, 1), 0) for _, shape, _ in recorder.launches)

    views = plan.views(stage.tables)
    assert sum(view.numel() for view in views.values()) == plan.words == stage.tables.numel()
    packs = [params if name == "pack_offsets_any" else params.pack for name, _, params in recorder.launches]
    for params in packs:
        for name, view in views.items():
            assert getattr(params.tables, name) == view.data_ptr() or view.numel() == 0, name
        assert params.tables.sequences == plan.sequences
        assert params.tables.chunk_capacity == plan.chunk_capacity == stage.sums.shape[0]
        assert params.tables.segment_capacity == plan.segment_capacity
    for params in packs:
        assert params.cu_seqlens == (0 if cu_seqlens is None else cu_seqlens.data_ptr())
        assert params.cu_seqlens_is_int64 == int(case.offsets_dtype == torch.int64 and cu_seqlens is not None)
        assert (params.rows, params.tokens_per_row, params.error_word) == (batch, tokens, word.tensor.data_ptr())
    last = recorder.launches[-1][2]
    assert (last.scans_offsets, last.heads) == (int(plan.sequences <= 1024), heads)
    assert (last.key_heads, last.uncovered_ctas, last.row_ctas) == (0, 0, 0)
    assert (last.gate.row_stride, last.gate.token_stride, last.gate.head_stride) == g.stride()
    assert last.gate.g_is_bf16 == int(g.dtype == torch.bfloat16)
    if g.numel():
        assert (last.gate.g, last.sums) == (g.data_ptr(), stage.sums.data_ptr())


def test_the_emulator_is_told_what_kernels_may_touch(recorder, word):
    case = next(case for case in GATE_CASES if case.layout == "sliced")
    g, cu_seqlens = case.gates(), case.cu_seqlens()
    stage = cuda.launch_gate_sums(recorder.module, g, cu_seqlens, word, 0)
    _, tokens, heads = case.shape
    assert recorder.tensors == {
        "g": (g.data_ptr(), (tokens * heads * 2 - 1) * 4, False),
        "cu_seqlens": (cu_seqlens.data_ptr(), cu_seqlens.numel() * 8, False),
        "tables": (stage.tables.data_ptr(), stage.tables.numel() * 4, True),
        "sums": (stage.sums.data_ptr(), stage.sums.numel() * 4, True),
        "error_word": (word.tensor.data_ptr(), 4, True),
    }


@pytest.mark.parametrize("case", [case for case in GATE_CASES if not case.faults], ids=lambda case: case.name)
def test_capacities_hold_every_pack(case):
    sequences = None if case.offsets is None else len(case.offsets) - 1
    plan, tables = plan_tables(case.shape[0], case.shape[1], sequences), case.tables()
    assert len(tables.chunk_tokens) <= plan.chunk_capacity
    assert len(tables.segment_tokens) <= plan.segment_capacity


def arguments(**changes):
    """Arguments of the bound function for a pack of 2 sequences in 130 tokens and 4 heads, some replaced."""
    plan = plan_tables(1, 130, 2)
    made = {
        "g": torch.zeros(1, 130, 4),
        "cu_seqlens": torch.tensor([0, 5, 130]),
        "tables": torch.zeros(plan.words, dtype=torch.int32),
        "sums": torch.zeros(plan.chunk_capacity, 4, 64),
        "error_word": torch.zeros(1, dtype=torch.int32),
        "stream": 0,
    }
    made.update({name: change(made[name]) for name, change in changes.items()})
    return list(made.values())


@pytest.mark.parametrize(
    ("name", "change", "error", "text"),
    [
        ("g", lambda t: t.double(), TypeError, "g: expected dtype float32 or bfloat16, got float64"),
        ("g", lambda t: t[0], ValueError, r"g: expected shape \[any, any, any\], got \[130, 4\]"),
        ("cu_seqlens", lambda t: t.float(), TypeError, "cu_seqlens: expected dtype int32 or int64, got float32"),
        ("cu_seqlens", lambda t: t[None], ValueError, r"cu_seqlens: expected shape \[any\], got \[1, 3\]"),
        ("cu_seqlens", lambda t: t[:0], ValueError, r"cu_seqlens: expected contiguous offsets \[N \+ 1\]"),
        ("cu_seqlens", lambda t: torch.stack([t, t], 1)[:, 0], ValueError, "cu_seqlens: expected contiguous offsets"),
        ("g", lambda t: t.expand(2, -1, -1), ValueError, "cu_seqlens: .* of a batch of one row, .* and 2 rows"),
        ("tables", lambda t: t[:-1], ValueError, r"tables: expected shape \[37\], got \[36\]"),
        ("tables", lambda t: t.long(), TypeError, "tables: expected dtype int32, got int64"),
        ("tables", lambda t: torch.stack([t, t], 1)[:, 0], ValueError, "tables: expected a contiguous tensor"),
        (
            "tables",
            lambda t: torch.cat([t, t])[1:38],
            ValueError,
            "tables: expected an address that is a multiple of 16",
        ),
        ("sums", lambda t: t[:, :3], ValueError, r"sums: expected shape \[4, 4, 64\], got \[4, 3, 64\]"),
        ("sums", lambda t: t.bfloat16(), TypeError, "sums: expected dtype float32, got bfloat16"),
        ("error_word", lambda t: t.long(), ValueError, "error_word: expected one int32 in page-locked host memory"),
        ("error_word", lambda t: t.expand(2), ValueError, r"error_word: .* of shape \[2\]"),
    ],
)
def test_bad_arguments_raise_before_any_launch(recorder, name, change, error, text):
    with pytest.raises(error, match=text):
        recorder.module["gate_sums"](*arguments(**{name: change}))
    assert recorder.launches == []


def test_too_many_tokens_for_32_bit_tables_are_refused(recorder):
    g = torch.zeros(1).expand(1, 2**31, 1)
    with pytest.raises(ValueError, match="g: expected at most 2147483583 tokens, chunks and segments"):
        recorder.module["gate_sums"](*arguments(g=lambda _: g))
    assert recorder.launches == []


def test_what_an_emulator_raises_comes_out_with_its_text(module):
    def refuse(kernel, launch, params):
        raise IndexError("read of 4 bytes behind g at any/chunk_gates.cuh:55")

    jit.install_emulator(module, refuse)
    try:
        with pytest.raises(RuntimeError, match=r"launch of prologue_any: IndexError: read of 4 bytes behind g at any/"):
            module["gate_sums"](*arguments())
    finally:
        jit.install_emulator(module, None)
    with pytest.raises(RuntimeError, match="launch of prologue_any: no emulator is installed"):
        module["gate_sums"](*arguments())


@pytest.mark.parametrize(
    ("faults", "texts"),
    [
        (1, ["its first offset is not 0"]),
        (6, ["its offsets decrease", "its last offset is beyond the token buffer"]),
    ],
)
def test_the_error_word_raises_once(word, faults, texts):
    word.raise_pending()
    word.tensor.fill_(faults)
    with pytest.raises(MalformedPackError) as caught:
        word.raise_pending()
    assert all(text in str(caught.value) for text in texts)
    assert "results are NaN" in str(caught.value)
    word.raise_pending()


def test_cpu_tensors_are_not_taken_by_the_cuda_path():
    with pytest.raises(ValueError, match="g: got a tensor on cpu, takes one on a CUDA device"):
        cuda.gate_sums(torch.zeros(1, 64, 2))


@pytest.mark.parametrize("architecture", TARGETS)
def test_every_architecture_has_records_of_the_pack_stages(architecture):
    records = {record.stage: record for record in programs_of(cuda.PACKAGE).records_for(architecture)}
    for stage in ("pack_offsets", "prologue"):
        assert records[stage].kind == "portable"
        assert records[stage].budget.tmem_columns == 0
