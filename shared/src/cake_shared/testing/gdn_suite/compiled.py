"""torch.compile and the registered operators: no graph break, few recompilations, the bits of the eager call."""

import re

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.testing.gdn_run import run

OPTIONS = {
    "use_gate_in_kernel": True,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
}


@pytest.fixture(autouse=True)
def fresh_compiler():
    """Each test compiles from nothing and leaves nothing compiled behind."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def case_of(lengths, rest=0):
    """A pack of those lengths with states and `rest` rows behind it."""
    case = packed(base(sum(lengths) + rest, 2, 4, K=32, V=32), lengths)
    h0, ds = states(case, len(lengths))
    return case.with_(initial_state=h0, d_state=ds)


def compiled(function, dynamic=None):
    """The function compiled into one graph, and a counter of the graphs that were made."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


def assert_same(gdn, results, expected):
    """Compare all results as the package promises."""
    __tracebackhide__ = True
    for name, value in expected.items():
        gdn.same(results[name], value, name)


def test_U45_fullgraph_with_dynamic_tokens(gdn):
    """T from 64 over 130 to more, one graph: at most one recompilation, and the bits of eager."""
    function, counter = compiled(gdn.rule)
    for tokens in (64, 130, 77, 200, 193):
        case = base(tokens, 2, 4, K=32, V=32)
        assert_same(gdn, run(function, case), run(gdn.rule, case))
    assert counter.frame_count <= 2


def test_U45_fullgraph_with_dynamic_packs(gdn):
    """N from 2 to 5 sequences and another T each time: at most one recompilation, and the bits of eager."""
    function, counter = compiled(gdn.rule)
    for lengths in ((30, 34), (10, 20, 70, 3, 60), (64, 0, 9), (5, 60, 11, 12)):
        case = case_of(lengths, rest=7)
        assert_same(gdn, run(function, case), run(gdn.rule, case))
    assert counter.frame_count <= 2


def test_U45_marked_dynamic_from_the_start(gdn):
    """`dynamic=True` compiles once for every length."""
    function, counter = compiled(gdn.rule, dynamic=True)
    graphs = []
    for tokens in (64, 130, 77):
        case = base(tokens, 2, 4, K=32, V=32)
        assert_same(gdn, run(function, case), run(gdn.rule, case))
        graphs.append(counter.frame_count)
    assert graphs == graphs[:1] * 3


def test_U45_options_and_parameters(gdn):
    """All options and the gradients of the gate's parameters through the compiled graph."""
    parameters = {"A_log": torch.linspace(-1, 1, 4), "dt_bias": torch.linspace(0, 1, 4)}
    case = case_of((60, 70)).with_(options={**OPTIONS, **parameters})
    function, _ = compiled(gdn.rule)
    assert_same(gdn, run(function, case), run(gdn.rule, case))


def test_U45_strided_gates_and_expanded_output_gradient(gdn):
    """g and beta interleaved in one buffer, a gradient of stride 0: fake strides must match the real ones."""
    case = base(100, 2, 4, K=32, V=32)
    both = torch.stack([case.g, case.beta], -1).flatten(2)
    case = case.with_(
        g=both[..., 0::2], beta=both[..., 1::2], do=torch.ones((), dtype=case.do.dtype).expand_as(case.do)
    )
    function, _ = compiled(gdn.rule)
    assert_same(gdn, run(function, case), run(gdn.rule, case))


def test_U45_a_layer_around_the_rule(gdn):
    """A whole layer in one graph: projections, rule, output; gradients of its weights as in eager."""
    rule = gdn.rule

    def layer(x, w_qkv, w_gb, w_out):
        tokens = x.shape[1]
        q, k, v = (x @ w_qkv).split([32, 32, 64], -1)
        q, k, v = (y.view(1, tokens, -1, 16) for y in (q, k, v))
        g, beta = (x @ w_gb).float().chunk(2, -1)
        o, _ = rule(
            q, k, v, -torch.nn.functional.softplus(g), beta.sigmoid(), use_qk_l2norm_in_kernel=True, cu_seqlens=None
        )
        return o.flatten(2) @ w_out

    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 90, 24), (24, 128), (24, 8), (64, 24))
    leaves = [torch.randn(shape, generator=generator).mul_(0.3).requires_grad_() for shape in shapes]
    function, counter = compiled(layer)
    gradients = []
    for call in (layer, function):
        gradients.append(torch.autograd.grad(call(*leaves).square().sum(), leaves))
    assert counter.frame_count == 1
    for eager, graph, name in zip(*gradients, ("dx", "dw_qkv", "dw_gb", "dw_out")):
        torch.testing.assert_close(graph, eager, rtol=1e-5, atol=1e-5, msg=name)


def test_compiled_forward_without_gradients(gdn):
    """Under `no_grad` the graph holds the forward alone and has the bits of eager."""
    case = case_of((60, 70))
    function, counter = compiled(gdn.rule)
    with torch.no_grad():
        results, expected = run(function, case, wrt=()), run(gdn.rule, case, wrt=())
    assert counter.frame_count == 1
    assert_same(gdn, results, expected)


def registered_ops(gdn):
    """Names of the operators that importing the package registered under its own name."""
    assert gdn.module is not None
    prefix = gdn.name + "::"
    return {name.removeprefix(prefix) for name in torch._C._dispatch_get_all_op_names() if name.startswith(prefix)}


FLAGS = (0.25, True, True, True, False, False)


def op_arguments(case):
    """The operators' tensors, in order, from q to cu_seqlens."""
    return (
        *(case.q, case.k, case.v, case.g, case.beta, case.initial_state),
        *(torch.linspace(-1, 1, 4), torch.linspace(0, 1, 4), case.cu_seqlens),
    )


OP_CASES = {
    "a pack with states": lambda: case_of((60, 70), rest=5),
    "strided views": lambda: strided(case_of((60, 70))),
    "a batch without states": lambda: base(70, 2, 4, K=32, V=48, B=2),
    "no tokens": lambda: base(1, 2, 4, K=32, V=48).tokens(0, 0),
    "several segments": lambda: base(8200, 1, 4, K=16, V=16),
}


def strided(case):
    """Gate and beta interleaved, v a slice of a wider buffer."""
    both = torch.stack([case.g, case.beta], -1)
    wide = torch.cat([case.v, case.v], -1)
    return case.with_(g=both[..., 0], beta=both[..., 1], v=wide[..., : case.v.shape[-1]])


@pytest.mark.parametrize("kind", OP_CASES)
@pytest.mark.parametrize("output_final_state", [False, True])
def test_U45_opcheck_of_the_forward_operator(gdn, kind, output_final_state):
    """Schema, fake shapes, strides and dtypes, autograd registration and tracing of the forward operator."""
    case = OP_CASES[kind]()
    tensors = [x if x is None else x.clone() for x in op_arguments(case)[:-1]] + [case.cu_seqlens]
    if kind == "strided views":
        tensors = list(op_arguments(case))
    for x in tensors[:-1]:
        if x is not None:
            x.requires_grad_()
    op = getattr(torch.ops, gdn.name).chunk_gated_delta_rule_fwd.default
    torch.library.opcheck(op, (*tensors, *FLAGS, output_final_state, True))


@pytest.mark.parametrize("kind", OP_CASES)
def test_U45_opcheck_of_the_backward_operator(gdn, kind):
    """Schema, fake shapes, strides and dtypes and tracing of the backward operator, with and without each gradient."""
    case = OP_CASES[kind]()
    ops = getattr(torch.ops, gdn.name)
    tensors = op_arguments(case)
    _, _, entries, groundwork = ops.chunk_gated_delta_rule_fwd(*tensors, *FLAGS, False, True)
    given = case.initial_state is not None
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for needs in ([True] * 5 + [given, True, True], [i == 2 for i in range(8)], [i == 6 for i in range(8)]):
        arguments = (case.do, case.d_state, *tensors, entries, groundwork, *FLAGS, case.v.shape[3], needs)
        torch.library.opcheck(ops.chunk_gated_delta_rule_bwd.default, arguments, test_utils=tests)


def test_every_operator_has_its_opcheck(gdn):
    """No operator is registered without a test here that checks it."""
    checked = {match for name in globals() for match in re.findall(r"opcheck_of_the_(\w+)_operator", name)}
    names = {"chunk_gated_delta_rule_fwd": "forward", "chunk_gated_delta_rule_bwd": "backward"}
    assert {names.get(name.split(".")[0]) for name in registered_ops(gdn)} == checked


def test_a_bad_argument_raises_under_compile_too(gdn):
    """The compiled call refuses what the eager call refuses."""
    case = base(70, 2, 4, K=32, V=32)
    function, _ = compiled(gdn.rule)
    with pytest.raises(Exception, match="beta"):
        function(case.q, case.k, case.v, case.g, case.beta[:, :5])
