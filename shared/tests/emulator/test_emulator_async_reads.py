"""What asynchronous operations read of shared memory is theirs until the wait that covers them, in every order."""

import functools
import pathlib

import numpy as np
import pytest

from cake_shared.emulator import MissingProxyFence, Module, Options, SharedRace, tensor_map

KERNELS = pathlib.Path(__file__).parent / "kernels"
ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3)]
DRAINS = {
    1: "the issuer overwrites the source without a wait",
    2: "waits for one group too few",
    3: "another thread waits",
    4: "others overwrite the source behind a barrier, before the wait",
    5: "the wait reaches nobody else",
}


@functools.cache
def module() -> Module:
    return Module.from_cuda(str(KERNELS / "drain_mutants.cu"), target="sm_90a")


def run(kernel: str, variant: int, order: tuple[str, int]) -> tuple[np.ndarray, np.ndarray]:
    """Launch a variant; return what it wrote and what the right one writes."""
    out = np.zeros(128 if kernel == "exchange" else 256, np.uint32)
    exchange = kernel == "exchange"
    module().launch(
        f"{kernel}_{variant}",
        grid=2 if exchange else 1,
        block=64 if exchange else 128,
        cluster=(2, 1, 1) if exchange else (1, 1, 1),
        params=[tensor_map(out, (128,), dtype="u32"), out] if kernel == "tensor" else [out],
        options=Options(order=order[0], seed=order[1]),
    )
    want = np.arange(out.size, dtype=np.uint32)
    return out, np.roll(want, 64) if exchange else want + 5


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("kernel", ["copy", "reduction", "tensor", "exchange"])
def test_a_source_may_be_reused_after_its_wait(kernel, order):
    np.testing.assert_array_equal(*run(kernel, 0, order))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("variant", DRAINS, ids=DRAINS.get)
@pytest.mark.parametrize("kernel", ["copy", "reduction", "tensor"])
def test_a_source_that_is_overwritten_early_is_a_race(kernel, variant, order):
    with pytest.raises(SharedRace) as caught:
        run(kernel, variant, order)
    assert "drain_mutants.cu" in str(caught.value)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("variant", [1, 2])
def test_a_source_that_leaves_for_a_neighbour_is_kept_until_it_has_arrived(variant, order):
    with pytest.raises(SharedRace):
        run("exchange", variant, order)


@pytest.mark.parametrize("order", ORDERS, ids=str)
def test_a_copy_of_what_the_kernel_stored_to_global_memory_needs_a_proxy_fence(order):
    out = np.zeros(128, np.uint32)
    options = Options(order=order[0], seed=order[1])
    module().launch("refetch_0", 1, 128, [out], options=options)
    assert out.tolist() == list(range(128, 0, -1))
    for mutant in (1, 2):
        with pytest.raises(MissingProxyFence, match="stored at line"):
            module().launch(f"refetch_{mutant}", 1, 128, [out], options=options)
