"""The portable programs on a GPU whose records name native ones: they are what other architectures run."""

import pytest
import torch

from cake_gdn_det_train import chunk_gated_delta_rule, cuda
from cake_shared.testing import assert_bitwise_equal, poisoned_allocations
from cake_shared.testing.gdn_cuda import check_accurate, moved, on_cpu, portable_backend, rule_through
from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.testing.gdn_run import run

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def portable():
    """The backend of the portable programs, and the rule through it."""
    backend = portable_backend(cuda.PACKAGE)
    return backend, rule_through(cuda.PACKAGE, backend)


def _pack(gate="Gmild"):
    case = packed(base(335, 2, 4, gate=gate), (70, 0, 65, 195))
    h0, ds = states(case, 4)
    return case.with_(initial_state=h0, d_state=ds)


@pytest.mark.parametrize("gate", ["G0", "Gmild", "Gqwen", "Gtiny"])
def test_results_are_float64s(portable, gate):
    """Every result on its own, as the emulator's tests hold them on other architectures."""
    with poisoned_allocations():
        check_accurate(portable[1], _pack(gate), "cuda", accuracy=6e-3)


def test_bits_depend_on_neither_run_nor_width_of_the_chains(portable):
    """The same call again, and with chains of eight warps, has the same bits."""
    backend, rule = portable
    case, usual = moved(_pack(), "cuda"), backend.multiprocessors
    first = on_cpu(run(rule, case))
    try:
        for backend.multiprocessors in (usual, 1):
            for name, value in on_cpu(run(rule, case)).items():
                if value is not None:
                    assert_bitwise_equal(value, first[name], name)
    finally:
        backend.multiprocessors = usual


def test_the_programs_are_the_portable_ones(portable):
    """Native programs, which round elsewhere, have other bits: else this module compared them with themselves."""
    if not cuda.rule_backend(torch.device("cuda")).native:
        pytest.skip("the records of this architecture name portable programs alone")
    case = moved(base(200, 1, 2), "cuda")
    ours, native = (run(x, case)["dk"] for x in (portable[1], chunk_gated_delta_rule))
    assert not torch.equal(ours, native)
