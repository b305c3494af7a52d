"""The bits of the CUDA programs are a function of the sequence alone: D1 to D5 of the contract, on a GPU."""

import pytest
import torch
import torch.utils.checkpoint

from cake_gdn_det_train import chunk_gated_delta_rule, cuda
from cake_shared.testing import assert_bitwise_equal, deterministic_fill
from cake_shared.testing.gdn_cuda import moved
from cake_shared.testing.gdn_inputs import base, packed, select_heads, states
from cake_shared.testing.gdn_run import run
from cake_shared.testing.gdn_waves import force_waves

pytestmark = pytest.mark.gpu

TOKEN_RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta")
RESULTS = (*TOKEN_RESULTS, "final_state", "d_initial_state")

rule = chunk_gated_delta_rule


def with_states(case, sequences):
    h0, ds = states(case, sequences)
    return case.with_(initial_state=h0, d_state=ds)


def assert_all_equal(actual, expected, names=RESULTS):
    __tracebackhide__ = True
    for name in names:
        assert_bitwise_equal(actual[name], expected[name], name)


@pytest.mark.parametrize(
    ("lengths", "key_heads"),
    [
        ((900, 0, 300, 1, 64, 130, 1300, 5000, 65, 17), 2),
        ((9000, 1, 8192, 4097), 2),
        ((63, 65, 128) * 40, 3),
        ((1,) * 70000, 1),
    ],
    ids=["ragged", "segments", "short", "ones"],
)
def test_waves_of_heads_and_of_halves_move_no_bit(monkeypatch, lengths, key_heads):
    case = packed(base(sum(lengths), key_heads, key_heads, gate="Gmild"), lengths)
    keeps_states = len(lengths) < 1000
    case = moved(with_states(case, len(lengths)) if keeps_states else case, "cuda")
    with monkeypatch.context() as patch:
        force_waves(patch, key_heads, 1, 8)
        expected = run(rule, case, output_final_state=keeps_states)
    for heads, halves, warps in ((key_heads, 1, 4), (key_heads, 2, 4), (key_heads, 2, 8), (1, 1, 8), (1, 2, 4)):
        with monkeypatch.context() as patch:
            force_waves(patch, heads, halves, warps)
            results = run(rule, case, output_final_state=keeps_states)
        for name in TOKEN_RESULTS:
            assert_bitwise_equal(
                results[name], expected[name], f"{name} of {heads} heads, {halves} halves, {warps} warps"
            )


@pytest.mark.parametrize("gate", ["Gmild", "Gqwen"])
def test_D1_300_repeats_alone_and_beside_a_memory_bound_kernel(gate):
    case = moved(with_states(base(4096, 8, 16, gate=gate), 1), "cuda")
    expected = run(rule, case)
    noise = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    side = torch.cuda.Stream()
    same = torch.ones((), dtype=torch.bool, device="cuda")
    for repeat in range(300):
        if repeat >= 150:
            with torch.cuda.stream(side):
                noise.add_(1)
        results = run(rule, case)
        for name in RESULTS:
            a, b = (x[name].contiguous().flatten().view(torch.uint8) for x in (results, expected))
            same &= (a == b).all()
    assert bool(same)


def test_D2_alone_and_among_61_others():
    lengths = [(37 * i) % 200 for i in range(61)]
    own = with_states(base(130, 2, 4, seed=11), 1)
    alone = run(rule, moved(own, "cuda"))
    for place in (0, 30, 61):
        others = [*lengths[:place], 130, *lengths[place:]]
        pack = with_states(packed(base(sum(others), 2, 4, seed=5), others), 62)
        start = sum(others[:place])
        for name in ("q", "k", "v", "g", "beta", "do"):
            getattr(pack, name)[:, start : start + 130] = getattr(own, name)
        for name in ("initial_state", "d_state"):
            getattr(pack, name)[place] = getattr(own, name)[0]
        results = run(rule, moved(pack, "cuda"))
        for name in TOKEN_RESULTS:
            assert_bitwise_equal(results[name][:, start : start + 130], alone[name], name)
        for name in ("final_state", "d_initial_state"):
            assert_bitwise_equal(results[name][place : place + 1], alone[name], name)


def test_D2_beside_a_long_neighbour_and_with_padding():
    own = base(130, 1, 2, seed=11)
    alone = run(rule, moved(own, "cuda"))
    pack = packed(base(16384 + 130 + 77, 1, 2, seed=5), (16384, 130))
    for name in ("q", "k", "v", "g", "beta", "do"):
        getattr(pack, name)[:, 16384 : 16384 + 130] = getattr(own, name)
    results = run(rule, moved(pack, "cuda"))
    for name in TOKEN_RESULTS:
        assert_bitwise_equal(results[name][:, 16384 : 16384 + 130], alone[name], name)


def test_D2_a_long_sequence_alone_and_packed():
    own = with_states(base(9000, 1, 2, seed=3), 1)
    alone = run(rule, moved(own, "cuda"))
    pack = packed(base(9000 + 4000, 1, 2, seed=5), (3000, 9000, 1000))
    for name in ("q", "k", "v", "g", "beta", "do"):
        getattr(pack, name)[:, 3000:12000] = getattr(own, name)
    pack = with_states(pack, 3)
    pack.initial_state[1], pack.d_state[1] = own.initial_state[0], own.d_state[0]
    results = run(rule, moved(pack, "cuda"))
    for name in TOKEN_RESULTS:
        assert_bitwise_equal(results[name][:, 3000:12000], alone[name], name)
    assert_bitwise_equal(results["final_state"][1:2], alone["final_state"], "final_state")


def test_D2_batched_and_packed():
    for tokens in (100, 8300):
        case = with_states(base(tokens, 1, 2, B=2), 2)
        flat = {name: getattr(case, name).flatten(0, 1)[None] for name in ("q", "k", "v", "g", "beta", "do")}
        batched = run(rule, moved(case, "cuda"))
        results = run(rule, moved(packed(case.with_(**flat), (tokens, tokens)), "cuda"))
        for name in TOKEN_RESULTS:
            assert_bitwise_equal(results[name][0], batched[name].flatten(0, 1), name)
        assert_all_equal(results, batched, ("final_state", "d_initial_state"))


@pytest.mark.parametrize("tokens", [1000, 8300])
def test_D3_another_number_of_multiprocessors(tokens):
    """The plan counts with 1 and with 1000 multiprocessors: other warps a CTA, another grid, the same bits."""
    case = moved(with_states(base(tokens, 2, 4), 1), "cuda")
    expected = run(rule, case)
    backend = cuda.rule_backend(torch.device("cuda"))
    real = backend.multiprocessors
    try:
        for pretended in (1, 1000):
            backend.multiprocessors = pretended
            assert_all_equal(run(rule, case), expected)
    finally:
        backend.multiprocessors = real


def test_D4_some_key_heads_with_their_value_heads():
    case = with_states(base(200, 4, 12), 1)
    whole = run(rule, moved(case, "cuda"))
    for held in ((0,), (2, 3), (1,)):
        results = run(rule, moved(select_heads(case, held), "cuda"))
        values = [3 * h + i for h in held for i in range(3)]
        for name in TOKEN_RESULTS:
            heads = list(held) if name in ("dq", "dk") else values
            assert_bitwise_equal(results[name], whole[name][:, :, heads], name)
        assert_bitwise_equal(results["final_state"], whole["final_state"][:, values], "final_state")


def capture(case):
    """A graph of forward and backward on the case's own tensors, and its results by name."""
    leaves = [getattr(case, name).detach().requires_grad_() for name in ("q", "k", "v", "g", "beta")]

    def step():
        o, _ = rule(*leaves, case.scale, cu_seqlens=case.cu_seqlens)
        return (o, *torch.autograd.grad(o, leaves, case.do))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, dict(zip(TOKEN_RESULTS, results))


def test_D5_graph_replay_follows_offsets_changed_in_place():
    case = moved(packed(base(300, 2, 4), (100, 100, 100)), "cuda")
    graph, results = capture(case)
    for lengths in ((100, 100, 100), (0, 250, 50), (7, 64, 129)):
        offsets = torch.tensor([0, *lengths]).cumsum(0)
        case.cu_seqlens.copy_(offsets)
        graph.replay()
        assert_all_equal(results, run(rule, case), TOKEN_RESULTS)


def test_D5_side_stream_and_deterministic_switch():
    case = moved(with_states(base(500, 2, 4), 1), "cuda")
    expected = run(rule, case)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = run(rule, case)
    side.synchronize()
    assert_all_equal(results, expected)
    with deterministic_fill():
        assert_all_equal(run(rule, case), expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_D5_checkpointing(reentrant):
    case = moved(base(500, 2, 4), "cuda")
    expected = run(rule, case, output_final_state=False)

    def checkpointed(*arguments, **keywords):
        def inner(*tensors):
            return rule(*tensors, *arguments[5:], **keywords)[0]

        return torch.utils.checkpoint.checkpoint(inner, *arguments[:5], use_reentrant=reentrant), None

    results = run(checkpointed, case, output_final_state=False)
    assert_all_equal(results, expected, TOKEN_RESULTS)


def test_D5_compiled():
    case = moved(with_states(packed(base(300, 2, 4), (100, 200)), 2), "cuda")
    compiled = torch.compile(rule, fullgraph=True)
    assert_all_equal(run(compiled, case), run(rule, case))


def test_D5_a_device_that_is_not_current():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    case = with_states(base(500, 2, 4), 1)
    expected = {name: x for name, x in run(rule, moved(case, "cuda:0")).items() if x is not None}
    results = run(rule, moved(case, "cuda:1"))
    for name, x in expected.items():
        assert_bitwise_equal(results[name].cpu(), x.cpu(), name)
