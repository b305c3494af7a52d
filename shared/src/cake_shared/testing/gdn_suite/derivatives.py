"""Optional states, subsets of gradients and what is saved for them, recomputation, second derivatives."""

import itertools

import pytest
import torch
from torch.autograd import forward_ad
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.gdn_inputs import base, generator, packed, states
from cake_shared.testing.gdn_reference import check_near, reference
from cake_shared.testing.gdn_run import run

GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta")


@pytest.mark.parametrize("with_state", [False, True], ids=("no h0", "h0"))
@pytest.mark.parametrize("ask_final", [False, True], ids=("no state out", "state out"))
@pytest.mark.parametrize("loss", ["o", "state", "both"])
def test_U31_optional_states_and_their_gradients(gdn, with_state, ask_final, loss):
    """Each combination of initial state, final state and of what the loss uses has the right gradients."""
    case = base(70, 2, 4, K=64, V=64, dtype=torch.float32)
    h0, ds = states(case, 1)
    case = case.with_(initial_state=h0 if with_state else None)
    case = case.with_(d_state=ds if loss != "o" else None, do=case.do if loss != "state" else None)
    if not ask_final:
        o, final_state = gdn.rule(case.q, case.k, case.v, case.g, case.beta, case.scale, initial_state=h0)
        assert final_state is None
        assert o.shape == case.v.shape
        if loss != "o":
            return
    results = run(gdn.rule, case, output_final_state=ask_final)
    check_near(results, reference(case, output_final_state=ask_final))
    assert (results["d_initial_state"] is not None) == with_state
    if not with_state:
        zeros = run(gdn.rule, case.with_(initial_state=torch.zeros_like(h0)), output_final_state=ask_final)
        gdn.all_same(results, zeros, ("o", "final_state", *GRADIENTS))
    else:
        fixed = run(gdn.rule, case, output_final_state=ask_final, wrt=("q", "k", "v", "g", "beta"))
        gdn.all_same(fixed, results, GRADIENTS)
        assert fixed["d_initial_state"] is None


def test_U31_only_the_initial_state_requires_a_gradient(gdn):
    """A constant model with a learned initial state: its gradient is right, the others are None."""
    case = base(70, 2, 4, K=64, V=64, dtype=torch.float32)
    h0, ds = states(case, 1)
    case = case.with_(initial_state=h0, d_state=ds)
    results = run(gdn.rule, case, wrt=("initial_state",))
    check_near(results, reference(case), ("d_initial_state",))
    assert all(results[name] is None for name in GRADIENTS)


def subset_case():
    """A case in which every input that has a gradient is given."""
    case = packed(base(130, 2, 4, K=64, V=64), (60, 70))
    h0, ds = states(case, 2)
    raw = torch.randn(case.g.shape, generator=generator(3))
    options = {"use_gate_in_kernel": True, "A_log": torch.zeros(4), "dt_bias": torch.ones(4)}
    return case.with_(initial_state=h0, d_state=ds, g=raw, options=options)


ARGUMENT = {
    "dq": "q",
    "dk": "k",
    "dv": "v",
    "dg": "g",
    "dbeta": "beta",
    "d_initial_state": "initial_state",
    "dA_log": "A_log",
    "ddt_bias": "dt_bias",
}


@pytest.mark.parametrize(
    "wanted",
    [*itertools.combinations(ARGUMENT, 1), *itertools.combinations(ARGUMENT, 2), tuple(ARGUMENT)],
    ids="+".join,
)
def test_subsets_of_gradients(gdn, wanted):
    """What requires a gradient gets the one of the full backward, the rest gets None."""
    case = subset_case()
    full = run(gdn.rule, case)
    part = run(gdn.rule, case, wrt=[ARGUMENT[name] for name in wanted])
    for name in ARGUMENT:
        if name in wanted:
            gdn.same(part[name], full[name], name)
        else:
            assert part[name] is None, name


def saved_bytes(rule, case, wanted, **keywords):
    """What autograd saves in a forward pass with gradients for `wanted`: bytes, input names, whether o has history."""
    storages = {}

    def pack(x):
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    names = ("q", "k", "v", "g", "beta", "initial_state")
    named = {name: getattr(case, name) for name in names} | {n: case.options[n] for n in ("A_log", "dt_bias")}
    inputs = {name: x.detach().clone().requires_grad_(name in wanted) for name, x in named.items()}
    owner = {x.untyped_storage().data_ptr(): name for name, x in inputs.items()}
    positional = [inputs.pop(name) for name in ("q", "k", "v", "g", "beta")]
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        o, _ = rule(*positional, case.scale, use_gate_in_kernel=True, cu_seqlens=case.cu_seqlens, **inputs, **keywords)
    return sum(storages.values()), {owner[x] for x in storages if x in owner}, o.requires_grad


def test_nothing_is_saved_without_gradients(gdn):
    """No input requires a gradient, or gradients are off: nothing is saved and the outputs carry no history."""
    case = subset_case()
    assert saved_bytes(gdn.rule, case, ()) == (0, set(), False)
    with torch.no_grad():
        assert saved_bytes(gdn.rule, case, ("q", "k", "v", "g", "beta")) == (0, set(), False)


@pytest.mark.parametrize(
    ("wanted", "never"),
    [
        (("v",), {"v", "initial_state"}),
        (("initial_state",), {"v", "initial_state"}),
        (("v", "initial_state"), {"v", "initial_state"}),
        (("q",), set()),
    ],
    ids=lambda names: "+".join(sorted(names)) or "nothing",
)
def test_what_no_gradient_reads_is_not_saved(gdn, wanted, never):
    """The gradients of v and of the initial state read neither values nor states; the gradient of q reads them all."""
    names = saved_bytes(gdn.rule, subset_case(), wanted)[1]
    assert {"k", "g", "beta"} <= names
    assert not names & never
    assert ("v" in names) == ("v" not in never)


def test_saved_memory_is_that_of_the_inputs(gdn):
    """A training forward saves at most its inputs and what the states of every 64 tokens take."""
    case = subset_case()
    size = sum(x.nbytes for x in (case.q, case.k, case.v, case.g, case.beta, case.initial_state))
    tape = 4 * 4 * 64 * 64 * 4 + sum(x.nbytes for x in (case.q, case.k, case.v)) * 4
    saved, _, has_history = saved_bytes(gdn.rule, case, tuple(ARGUMENT.values()))
    assert has_history
    assert 0 < saved <= size + tape


def test_a_second_backward_of_gradients_raises(gdn):
    """Gradients of gradients are refused, not silently zero."""
    case = base(70, 1, 2, K=16, V=16, dtype=torch.float32)
    q = case.q.clone().requires_grad_()
    o, _ = gdn.rule(q, case.k, case.v, case.g, case.beta)
    (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
    # The plain term keeps the sum differentiable: a rule that only forgot its history would pass unnoticed.
    with pytest.raises(RuntimeError, match="no double backward"):
        (dq.sum() + q.sum()).backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_U46_activation_checkpointing_recomputes_the_same(gdn, reentrant):
    """Checkpointing of both kinds around the rule gives the gradients of the plain step."""
    case = packed(base(300, 2, 4, gate="Gqwen"), (90, 210))
    h0, ds = states(case, 2)
    case = case.with_(initial_state=h0, d_state=ds)

    def checkpointed(q, k, v, g, beta, scale, *, initial_state, **keywords):
        def body(q, k, v, g, beta, initial_state):
            return gdn.rule(q, k, v, g, beta, scale, initial_state=initial_state, **keywords)

        return checkpoint(body, q, k, v, g, beta, initial_state, use_reentrant=reentrant)

    results, expected = run(checkpointed, case), run(gdn.rule, case)
    for name, value in expected.items():
        gdn.same(results[name], value, name)


@pytest.mark.parametrize("policy", ["MUST_SAVE", "PREFER_SAVE", "MUST_RECOMPUTE", "PREFER_RECOMPUTE"])
def test_U46_selective_checkpointing_sees_one_operation(gdn, policy):
    """A policy that saves or recomputes every operation finds the rule as one, and moves no bit."""
    case = packed(base(300, 2, 4, K=32, V=32), (90, 210))
    seen = set()

    def choose(ctx, operation, *arguments, **keywords):
        seen.add(operation.name())
        return CheckpointPolicy[policy]

    def checkpointed(*arguments, **keywords):
        return checkpoint(
            lambda *xs: tuple(x.sin() for x in gdn.rule(*xs, **keywords)),
            *arguments,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(choose),
        )

    def plain(*arguments, **keywords):
        return tuple(x.sin() for x in gdn.rule(*arguments, **keywords))

    results, expected = run(checkpointed, case), run(plain, case)
    for name, value in expected.items():
        if value is not None:
            gdn.same(results[name], value, name)
    assert f"{gdn.name}::chunk_gated_delta_rule_fwd" in seen
    assert not [name for name in seen if "mm" in name], seen


def test_results_may_be_modified_in_place(gdn):
    """A caller may scale the outputs, and gradients, in place as those of any torch function."""
    case = base(70, 2, 4, K=32, V=32, dtype=torch.float32)
    leaves = [getattr(case, name).clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    o, final_state = gdn.rule(*leaves, case.scale, output_final_state=True)
    torch.autograd.backward([o.mul_(2), final_state.mul_(2)], [case.do, torch.zeros_like(final_state)])
    expected = run(gdn.rule, case.with_(do=case.do * 2))
    for leaf, name in zip(leaves, GRADIENTS):
        gdn.same(leaf.grad, expected[name], name)
        leaf.grad.zero_()


def test_forward_mode_is_refused(gdn):
    """A tangent is not dropped in silence: the error names the argument that carries it."""
    case = base(70, 2, 4, K=32, V=32)
    with forward_ad.dual_level():
        v = forward_ad.make_dual(case.v, torch.ones_like(case.v))
        with pytest.raises(RuntimeError, match="v: got a tensor with a forward-mode tangent, takes one without"):
            gdn.rule(case.q, case.k, v, case.g, case.beta)
        assert gdn.rule(case.q, case.k, case.v, case.g, case.beta)[0].shape == case.v.shape


def test_a_gradient_penalty_raises(gdn):
    """Gradients are no constants where the incoming gradient wants none itself; one that is a constant is no error."""
    case = base(70, 1, 2, K=16, V=16, dtype=torch.float32)
    leaves = [getattr(case, name).clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    o, _ = gdn.rule(*leaves)
    for leaf in leaves:
        (grad,) = torch.autograd.grad(o.sum(), leaf, create_graph=True)
        with pytest.raises(RuntimeError, match="no double backward"):
            (o.sum() + grad.square().sum()).backward(retain_graph=True)
    v = case.v.clone().requires_grad_()  # the rule is linear in v
    o, _ = gdn.rule(case.q, case.k, v, case.g, case.beta)
    (dv,) = torch.autograd.grad(o, v, case.do, create_graph=True, retain_graph=True)
    assert not dv.requires_grad
    gdn.same(dv, torch.autograd.grad(o, v, case.do)[0], "dv")


def test_double_backward_raises_under_a_dispatch_mode(gdn):
    """Where the call is an operator, its gradients refuse to be differentiated as those of the eager function do."""
    case = base(70, 1, 2, K=16, V=16, dtype=torch.float32)
    q = case.q.clone().requires_grad_()
    with FlopCounterMode(display=False):
        o, _ = gdn.rule(q, case.k, case.v, case.g, case.beta)
        (dq,) = torch.autograd.grad(o.square().sum(), q, create_graph=True)
        with pytest.raises(RuntimeError, match="no double backward"):
            (dq.sum() + q.sum()).backward()


def test_U46_checkpointing_saves_only_the_inputs(gdn):
    """Under checkpointing the forward keeps no intermediate of the rule."""
    case = base(300, 2, 4)
    leaves = [getattr(case, name).clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    known = {x.untyped_storage().data_ptr() for x in leaves}
    strangers = []

    def pack(x):
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in known:
            strangers.append(tuple(x.shape))
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        checkpoint(lambda *xs: gdn.rule(*xs)[0], *leaves, use_reentrant=True)
    assert strangers == []


def test_gradients_accumulate_over_two_calls(gdn):
    """Two calls that share inputs add their gradients; nothing of the first call leaks into the second."""
    case = base(70, 2, 4, K=64, V=64, dtype=torch.float32)
    leaves = [getattr(case, name).clone().requires_grad_() for name in ("q", "k", "v", "g", "beta")]
    first = gdn.rule(*leaves, case.scale)[0]
    second = gdn.rule(*leaves, case.scale)[0]
    torch.autograd.backward([first, second], [case.do, case.do])
    once = run(gdn.rule, case)
    for leaf, name in zip(leaves, GRADIENTS):
        assert_bitwise_equal(leaf.grad, once[name] * 2, name)


def test_a_graph_can_be_walked_twice_when_retained(gdn):
    """`retain_graph=True` allows a second walk with the same bits; without it the second walk raises."""
    case = base(70, 2, 4, K=64, V=64)
    q = case.q.clone().requires_grad_()
    o = gdn.rule(q, case.k, case.v, case.g, case.beta)[0]
    (first,) = torch.autograd.grad(o, q, case.do, retain_graph=True)
    (again,) = torch.autograd.grad(o, q, case.do)
    assert_bitwise_equal(again, first, "dq")
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(o, q, case.do)


def test_an_input_changed_in_place_before_backward_is_noticed(gdn):
    """Writing into a saved input between forward and backward raises instead of giving wrong gradients."""
    case = base(70, 2, 4, K=64, V=64)
    q, k = case.q.clone().requires_grad_(), case.k.clone()
    o = gdn.rule(q, k, case.v, case.g, case.beta)[0]
    k.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()
