"""Global state of torch around a call: it must move no bit, and a call must leave none behind."""

import contextlib
import subprocess
import sys
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.gdn_inputs import base, generator, packed, states
from cake_shared.testing.gdn_run import run


def full_case():
    """A pack with everything optional given."""
    case = packed(base(150, 2, 4, K=32, V=48), (60, 80))
    h0, ds = states(case, 2)
    options = {
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(-1, 1, 4),
        "dt_bias": torch.linspace(0, 1, 4),
        "use_qk_l2norm_in_kernel": True,
        "use_beta_sigmoid_in_kernel": True,
    }
    raw = torch.randn(case.g.shape, generator=generator(3))
    return case.with_(initial_state=h0, d_state=ds, g=raw, options=options)


@contextlib.contextmanager
def default_dtype(dtype):
    """Another default dtype for new tensors."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def matmul_precision(name):
    """Another global precision of FP32 matrix products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextlib.contextmanager
def other_seed():
    """Another state of torch's random generator."""
    with torch.random.fork_rng():
        torch.manual_seed(1234)
        yield


SURROUNDINGS = {
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype float64": lambda: default_dtype(torch.float64),
    "default dtype bfloat16": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
    "matmul precision": lambda: matmul_precision("medium"),
    "anomaly detection": lambda: torch.autograd.set_detect_anomaly(True),
    "random state": other_seed,
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_global_state_moves_no_bit(gdn, name):
    """Autocast, default dtype and device, precision flags, random state: the call takes what it is given."""
    case = full_case()
    expected = run(gdn.rule, case)
    with SURROUNDINGS[name](), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Anomaly Detection")
        results = run(gdn.rule, case)
    for result, value in expected.items():
        assert_bitwise_equal(results[result], value, result)


def test_the_random_state_is_left_alone(gdn):
    """A call draws no random number."""
    before = torch.get_rng_state()
    run(gdn.rule, full_case())
    assert torch.equal(torch.get_rng_state(), before)


def test_no_warning(gdn):
    """A call warns about nothing."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(gdn.rule, full_case())


INFERENCE_FIRST = """
import torch
import {package} as package
from cake_shared.testing.gdn_run import run
from cake_shared.testing.gdn_suite.surroundings import full_case
case = full_case()
with torch.inference_mode():
    first = run(package.chunk_gated_delta_rule, case, wrt=())
later = run(package.chunk_gated_delta_rule, case)
assert torch.equal(first["o"], later["o"]) and all(x is not None for x in later.values())
"""


def test_inference_first_then_training(gdn):
    """What the first call caches under inference mode serves a training call afterwards."""
    subprocess.run([sys.executable, "-c", INFERENCE_FIRST.format(package=gdn.name)], check=True)


def test_parameters_and_offsets_of_any_kind(gdn):
    """nn.Parameters, and offsets that are a strided view, are tensors like others."""
    case = full_case()
    expected = run(gdn.rule, case)
    options = {**case.options, "A_log": torch.nn.Parameter(case.options["A_log"])}
    spread = torch.stack([case.cu_seqlens, case.cu_seqlens + 7], 1)[:, 0]
    results = run(gdn.rule, case.with_(options=options, cu_seqlens=spread))
    for result, value in expected.items():
        assert_bitwise_equal(results[result], value, result)


def test_fake_tensors_get_shapes_and_leave_nothing_behind(gdn):
    """Under a fake mode, and on fake tensors outside it, only shapes are computed; a real call afterwards is right."""
    case = full_case()
    expected = run(gdn.rule, case)
    mode = FakeTensorMode()
    fakes = {name: mode.from_tensor(getattr(case, name)) for name in ("q", "k", "v", "g", "beta", "cu_seqlens")}
    offsets = fakes.pop("cu_seqlens")
    for around in (mode, contextlib.nullcontext()):
        with around:
            o, final_state = gdn.rule(*fakes.values(), cu_seqlens=offsets, output_final_state=True)
        assert o.shape == case.v.shape
        assert final_state.shape == expected["final_state"].shape
        assert {type(o), type(final_state)} == {type(offsets)}
    results = run(gdn.rule, case)
    for result, value in expected.items():
        assert_bitwise_equal(results[result], value, result)


def test_vmap_is_a_loop(gdn):
    """Without gradients `torch.vmap` over a call equals calls one by one."""
    case = base(70, 2, 4, K=32, V=32)
    values = torch.stack([case.v, case.v.flip(1)])
    results = torch.vmap(lambda v: gdn.rule(case.q, case.k, v, case.g, case.beta)[0])(values)
    for result, v in zip(results, values):
        assert_bitwise_equal(result, gdn.rule(case.q, case.k, v, case.g, case.beta)[0], "o")
