"""This package's CUDA programs on a GPU: float64's results, and the deterministic twin's within the error of either."""

import pytest
import torch

from cake_gdn_train import chunk_gated_delta_rule, cuda
from cake_shared.errors import MalformedPackError
from cake_shared.testing import poisoned_allocations
from cake_shared.testing.gdn_cuda import check_accurate, moved
from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.testing.gdn_reference import widened
from cake_shared.testing.gdn_run import run
from cake_shared.testing.parity import PAIRS, report

pytestmark = pytest.mark.gpu

GATES = ["G0", "G0.5", "Gmild", "Gqwen", "Gtiny", "Gspike0", "Gspike31", "Gspike63"]

rule = chunk_gated_delta_rule


def with_states(case, sequences):
    h0, ds = states(case, sequences)
    return case.with_(initial_state=h0, d_state=ds)


@pytest.fixture(autouse=True)
def _clean_error_word():
    word = cuda.error_word_of(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    word.tensor.zero_()
    yield
    torch.cuda.synchronize()
    word.tensor.zero_()


def test_the_twins_agree_with_float64_and_each_other():
    pair = next(pair for pair in PAIRS if pair.free == cuda.PACKAGE)
    lines = []
    assert report(pair, lines.append, "cuda") == []
    assert len(lines) > 10


@pytest.mark.parametrize("gate", GATES)
def test_every_gate_regime(gate):
    with poisoned_allocations():
        check_accurate(rule, with_states(base(150, 1, 2, gate=gate), 1), "cuda", accuracy=6e-3)


@pytest.mark.parametrize(("heads", "value_heads"), [(1, 1), (1, 3), (2, 8), (1, 5)])
def test_groups_of_value_heads(heads, value_heads):
    check_accurate(rule, with_states(base(130, heads, value_heads), 1), "cuda")


@pytest.mark.parametrize("lengths", [(0, 5, 0, 65, 0), (64, 1, 63, 128), (0, 0)])
@pytest.mark.parametrize("offsets_device", ["cpu", "cuda"])
def test_packs_with_offsets_of_either_memory(lengths, offsets_device):
    case = with_states(packed(base(256, 1, 2), lengths), len(lengths))
    there = moved(case, "cuda").with_(cu_seqlens=case.cu_seqlens.to(offsets_device))
    results = run(rule, there)
    expected = run(rule, moved(case, "cuda"))
    end = sum(lengths)
    for name in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.allclose(results[name], expected[name], rtol=1e-2, atol=1e-3), name
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not results[name][:, end:].any(), name


def test_malformed_offsets_of_host_memory_raise_at_once():
    case = moved(base(128, 1, 2), "cuda")
    with pytest.raises(ValueError, match="cu_seqlens: got 60 after 70 at place 2"):
        run(rule, case.with_(cu_seqlens=torch.tensor([0, 70, 60, 128])), wrt=[])


def test_a_malformed_pack_on_the_device_gives_nan_and_raises_at_the_next_call():
    case = moved(base(128, 1, 2), "cuda")
    results = run(rule, case.with_(cu_seqlens=torch.tensor([0, 70, 60, 128], device="cuda")), wrt=[])
    torch.cuda.synchronize()
    assert torch.isnan(results["o"]).all()
    with pytest.raises(MalformedPackError, match="cu_seqlens"):
        run(rule, case)


def test_a_long_sequence_in_segments():
    case = with_states(base(8193, 1, 1), 1)
    results = run(rule, moved(case, "cuda"))
    expected = run(rule, widened(case))
    for name in ("o", "final_state", "dq", "dk", "dv", "dbeta", "d_initial_state"):
        error = float((results[name].cpu().double() - expected[name]).norm() / expected[name].norm())
        assert error <= 6e-3, f"{name}: {error:.2e}"


def test_all_options():
    case = with_states(base(100, 1, 2), 1)
    generator = torch.Generator().manual_seed(3)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.tensor([-0.5, 1.0]),
        "dt_bias": torch.tensor([0.3, -0.2]),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    g, beta = (torch.randn(1, 100, 2, generator=generator) for _ in range(2))
    case = case.with_(q=case.q * 3, k=case.k * 2, g=g, beta=beta, options=options)
    check_accurate(rule, case, "cuda", accuracy=6e-3)


def test_a_captured_graph_replays_with_other_offsets():
    case = moved(base(128, 1, 2), "cuda")
    offsets = torch.tensor([0, 70, 128], device="cuda")
    tensors = (case.q, case.k, case.v, case.g, case.beta)
    with torch.no_grad():
        rule(*tensors, cu_seqlens=offsets)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o, _ = rule(*tensors, cu_seqlens=offsets)
        offsets.copy_(torch.tensor([0, 33, 100]))
        graph.replay()
        expected, _ = rule(*tensors, cu_seqlens=offsets)
    assert torch.allclose(o, expected, rtol=1e-2, atol=1e-3)
    assert not o[:, 100:].any()
