"""The gate stage on the GPU: every array bit for bit as the CPU plan states it, whatever the pack and the launch."""

import pytest
import torch

from cake_gdn_det_train import cuda
from cake_shared.errors import MalformedPackError
from cake_shared.gdn.cuda.tables import plan_tables
from cake_shared.testing.gate_cases import GATE_CASES, GateCase, differences, expected
from cake_shared.testing.poison import poisoned_allocations

pytestmark = pytest.mark.gpu


def on_gpu(case: GateCase) -> tuple[torch.Tensor, torch.Tensor | None]:
    g, cu_seqlens = case.gates(), case.cu_seqlens()
    # Strides must survive the copy: they are what the layout cases are about.
    on_device = torch.empty_strided(g.shape, g.stride(), dtype=g.dtype, device="cuda")
    return on_device.copy_(g), None if cu_seqlens is None else cu_seqlens.cuda()


def arrays(stage: cuda.GateStage) -> dict[str, torch.Tensor]:
    return {name: array.cpu() for name, array in {**stage.plan.views(stage.tables), "sums": stage.sums}.items()}


def wanted(case: GateCase, stage: cuda.GateStage) -> dict[str, torch.Tensor]:
    return expected(case, stage.plan.chunk_capacity, stage.plan.segment_capacity)


@pytest.fixture(autouse=True)
def _clean_error_word():
    word = cuda.error_word_of(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    word.tensor.zero_()
    yield
    torch.cuda.synchronize()
    word.tensor.zero_()


@pytest.mark.parametrize("case", GATE_CASES, ids=lambda case: case.name)
def test_bits_of_every_array(case):
    g, cu_seqlens = on_gpu(case)
    with poisoned_allocations():
        stage = cuda.gate_sums(g, cu_seqlens)
    assert differences(arrays(stage), wanted(case, stage)) == []
    assert torch.equal(g.cpu().nan_to_num(7.0), case.gates().nan_to_num(7.0))


@pytest.mark.parametrize("case", [case for case in GATE_CASES if case.faults], ids=lambda case: case.name)
def test_malformed_pack_raises_at_the_next_call_once(case):
    g, cu_seqlens = on_gpu(case)
    cuda.gate_sums(g, cu_seqlens)
    torch.cuda.synchronize()
    good = torch.tensor([0, g.shape[1]], device="cuda")
    with pytest.raises(MalformedPackError, match="cu_seqlens: an earlier call"):
        cuda.gate_sums(g, good)
    stage = cuda.gate_sums(g, good)
    torch.cuda.synchronize()
    assert not stage.sums.isnan().any()
    cuda.gate_sums(g, good)


def test_nothing_waits_for_the_device():
    case = next(case for case in GATE_CASES if case.name == "uneven")
    g, cu_seqlens = on_gpu(case)
    cuda.gate_sums(g, cu_seqlens)
    torch.cuda.set_sync_debug_mode("error")
    try:
        stage = cuda.gate_sums(g, cu_seqlens)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert differences(arrays(stage), wanted(case, stage)) == []


def test_call_returns_before_the_stream_reaches_it():
    case = next(case for case in GATE_CASES if case.name == "uneven")
    g, cu_seqlens = on_gpu(case)
    cuda.gate_sums(g, cu_seqlens)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)  # about 0.1 s of device time in front of the call
    behind = torch.cuda.Event()
    cuda.gate_sums(g, cu_seqlens)
    behind.record()
    assert not behind.query()
    torch.cuda.synchronize()


def test_graph_stays_right_when_offsets_change_in_place():
    shape = (1, 500, 6)
    packs = [
        (0, 5, 130, 131, 195, 500),
        (0, 0, 0, 0, 0, 500),
        (0, 100, 200, 300, 400, 450),
        (0, 64, 128, 192, 256, 320),
    ]
    cases = [GateCase(f"pack {i}", shape, pack) for i, pack in enumerate(packs)]
    g, cu_seqlens = on_gpu(cases[0])
    cuda.gate_sums(g, cu_seqlens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage = cuda.gate_sums(g, cu_seqlens)
    for case in [*cases, cases[0]]:
        cu_seqlens.copy_(case.cu_seqlens())
        graph.replay()
        torch.cuda.synchronize()
        assert differences(arrays(stage), wanted(case, stage)) == [], case.name


def test_graph_replayed_on_a_malformed_pack_poisons_and_reports():
    shape = (1, 128, 3)
    good, bad = GateCase("good", shape, (0, 70, 128)), GateCase("bad", shape, (0, 129, 128), faults=2)
    g, cu_seqlens = on_gpu(good)
    cuda.gate_sums(g, cu_seqlens)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stage = cuda.gate_sums(g, cu_seqlens)
    cu_seqlens.copy_(bad.cu_seqlens())
    graph.replay()
    torch.cuda.synchronize()
    assert differences(arrays(stage), wanted(bad, stage)) == []
    cu_seqlens.copy_(good.cu_seqlens())
    with pytest.raises(MalformedPackError, match="its offsets decrease"):
        cuda.gate_sums(g, cu_seqlens)
    graph.replay()
    torch.cuda.synchronize()
    assert differences(arrays(stage), wanted(good, stage)) == []


def test_side_stream_is_the_one_used():
    case = next(case for case in GATE_CASES if case.name == "segments among short ones")
    g, cu_seqlens = on_gpu(case)
    late = torch.empty_like(g)
    cuda.gate_sums(g, cu_seqlens)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        late.copy_(g)  # right only if the call is behind this copy on the same stream
        stage = cuda.gate_sums(late, cu_seqlens)
    side.synchronize()
    assert differences(arrays(stage), wanted(case, stage)) == []


def test_same_bits_at_every_call_beside_other_work():
    case = next(case for case in GATE_CASES if case.name == "1,500 uneven sequences")
    g, cu_seqlens = on_gpu(case)
    first = cuda.gate_sums(g, cu_seqlens)
    busy = torch.cuda.Stream()
    block = torch.empty(1 << 26, device="cuda")
    for _ in range(50):
        with torch.cuda.stream(busy):
            block.add_(1.0)
        again = cuda.gate_sums(g, cu_seqlens)
        assert torch.equal(first.sums.view(torch.int32), again.sums.view(torch.int32))
        assert torch.equal(first.tables[4:], again.tables[4:])


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        (lambda g, cu: (g.half(), cu), TypeError, "g: expected dtype float32 or bfloat16, got float16"),
        (lambda g, cu: (g[0], cu), ValueError, r"g: got shape \[128, 3\], takes \[B, T, HV\]"),
        (lambda g, cu: (g, cu.float()), TypeError, "cu_seqlens: expected dtype int32 or int64, got float32"),
        (lambda g, cu: (g, cu[None]), ValueError, r"cu_seqlens: got shape \[1, 3\], takes \[N \+ 1\]"),
        (lambda g, cu: (g, cu[:0]), ValueError, r"cu_seqlens: got shape \[0\], takes \[N \+ 1\]"),
        (lambda g, cu: (g, cu.cpu()), ValueError, "cu_seqlens: expected a tensor on CUDA device 0, got device type 1"),
        (lambda g, cu: (g.expand(2, -1, -1), cu), ValueError, "cu_seqlens: expected contiguous offsets"),
        (lambda g, cu: (g.cpu(), cu), ValueError, "g: got a tensor on cpu, takes one on a CUDA device"),
    ],
)
def test_bad_arguments_raise_before_any_launch(change, error, text):
    g, cu_seqlens = on_gpu(GateCase("pack", (1, 128, 3), (0, 70, 128)))
    with pytest.raises(error, match=text):
        cuda.gate_sums(*change(g, cu_seqlens))


def test_offsets_may_be_a_strided_view_only_if_contiguous():
    g, cu_seqlens = on_gpu(GateCase("pack", (1, 128, 3), (0, 70, 128)))
    strided = torch.stack([cu_seqlens, cu_seqlens], 1)[:, 0]
    with pytest.raises(ValueError, match="cu_seqlens: expected contiguous offsets"):
        cuda.gate_sums(g, strided)


def test_token_rows_beyond_two_to_the_31_elements():
    heads, tokens = 1100, 2_000_000  # 2.2e9 elements of BF16, 4.4 GB
    if torch.cuda.mem_get_info()[0] < 20 << 30:
        pytest.skip("needs 20 GiB of free device memory")
    g = torch.zeros(1, tokens, heads, dtype=torch.bfloat16, device="cuda")
    g[0, -64:, -1] = -1.0
    stage = cuda.gate_sums(g, torch.tensor([0, tokens], device="cuda"))
    last = (
        plan_tables(1, tokens, 1).chunk_capacity - 2
    )  # tokens is a multiple of 64: the slot of a partial chunk is unused
    right = -torch.arange(1.0, 65.0)
    assert torch.equal(stage.sums[last, -1].cpu(), right)
    assert torch.equal(stage.sums[last, 0].cpu(), torch.zeros(64))
    assert torch.equal(stage.sums[last - 1, -1].cpu(), torch.zeros(64))
