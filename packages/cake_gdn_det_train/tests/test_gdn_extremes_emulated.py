"""Gates and rows that FP32 has no value for on the way to results that are ordinary, in the emulator."""

import pytest
import torch

from cake_shared.emulator import Options
from cake_shared.gdn.cuda.devices import ErrorWord
from cake_shared.gdn.cuda.rule import RuleBackend, uses_native
from cake_shared.testing import poisoned_allocations
from cake_shared.testing.emulated import emulated_or_skip
from cake_shared.testing.gdn_cuda import assert_accurate, rule_through
from cake_shared.testing.gdn_inputs import base, generator, states
from cake_shared.testing.gdn_reference import reference
from cake_shared.testing.gdn_run import run

PACKAGE, LIMIT = "cake_gdn_det_train", 6e-3


@pytest.fixture(scope="module")
def run_in():
    """`run_in(architecture, case)`: the results in the emulator."""
    packages = emulated_or_skip(PACKAGE)

    def get(architecture, case):
        package = packages(architecture)
        package.options = Options(order="lazy")
        word = ErrorWord(torch.zeros(1, dtype=torch.int32))
        backend = RuleBackend(package.module, word, 132, lambda: 0, uses_native(PACKAGE, architecture))
        with package, poisoned_allocations():
            return run(rule_through("cake_gdn", backend), case)

    return get


def _gates_beyond_fp32():
    """Two heads whose exp(A_log) is infinite in FP32, with raw gates that undo it; one whose raw gates are infinite."""
    case = base(70, 1, 3)
    g = case.g + torch.tensor([-102.0, -87.0, 3e38])
    g[:, 5::9, :2], g[:, 3::7, 2], g[:, 40, 0] = -200.0, -3e38, 1e30
    return case.with_(
        g=g,
        options={
            "use_gate_in_kernel": True,
            "A_log": torch.tensor([100.0, 89.0, 88.0]),
            "dt_bias": torch.tensor([0.0, -3.0, 3e38]),
        },
    )


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_gates_beyond_fp32(run_in, architecture):
    """Results are float64's where exp(A_log) or the product with softplus has no FP32 value."""
    case = _gates_beyond_fp32()
    results = run_in(architecture, case)
    assert_accurate(results, case, LIMIT)
    for head in (0, 1):
        assert float(results["dA_log"][head].abs()) > 0, f"nothing was seen of head {head}"


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_rows_whose_sum_of_squares_has_no_fp32_value(run_in, architecture):
    """Rows that overflow, and rows that underflow, are brought to unit norm as float64 does; so are their gradients."""
    case = base(70, 1, 2)
    sizes = torch.ones(70)
    sizes[1::5], sizes[2::5], sizes[3::5] = 1e21, 1e30, 1e-25
    sizes[64] = 3e38
    rows = sizes[None, :, None, None]
    q, k = ((x.float() * rows).to(x.dtype) for x in (case.q, case.k))
    case = case.with_(q=q, k=k, options={"use_qk_l2norm_in_kernel": True})
    results, expected = run_in(architecture, case), reference(case)
    assert_accurate(results, case, LIMIT)
    for name in ("o", "dq", "dk"):
        for size in (1.0, 1e21, 1e30, 1e-25):
            right, actual = (x[name].double()[:, sizes == size] for x in (expected, results))
            error = float((actual - right).norm() / right.norm())
            assert error <= 2 * LIMIT, f"{name} of rows of {size}: {error:.2e}"


def _keys_of_norms(sizes):
    """Three value heads of one key head whose keys have those norms [130], with beta |k|^2 up to 1.5."""
    case = base(130, 1, 3)
    k = (case.k.float() * sizes[None, :, None, None]).to(case.k.dtype)
    return case.with_(k=k, beta=1.5 * case.beta / k.float().square().sum(-1))


def _mixed_norms(powers):
    exponents = torch.randint(-powers, powers + 1, (130,), generator=generator(11))
    sizes = 2.0 ** exponents.float()
    sizes[7::40] = 0.0  # such a key neither writes nor reads
    return sizes


@pytest.mark.parametrize("powers", [6, 20, 40, None])
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_keys_of_any_norm(run_in, architecture, powers):
    """Results are float64's where beta |k|^2 is bounded: norms of 2^-powers to 2^powers in a chunk, or all of 10^4."""
    case = _keys_of_norms(torch.full((130,), 1e4) if powers is None else _mixed_norms(powers))
    case = case.with_(beta=torch.where(case.beta.isfinite(), case.beta, 1.0))
    assert_accurate(run_in(architecture, case), case, 1.5 * LIMIT)


@pytest.mark.parametrize("decay", [-10.0, -15.0, -20.0])
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_what_a_nearly_closed_gate_lets_through(run_in, architecture, decay):
    """A state 10^6 times as large as what follows is seen behind a gate of e^-10 to e^-20."""
    case = base(66, 1, 1, gate="G0")
    case.g[:, 33] = decay
    h0, _ = states(case, 1)
    case = case.with_(initial_state=1e6 * h0)
    results, expected = run_in(architecture, case), reference(case)
    for key, part in (("o", slice(33, None)), ("dq", slice(33, None))):
        actual, right = results[key][:, part].double(), expected[key][:, part]
        error = float((actual - right).norm() / right.norm())
        assert error <= LIMIT, f"{key} behind the gate: {error:.2e}"


@pytest.mark.parametrize(("beta", "decay"), [(1.0, 0.0), (1.0, -0.001), (0.99966, -0.001), (0.998, 0.0), (0.99, -0.1)])
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_one_key_for_every_token(run_in, architecture, beta, decay):
    """What T loses is not summed over the tokens that meet one key: o as in *Notes on T in BF16*."""
    case = base(256, 1, 1)
    k = case.k[:, :1].expand_as(case.k).contiguous()
    case = case.with_(k=k, g=torch.full_like(case.g, decay), beta=torch.full_like(case.beta, beta))
    actual, right = run_in(architecture, case)["o"].double(), reference(case)["o"]
    error = float((actual - right).norm() / right.norm())
    assert error <= (9e-3 if decay == -0.1 else 2.5e-2), f"{error:.2e}"
