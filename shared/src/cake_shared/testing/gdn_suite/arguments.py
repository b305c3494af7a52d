"""Every bad argument of the public functions: the promised error, which names the argument, what it got and takes."""

import re

import pytest
import torch

from cake_shared.errors import UnsupportedArchError
from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.gdn_inputs import base

T, H, HV, K, V = 70, 2, 4, 16, 24


def good(**changes):
    """Arguments of a call that works, with some replaced."""
    case = base(T, H, HV, K=K, V=V)
    arguments = {name: getattr(case, name) for name in ("q", "k", "v", "g", "beta")}
    return {**arguments, **changes}


def offsets(*values, dtype=torch.int64):
    """Offsets as a tensor."""
    return torch.tensor(values, dtype=dtype)


def zeros(*shape, dtype=torch.float32, device="cpu"):
    """Zeros of that shape."""
    return torch.zeros(shape, dtype=dtype, device=device)


GATE = {"use_gate_in_kernel": True}

# Name of the row: what is changed, the error's type, the argument that it must name, what it got.
BAD = {
    "q is a list": ({"q": [1.0]}, TypeError, "q", "list"),
    "k is None": ({"k": None}, TypeError, "k", "None"),
    "v is an array of numbers": ({"v": 3.0}, TypeError, "v", "float"),
    "q without batch": ({"q": zeros(T, H, K)}, ValueError, "q", r"\[70, 2, 16\]"),
    "k of another length": ({"k": zeros(1, T + 1, H, K, dtype=torch.bfloat16)}, ValueError, "k", "71"),
    "k of another head count": ({"k": zeros(1, T, H + 1, K, dtype=torch.bfloat16)}, ValueError, "k", "3"),
    "k of another head dim": ({"k": zeros(1, T, H, K + 1, dtype=torch.bfloat16)}, ValueError, "k", "17"),
    "v of another batch": ({"v": zeros(2, T, HV, V, dtype=torch.bfloat16)}, ValueError, "v", r"\[2, 70, 4, 24\]"),
    "v of another length": ({"v": zeros(1, T - 1, HV, V, dtype=torch.bfloat16)}, ValueError, "v", "69"),
    "value heads not a multiple": ({"v": zeros(1, T, 3, V, dtype=torch.bfloat16)}, ValueError, "v", "3"),
    "fewer value heads than key heads": ({"v": zeros(1, T, 1, V, dtype=torch.bfloat16)}, ValueError, "v", "1"),
    "g of another head count": ({"g": zeros(1, T, H)}, ValueError, "g", r"\[1, 70, 2\]"),
    "g with a trailing dim": ({"g": zeros(1, T, HV, 1)}, ValueError, "g", r"\[1, 70, 4, 1\]"),
    "beta of another length": ({"beta": zeros(1, T + 2, HV)}, ValueError, "beta", "72"),
    "q in half precision": ({"q": zeros(1, T, H, K, dtype=torch.float16)}, TypeError, "q", "float16"),
    "q of integers": ({"q": zeros(1, T, H, K, dtype=torch.int32)}, TypeError, "q", "int32"),
    "k of another dtype than q": ({"k": zeros(1, T, H, K)}, TypeError, "k", "float32"),
    "v of another dtype than q": ({"v": zeros(1, T, HV, V)}, TypeError, "v", "float32"),
    "g in half precision": ({"g": zeros(1, T, HV, dtype=torch.float16)}, TypeError, "g", "float16"),
    "beta of integers": ({"beta": zeros(1, T, HV, dtype=torch.int64)}, TypeError, "beta", "int64"),
    "k on another device": ({"k": zeros(1, T, H, K, dtype=torch.bfloat16, device="meta")}, ValueError, "k", "meta"),
    "g on another device": ({"g": zeros(1, T, HV, device="meta")}, ValueError, "g", "meta"),
    "scale is text": ({"scale": "large"}, TypeError, "scale", "str"),
    "scale is not finite": ({"scale": float("inf")}, ValueError, "scale", "inf"),
    "scale is not a number": ({"scale": float("nan")}, ValueError, "scale", "nan"),
    "initial_state in BF16": (
        {"initial_state": zeros(1, HV, K, V, dtype=torch.bfloat16)},
        TypeError,
        "initial_state",
        "bfloat16",
    ),
    "initial_state of another count": ({"initial_state": zeros(2, HV, K, V)}, ValueError, "initial_state", "2"),
    "initial_state transposed": ({"initial_state": zeros(1, HV, V, K)}, ValueError, "initial_state", r"24, 16\]"),
    "initial_state not transposed": (
        {"initial_state": zeros(1, HV, K, V), "state_v_first": True},
        ValueError,
        "initial_state",
        r"16, 24\]",
    ),
    "initial_state is a number": ({"initial_state": 0.0}, TypeError, "initial_state", "float"),
    "initial_state on another device": (
        {"initial_state": zeros(1, HV, K, V, device="meta")},
        ValueError,
        "initial_state",
        "meta",
    ),
    "initial_state by batch, not by sequence": (
        {"initial_state": zeros(1, HV, K, V), "cu_seqlens": offsets(0, 30, 70)},
        ValueError,
        "initial_state",
        "1",
    ),
    "offsets are a list": ({"cu_seqlens": [0, T]}, TypeError, "cu_seqlens", "list"),
    "offsets are floats": ({"cu_seqlens": offsets(0, T, dtype=torch.float32)}, TypeError, "cu_seqlens", "float32"),
    "offsets are bytes": ({"cu_seqlens": offsets(0, T, dtype=torch.uint8)}, TypeError, "cu_seqlens", "uint8"),
    "offsets in two dims": ({"cu_seqlens": offsets(0, T)[None]}, ValueError, "cu_seqlens", r"\[1, 2\]"),
    "no offsets": ({"cu_seqlens": offsets()}, ValueError, "cu_seqlens", r"\[0\]"),
    "offsets decrease": ({"cu_seqlens": offsets(0, 40, 30, 70)}, ValueError, "cu_seqlens", "30"),
    "offsets beyond T": ({"cu_seqlens": offsets(0, 71)}, ValueError, "cu_seqlens", "71"),
    "offsets not from zero": ({"cu_seqlens": offsets(2, 70)}, ValueError, "cu_seqlens", "2"),
    "A_log is missing": (GATE, (TypeError, ValueError), "A_log", "None"),
    "A_log of another head count": ({**GATE, "A_log": zeros(H)}, ValueError, "A_log", r"\[2\]"),
    "A_log in half precision": ({**GATE, "A_log": zeros(HV, dtype=torch.float16)}, TypeError, "A_log", "float16"),
    "A_log without its gate": ({"A_log": zeros(HV)}, ValueError, "A_log", "use_gate_in_kernel"),
    "dt_bias of another head count": (
        {**GATE, "A_log": zeros(HV), "dt_bias": zeros(HV + 1)},
        ValueError,
        "dt_bias",
        r"\[5\]",
    ),
    "dt_bias without its gate": ({"dt_bias": zeros(HV)}, ValueError, "dt_bias", "use_gate_in_kernel"),
    "neg_eigval without the sigmoid": (
        {"allow_neg_eigval": True},
        ValueError,
        "allow_neg_eigval",
        "use_beta_sigmoid_in_kernel",
    ),
    "q is sparse": ({"q": zeros(1, T, H, K, dtype=torch.bfloat16).to_sparse()}, TypeError, "q", "sparse"),
    "g is sparse": ({"g": zeros(1, T, HV).to_sparse()}, TypeError, "g", "sparse"),
    "offsets on another device": ({"cu_seqlens": offsets(0, T).to("meta")}, ValueError, "cu_seqlens", "meta"),
    "scale is an integer beyond every float": ({"scale": 10**400}, ValueError, "scale", "1000"),
    "l2norm is text": ({"use_qk_l2norm_in_kernel": "False"}, TypeError, "use_qk_l2norm_in_kernel", "str"),
    "gate is None": ({"use_gate_in_kernel": None}, TypeError, "use_gate_in_kernel", "None"),
    "sigmoid is a number": ({"use_beta_sigmoid_in_kernel": 1}, TypeError, "use_beta_sigmoid_in_kernel", "int"),
    "neg_eigval is a list": ({"allow_neg_eigval": []}, TypeError, "allow_neg_eigval", "list"),
    "state_v_first is a tensor": ({"state_v_first": zeros(2)}, TypeError, "state_v_first", "Tensor"),
    "backend of no such name": ({"backend": "tpu"}, ValueError, "backend", "tpu"),
    "backend is a number": ({"backend": 3}, (TypeError, ValueError), "backend", "3|int"),
    "CUDA asked for CPU tensors": ({"backend": "cuda"}, (ValueError, UnsupportedArchError), "backend", "cpu"),
}

BAD_BATCH = {
    "offsets with a batch": ({"cu_seqlens": offsets(0, T)}, ValueError, "cu_seqlens|q", "2"),
}


def check_bad(function, arguments, kind, name, got):
    """Assert that the call raises `kind` with name, got and takes in the message, and leaves every tensor as it was."""
    __tracebackhide__ = True
    tensors = {
        n: x for n, x in arguments.items() if isinstance(x, torch.Tensor) and x.is_cpu and x.layout is torch.strided
    }
    before = {n: x.clone() for n, x in tensors.items()}
    with pytest.raises(kind) as caught:
        function(**arguments)
    message = str(caught.value)
    assert type(caught.value) in (kind if isinstance(kind, tuple) else (kind,)), type(caught.value)
    assert re.search(rf"(?<![a-zA-Z_])({name})(?![a-zA-Z_])", message), f"does not name {name}: {message}"
    assert re.search(got, message), f"does not say what it got ({got}): {message}"
    assert re.search(r"\btakes?\b", message), f"does not say what it takes: {message}"
    for n, x in tensors.items():
        assert_bitwise_equal(x, before[n], n)


def passes(gdn):
    """The rule and its two passes as functions of the same keywords."""
    module = gdn.module
    saved = module.chunk_gated_delta_rule_fwd(**good())[2]
    d_o = base(T, H, HV, K=K, V=V).do

    def backward(**arguments):
        return module.chunk_gated_delta_rule_bwd(arguments.pop("d_o", d_o), None, saved, **arguments)

    return {"rule": gdn.rule, "fwd": module.chunk_gated_delta_rule_fwd, "bwd": backward}


@pytest.mark.parametrize("function", ["rule", "fwd", "bwd"])
@pytest.mark.parametrize("row", BAD)
def test_bad_argument(gdn, row, function):
    """One row of the table of bad arguments, for each public function."""
    changes, kind, name, got = BAD[row]
    check_bad(passes(gdn)[function], good(**changes), kind, name, got)


@pytest.mark.parametrize(
    ("function", "flag"), [("rule", "output_final_state"), ("fwd", "output_final_state"), ("fwd", "save_states")]
)
def test_bad_flag_of_the_forward_pass(gdn, function, flag):
    """What says which results are wanted is a bool as well."""
    check_bad(passes(gdn)[function], good(**{flag: zeros(2)}), TypeError, flag, "Tensor")


ARGUMENTS_WITH_GRADIENTS = ("q", "k", "v", "g", "beta", "initial_state", "A_log", "dt_bias")

BAD_GRADIENTS = {
    "d_o is a number": ({"d_o": 1.0}, TypeError, "d_o", "float"),
    "d_o of another shape": ({"d_o": zeros(1, T, HV, K, dtype=torch.bfloat16)}, ValueError, "d_o", r"\[1, 70, 4, 16\]"),
    "d_o of another dtype": ({"d_o": zeros(1, T, HV, V)}, TypeError, "d_o", "float32"),
    "d_o on another device": (
        {"d_o": zeros(1, T, HV, V, dtype=torch.bfloat16, device="meta")},
        ValueError,
        "d_o",
        "meta",
    ),
    "d_final_state of another shape": (
        {"d_final_state": zeros(2, HV, K, V)},
        ValueError,
        "d_final_state",
        r"\[2, 4, 16, 24\]",
    ),
    "d_final_state in BF16": (
        {"d_final_state": zeros(1, HV, K, V, dtype=torch.bfloat16)},
        TypeError,
        "d_final_state",
        "bfloat16",
    ),
    "saved holds no tensor": ({"saved": "empty"}, TypeError, "saved", "None"),
    "saved on another device": ({"saved": zeros(2, device="meta")}, ValueError, "saved", "meta"),
    "saved of another dtype": ({"saved": zeros(2, dtype=torch.float64)}, TypeError, "saved", "float64"),
    "saved of other shapes": ({"saved": zeros(66)}, ValueError, "saved", "66"),
    "needs is a tuple": ({"needs": (True,) * 3}, TypeError, "needs", "tuple"),
    "saved is a tensor": ({"saved": zeros(3)}, TypeError, "saved", "Tensor"),
    "needs a state that is not there": (
        {"needs": (True,) * len(ARGUMENTS_WITH_GRADIENTS)},
        (TypeError, ValueError),
        "needs",
        "initial_state|tuple",
    ),
}


@pytest.mark.parametrize("row", BAD_GRADIENTS)
def test_bad_argument_of_the_backward_pass(gdn, row):
    """One row of the table of what only the backward pass takes."""
    changes, kind, name, got = BAD_GRADIENTS[row]
    module = gdn.module
    saved = module.chunk_gated_delta_rule_fwd(**good())[2]
    if len(changes.get("needs", ())) == len(ARGUMENTS_WITH_GRADIENTS):
        changes = {"needs": module.Needs(*changes["needs"])}
    if row.startswith("saved ") and row != "saved is a tensor":
        content = changes["saved"]
        changes = {"saved": type(saved)(content if isinstance(content, torch.Tensor) else None)}
    arguments = {"d_o": base(T, H, HV, K=K, V=V).do, "d_final_state": None, "saved": saved, **good(), **changes}
    check_bad(module.chunk_gated_delta_rule_bwd, arguments, kind, name, got)


@pytest.mark.parametrize("row", BAD_BATCH)
def test_bad_argument_of_a_batch(gdn, row):
    """One row of the table of arguments that are bad for B > 1."""
    changes, kind, name, got = BAD_BATCH[row]
    batch = {n: torch.cat([x, x]) for n, x in good().items()}
    check_bad(gdn.rule, {**batch, **changes}, kind, name, got)


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
def test_missing_argument(gdn, name):
    """Each required argument is required."""
    arguments = good()
    del arguments[name]
    with pytest.raises(TypeError, match=f"'{name}'"):
        gdn.rule(**arguments)


def test_unknown_argument(gdn):
    """A keyword that does not exist is refused, not swallowed."""
    with pytest.raises(TypeError, match="head_first"):
        gdn.rule(**good(head_first=True))


def test_the_good_arguments_are_good(gdn):
    """The row from which every bad one is made runs, so that each failure is of its own change."""
    o, state = gdn.rule(**good())
    assert bool(torch.isfinite(o).all())
    assert state is None
    options = {"use_gate_in_kernel": True, "A_log": zeros(HV), "dt_bias": zeros(HV), "backend": "cpu", "scale": 1}
    o, state = gdn.rule(**good(**options, initial_state=zeros(2, HV, K, V), cu_seqlens=offsets(0, 30, 70)))
    assert bool(torch.isfinite(o).all())
