"""torch.compile, operators and autocast on a GPU: one graph for every length and pack, the bits of the eager call."""

import subprocess
import sys

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cake_gdn_det_train import chunk_gated_delta_rule
from cake_shared.gdn.cuda import rule as rule_on_cuda
from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.gdn_cuda import moved
from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.testing.gdn_run import run

pytestmark = pytest.mark.gpu

rule = chunk_gated_delta_rule
FLAGS = (128**-0.5, True, True, True, False, False)


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def pack_of(lengths, rest=0):
    case = packed(base(sum(lengths) + rest, 1, 2), lengths)
    h0, ds = states(case, len(lengths))
    return moved(case.with_(initial_state=h0, d_state=ds), "cuda")


def compiled(function, dynamic=None):
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


def assert_same(results, expected):
    __tracebackhide__ = True
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def test_U45_one_graph_for_every_length():
    function, counter = compiled(rule)
    for tokens in (64, 130, 77, 200):
        case = moved(base(tokens, 1, 2), "cuda")
        assert_same(run(function, case), run(rule, case))
    assert counter.frame_count <= 2


def test_U45_one_graph_for_every_pack():
    function, counter = compiled(rule)
    for lengths in ((30, 34), (10, 20, 70, 3, 60), (64, 0, 9)):
        case = pack_of(lengths, rest=7)
        assert_same(run(function, case), run(rule, case))
    assert counter.frame_count <= 2


FIRST_CALL = """
import torch
from cake_gdn_det_train import chunk_gated_delta_rule
q, k = (torch.randn(1, 70, 1, 128, device="cuda").bfloat16() / 12 for _ in range(2))
v = torch.randn(1, 70, 2, 128, device="cuda").bfloat16().requires_grad_()
g, beta = (torch.full((1, 70, 2), x, device="cuda") for x in (-0.1, 0.5))
o, _ = torch.compile(chunk_gated_delta_rule, backend="aot_eager", fullgraph=True)(q, k, v, g, beta)
o.sum().backward()
assert torch.equal(o, chunk_gated_delta_rule(q, k, v, g, beta)[0])
print("compiled first")
"""


def test_the_first_call_of_a_process_may_be_a_compiled_one():
    """What an eager call would have found before, the module among it, is not part of the graph."""
    done = subprocess.run([sys.executable, "-c", FIRST_CALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "compiled first" in done.stdout


def strided(case):
    both, wide = torch.stack([case.g, case.beta], -1), torch.cat([case.v, case.v], -1)
    do = torch.ones((), dtype=case.do.dtype, device="cuda").expand_as(case.do)
    return case.with_(g=both[..., 0], beta=both[..., 1], v=wide[..., :128], do=do)


def test_U45_strided_inputs_and_an_expanded_gradient():
    case = strided(pack_of((60, 70)))
    function, _ = compiled(rule)
    assert_same(run(function, case), run(rule, case))


def op_tensors(case):
    parameters = (torch.linspace(-1, 1, 2, device="cuda"), torch.linspace(0, 1, 2, device="cuda"))
    return [case.q, case.k, case.v, case.g, case.beta, case.initial_state, *parameters, case.cu_seqlens]


@pytest.mark.parametrize("make", [lambda: pack_of((60, 70), rest=5), lambda: strided(pack_of((60, 70)))])
def test_U45_opcheck(make, monkeypatch):
    """All of every output, what is kept for a backward pass too: its gaps, which nothing writes, are zeros here."""

    def zeros(size, device):
        return torch.zeros(size, dtype=torch.uint8, device=device)

    monkeypatch.setattr(rule_on_cuda, "_scratch", zeros)
    case = make()
    ops = torch.ops.cake_gdn_det_train
    tensors = op_tensors(case)
    for x in tensors[:-1]:
        x.requires_grad_()
    forward, backward = ops.chunk_gated_delta_rule_fwd.default, ops.chunk_gated_delta_rule_bwd.default
    for saves_states in (False, True):
        torch.library.opcheck(forward, (*tensors, *FLAGS, True, saves_states))
    tensors = [x.detach() for x in tensors]
    kept = forward(*tensors, *FLAGS, False, True)[2:]
    arguments = (case.do, case.d_state, *tensors, *kept, *FLAGS, 128, [True] * 8)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(backward, arguments, test_utils=tests)


def test_autocast_changes_nothing():
    case = pack_of((60, 70))
    expected = run(rule, case)
    with torch.autocast("cuda", torch.float16):
        assert_same(run(rule, case), expected)
