"""The CUDA programs on a GPU: accuracy in every gate and beta regime, closed forms, options, packs, layouts."""

import pytest
import torch

from cake_gdn_det_train import chunk_gated_delta_rule, cuda
from cake_shared.errors import MalformedPackError
from cake_shared.testing import assert_bitwise_equal, leave_nan_blocks, poisoned_allocations
from cake_shared.testing.gdn_cuda import (
    assert_accurate,
    assert_fading_is_accurate,
    check_accurate,
    moved,
    on_cpu,
)
from cake_shared.testing.gdn_inputs import base, fading, packed, states, unit
from cake_shared.testing.gdn_reference import widened
from cake_shared.testing.gdn_run import run

pytestmark = pytest.mark.gpu

GATES = ["G0", "G0.5", "Gmild", "Gqwen", "Gtiny", "Gspike0", "Gspike31", "Gspike63"]
RESULTS = ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta", "d_initial_state")

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


@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("beta", ["b0", "b1", "b2", "brand", "bsat"])
def test_every_gate_and_beta_regime(gate, beta):
    """beta = 2 with gates at zero is the border of stability, where rounding is not damped: its limit is wider."""
    with poisoned_allocations():
        case = with_states(base(150, 1, 2, gate=gate, beta=beta), 1)
        check_accurate(rule, case, "cuda", accuracy=2e-2 if beta == "b2" else 6e-3)


@pytest.mark.parametrize(("heads", "value_heads"), [(1, 1), (2, 4), (1, 3), (2, 8), (1, 5), (1, 8)])
def test_groups_of_value_heads(heads, value_heads):
    check_accurate(rule, with_states(base(130, heads, value_heads), 1), "cuda")


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 63, 64, 65, 127, 128, 129, 192, 1000])
def test_lengths(tokens):
    with poisoned_allocations():
        check_accurate(rule, with_states(base(tokens, 1, 2), 1), "cuda")


@pytest.mark.parametrize("lengths", [(0, 5, 0, 65, 0), (64, 1, 63, 128), (33, 64, 95), (0, 0), (130,)])
def test_packs(lengths):
    case = with_states(packed(base(256, 1, 2), lengths), len(lengths))
    results = check_accurate(rule, case, "cuda")
    end = sum(lengths)
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert not results[name][:, end:].any(), name


def test_batch():
    check_accurate(rule, with_states(base(100, 2, 4, B=3), 3), "cuda")


def test_U18_rows_past_the_last_sequence_are_zero_in_a_recycled_buffer():
    case = packed(base(256, 1, 2), (100, 90))
    leave_nan_blocks([case.v.shape, case.q.shape, case.g.shape], device="cuda")
    results = on_cpu(run(rule, moved(case, "cuda")))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert torch.isfinite(results[name]).all()
        assert not results[name][:, 190:].any(), name


def one_key(tokens, beta, gate):
    case = base(tokens, 1, 2)
    k = torch.zeros_like(case.k)
    k[..., 5] = 1.0
    return case.with_(k=k, beta=torch.full_like(case.beta, beta), g=torch.full_like(case.g, gate))


@pytest.mark.parametrize("gate", [0.0, -1e-3])
@pytest.mark.parametrize("tokens", [128, 16384])
def test_CF1_identical_keys(tokens, gate):
    """One unit key at every token and beta 1: o_t = scale (q_t . k) v_t, however long; longer than one segment too."""
    case = one_key(tokens, 1.0, gate)
    results = on_cpu(run(rule, moved(case, "cuda")))
    right = case.scale * case.q[..., 5].double()[..., None] * case.v.double()
    error = float((results["o"].double() - right).norm() / right.norm())
    assert error <= 5e-2
    late = slice(-64, None)
    assert float((results["o"][:, late].double() - right[:, late]).norm() / right[:, late].norm()) <= 5e-2
    assert all(torch.isfinite(results[name]).all() for name in ("dq", "dk", "dv", "dg", "dbeta"))


def test_CF2_alternating_state():
    """The same key, beta 2 and constant values: the state is 2 k v^T and 0 in turn."""
    for tokens in (127, 128, 200):
        case = one_key(tokens, 2.0, 0.0)
        v = case.v[:, :1].expand(case.v.shape)
        _, final = rule(*(x.cuda() for x in (case.q, case.k, v, case.g, case.beta)), output_final_state=True)
        right = torch.zeros(1, 2, 128, 128, dtype=torch.float64)
        if tokens % 2:
            right[0, :, 5] = 2.0 * v[0, 0].double()
        assert float((final.cpu().double() - right).norm()) <= 2e-2 * float(v[0, 0].double().norm())


def test_CF3_length_one_sequences():
    """70000 sequences of one token: o = scale beta (q . k) v."""
    for heads, count in ((1, 70000), (24, 2731)):
        case = base(count, heads, heads)
        cu = torch.arange(count + 1, dtype=torch.int32)
        results = on_cpu(run(rule, moved(case.with_(cu_seqlens=cu), "cuda"), output_final_state=False))
        score = (case.q.double() * case.k.double()).sum(-1) * case.beta.double() * case.scale
        right = score[..., None] * case.v.double()
        assert float((results["o"].double() - right).norm() / right.norm()) <= 5e-3
        dv = (score[..., None] * case.do.double()).norm()
        assert abs(float(results["dv"].double().norm() - dv)) <= 5e-3 * float(dv)


def test_CF4_unit_basis_keys():
    case = base(128, 1, 1, gate="G0", beta="b1")
    k = torch.eye(128, dtype=torch.bfloat16)[None, :, None]
    o, _ = rule(*(x.cuda() for x in (case.q, k, case.v, case.g, case.beta)))
    right = case.scale * (case.q[0, :, 0].double().tril() @ case.v[0, :, 0].double())
    assert float((o.cpu()[0, :, 0].double() - right).norm() / right.norm()) <= 4e-3


@pytest.mark.parametrize("gate", ["Gmild", "G0", "Gqwen"])
def test_long_sequences_in_segments(gate):
    """Sequences of 8193, 12288 and 8192 tokens: three, three and one segments, packed with a short one."""
    case = packed(base(8193 + 12288 + 8192 + 70, 1, 1, gate=gate), (8193, 70, 12288, 8192))
    case = with_states(case, 4)
    results = on_cpu(run(rule, moved(case, "cuda")))
    start = 0
    for place, length in enumerate((8193, 70, 12288, 8192)):
        one = case.tokens(start, start + length)
        one = one.with_(initial_state=case.initial_state[place : place + 1], d_state=case.d_state[place : place + 1])
        own = {}
        for name in RESULTS:
            x = results[name]
            of_states = name in ("final_state", "d_initial_state")
            own[name] = x[place : place + 1] if of_states else x[:, start : start + length]
        assert_long(own, one)
        start += length


def assert_long(results, case):
    """As assert_accurate, with the chunked float64 form: the token recurrence would take minutes."""
    expected = run(rule, widened(case))
    faults = []
    for name in RESULTS:
        error = float((results[name].double() - expected[name]).norm())
        size = float(expected[name].norm())
        if name == "dg":  # the exit gradient's path, see gate_gradient_scale, over the tokens of one chunk
            states = max(float(x.double().norm()) for x in (expected["final_state"], case.initial_state))
            size += states * float(case.d_state.norm()) / 128 * 8
        if error > 6e-3 * size:
            faults.append(f"{name}: {error:.3e} of {size:.3e}")
    assert not faults, "; ".join(faults)


def options_case(tokens=100):
    case = with_states(base(tokens, 1, 2), 1)
    generator = torch.Generator().manual_seed(3)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.tensor([-0.5, 1.0]),
        "dt_bias": torch.tensor([0.3, -0.2]),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    return case.with_(
        q=case.q * 3,
        k=case.k * 2,
        g=torch.randn(1, tokens, 2, generator=generator),
        beta=torch.randn(1, tokens, 2, generator=generator),
        options=options,
    )


def test_all_options():
    check_accurate(rule, options_case(), "cuda", accuracy=6e-3)


@pytest.mark.parametrize("name", ["use_qk_l2norm_in_kernel", "use_gate_in_kernel", "use_beta_sigmoid_in_kernel"])
def test_each_option_alone(name):
    case = options_case()
    options = {name: True}
    if name == "use_gate_in_kernel":
        options["A_log"] = case.options["A_log"]
    plain = with_states(base(100, 1, 2), 1)
    changes = {"g": case.g} if name == "use_gate_in_kernel" else {}
    if name == "use_beta_sigmoid_in_kernel":
        changes["beta"] = case.beta
    if name == "use_qk_l2norm_in_kernel":
        changes.update(q=case.q, k=case.k)
    check_accurate(rule, plain.with_(options=options, **changes), "cuda", accuracy=6e-3)


def test_v_first_states_are_the_same_bits():
    case = moved(with_states(packed(base(200, 1, 2), (70, 0, 130)), 3), "cuda")
    k_first = run(rule, case)
    v_first = run(
        rule, case.with_(initial_state=case.initial_state.mT.contiguous(), d_state=case.d_state.mT.contiguous()),
        state_v_first=True,
    )  # fmt: skip
    for name in RESULTS:
        mirrored = v_first[name].mT if name in ("final_state", "d_initial_state") else v_first[name]
        assert_bitwise_equal(mirrored, k_first[name], name)


def test_bf16_gates_and_betas():
    case = base(130, 1, 2)
    case = case.with_(g=case.g.bfloat16(), beta=case.beta.bfloat16())
    results = check_accurate(rule, case, "cuda", accuracy=6e-3)
    assert results["dg"].dtype is torch.bfloat16
    assert results["dbeta"].dtype is torch.bfloat16


def test_U25_slices_of_one_projection():
    """Interleaved gates and betas, and q, k, v as slices of one buffer, are the bits of contiguous copies."""
    for heads, value_heads in ((4, 4), (2, 6)):
        case = moved(base(130, heads, value_heads), "cuda")
        width = (2 * heads + value_heads) * 128
        fused = torch.cat([x.flatten(2) for x in (case.q, case.k, case.v)], -1)
        assert fused.shape[-1] == width
        q, k, v = (x.unflatten(-1, (-1, 128)) for x in fused.split([heads * 128, heads * 128, value_heads * 128], -1))
        both = torch.stack([case.g, case.beta], -1).flatten(-2)
        views = case.with_(q=q, k=k, v=v, g=both[..., 0::2], beta=both[..., 1::2])
        expected = run(rule, case)
        for name, x in run(rule, views).items():
            if x is not None:
                assert_bitwise_equal(x, expected[name], name)


def test_U26_gradients_of_any_layout():
    case = moved(base(100, 1, 2), "cuda")
    one = torch.ones((), dtype=torch.bfloat16, device="cuda").expand(case.v.shape)
    wide = torch.randn(1, 100, 2 * 128 + 96, device="cuda").bfloat16()
    crossed = torch.randn(1, 2, 100, 128, device="cuda").bfloat16().transpose(1, 2)
    for do in (one, wide[..., : 2 * 128].unflatten(-1, (2, 128)), crossed):
        a, b = run(rule, case.with_(do=do)), run(rule, case.with_(do=do.contiguous()))
        for name in ("dq", "dk", "dv", "dg", "dbeta"):
            assert_bitwise_equal(a[name], b[name], name)


def test_U27_misaligned_rows_are_repaired():
    case = moved(base(70, 1, 2), "cuda")
    expected = run(rule, case)
    shifted = torch.empty(case.q.numel() + 1, dtype=torch.bfloat16, device="cuda")[1:].view(case.q.shape).copy_(case.q)
    odd = torch.empty(1, 70, 2 * 128 + 1, dtype=torch.bfloat16, device="cuda")[..., : 2 * 128].unflatten(-1, (2, 128))
    results = run(rule, case.with_(q=shifted, v=odd.copy_(case.v)))
    for name in ("o", "dq", "dk", "dv", "dg", "dbeta"):
        assert_bitwise_equal(results[name], expected[name], name)


@pytest.mark.parametrize("loss", ["o", "state", "both"])
@pytest.mark.parametrize("given", [False, True])
def test_U31_states_and_cotangents(given, loss):
    case = with_states(base(100, 1, 2), 1)
    case = case.with_(
        initial_state=case.initial_state if given else None,
        d_state=case.d_state if loss != "o" else None,
        do=case.do if loss != "state" else None,
    )
    results = run(rule, moved(case, "cuda"))
    names = [name for name in RESULTS if results[name] is not None]
    assert_accurate(results, case, names=names)


def test_U31_zeros_and_none_are_the_same_bits():
    case = moved(base(100, 1, 2), "cuda")
    zeros = case.with_(initial_state=torch.zeros(1, 2, 128, 128, device="cuda"))
    a, b = run(rule, case), run(rule, zeros)
    for name in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta"):
        assert_bitwise_equal(a[name], b[name], name)


@pytest.mark.parametrize("wrt", ["q", "k", "v", "g", "beta", "initial_state"])
def test_one_gradient_alone_is_the_same_bits(wrt):
    case = moved(with_states(base(100, 1, 2), 1), "cuda")
    name = {"g": "dg", "beta": "dbeta", "initial_state": "d_initial_state"}.get(wrt, f"d{wrt}")
    assert_bitwise_equal(run(rule, case, wrt=[wrt])[name], run(rule, case)[name], name)


@pytest.mark.parametrize("offsets", [[0, 70, 60, 128], [0, 70, 300], [1, 70]])
def test_U22_a_malformed_pack_gives_nan_and_raises_at_the_next_call(offsets):
    case = moved(base(128, 1, 2), "cuda")
    bad = torch.tensor(offsets, device="cuda")
    results = run(rule, case.with_(cu_seqlens=bad), wrt=[])
    torch.cuda.synchronize()
    assert torch.isnan(results["o"]).all()
    assert torch.isnan(results["final_state"]).all()
    with pytest.raises(MalformedPackError, match="cu_seqlens"):
        run(rule, case)
    run(rule, case)


def test_U22_int32_and_int64_offsets_are_the_same_bits():
    case = base(128, 1, 2)
    a = run(rule, moved(packed(case, (70, 50), torch.int32), "cuda"))
    b = run(rule, moved(packed(case, (70, 50), torch.int64), "cuda"))
    for name in ("o", "final_state", "dq", "dk", "dv", "dg", "dbeta"):
        assert_bitwise_equal(a[name], b[name], name)


@pytest.mark.parametrize(("key", "value"), [(64, 128), (128, 64), (256, 256), (192, 128)])
def test_U14_other_head_dimensions_are_refused_by_name(key, value):
    case = moved(base(70, 1, 1, K=key, V=value), "cuda")
    with pytest.raises(ValueError, match=r"(q: got K|v: got V) = \d+, takes"):
        run(rule, case, wrt=[])


def test_other_dtypes_are_refused_by_name():
    with pytest.raises(TypeError, match="q: got float32, takes bfloat16"):
        run(rule, moved(base(70, 1, 1, dtype=torch.float32), "cuda"), wrt=[])


def test_U15_unnormalised_keys_are_as_finite_as_the_recurrence():
    case = base(64, 1, 1)
    case = case.with_(k=torch.randn(case.k.shape, generator=torch.Generator().manual_seed(1)).bfloat16())
    results = on_cpu(run(rule, moved(case, "cuda"), wrt=[]))
    assert torch.isfinite(results["o"]).all() or float(case.k.float().norm(dim=-1).max()) > 2**0.5


@pytest.mark.parametrize("size", [1.0, 1e12, 1e20])
@pytest.mark.parametrize("powers", [-98, -102])
def test_what_segments_forget_is_not_missed(size, powers):
    """Behind gates of 2^-100 a segment's entry state counts as gone, and so does the gradient of its exit state."""
    case = fading(size, powers)
    assert_fading_is_accurate(rule, on_cpu(run(rule, moved(case, "cuda"))), case)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2])
def test_U23_offsets_beyond_31_bits(rows):
    """131136 tokens of 64 value heads: the workspace of states passes 2^31 elements; with two rows v does as well."""
    tokens, heads = 131136, 64
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (unit(torch.randn(rows, tokens, 1, 128, device="cuda", generator=generator)).bfloat16() for _ in range(2))
    v, do = (torch.empty(rows, tokens, heads, 128, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    for x in (*v, *do):
        x.normal_(generator=generator)
    assert (v.numel() > 2**31) == (rows > 1)
    g = torch.full((rows, tokens, heads), -0.05, device="cuda")
    beta = torch.full((rows, tokens, heads), 0.5, device="cuda")
    last = 128 + 64  # the last 192 tokens start a chunk; 700 earlier ones hand on what survives
    start = tokens - last - 704
    leaves = [x.requires_grad_() for x in (q, k, v, g, beta)]
    o, _ = rule(*leaves)
    grads = torch.autograd.grad(o, leaves, do)
    o = o.detach()
    short = [x.detach()[-1:, start:].contiguous().requires_grad_() for x in leaves]
    o2, _ = rule(*short)
    grads2 = torch.autograd.grad(o2, short, do[-1:, start:].contiguous())
    for a, b in zip((o, *grads), (o2.detach(), *grads2)):
        a, b = a[-1:, -last:].double(), b[:, -last:].double()
        assert float((a - b).norm() / b.norm()) <= 8e-3
