import subprocess
import sys

import pytest
import torch

from cake_shared.testing import deterministic_fill, leave_nan_blocks, poison_, poisoned_allocations

ALLOCATIONS = {
    "empty": lambda x: torch.empty(3, 2),
    "empty_bf16": lambda x: torch.empty((4,), dtype=torch.bfloat16),
    "empty_grad": lambda x: torch.empty(3, requires_grad=True),
    "empty_like": lambda x: torch.empty_like(x),
    "empty_strided": lambda x: torch.empty_strided((2, 3), (6, 2)),
    "empty_permuted": lambda x: torch.empty_permuted((2, 3), (1, 0)),
    "new_empty": lambda x: x.new_empty((2, 2)),
    "new_empty_strided": lambda x: x.new_empty_strided((2, 2), (1, 2)),
}


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_every_allocation_is_nan_in_every_test(name):
    assert bool(torch.isnan(ALLOCATIONS[name](torch.zeros(2, 3))).all())


@pytest.mark.parametrize("name", ALLOCATIONS)
def test_deterministic_fill_reaches_the_same_allocations(name):
    with deterministic_fill():
        assert torch.are_deterministic_algorithms_enabled()
        assert bool(torch.isnan(ALLOCATIONS[name](torch.zeros(2, 3))).all())
    assert not torch.are_deterministic_algorithms_enabled()


def test_integers_and_booleans_hold_their_largest_value():
    assert torch.empty(2, dtype=torch.int32).tolist() == [2**31 - 1] * 2
    assert torch.empty(2, dtype=torch.int64).tolist() == [2**63 - 1] * 2
    assert torch.empty(2, dtype=torch.bool).tolist() == [True, True]


def test_resize_keeps_the_old_part_and_poisons_the_new_one():
    x = torch.ones(3).resize_(5)
    assert x[:3].tolist() == [1.0] * 3
    assert bool(torch.isnan(x[3:]).all())


def test_out_argument_is_not_overwritten():
    out = torch.ones(3)
    torch.empty(3, out=out)
    assert out.tolist() == [1.0] * 3


def test_nesting_ends_with_the_outermost_level():
    poisoned = torch.empty, torch.Tensor.new_empty
    with poisoned_allocations():
        assert (torch.empty, torch.Tensor.new_empty) == poisoned
    assert (torch.empty, torch.Tensor.new_empty) == poisoned


def test_outside_everything_is_as_torch_made_it():
    code = (
        "import torch; before = torch.empty, torch.Tensor.new_empty\n"
        "from cake_shared.testing import poisoned_allocations\n"
        "with poisoned_allocations(): assert torch.empty is not before[0]\n"
        "assert (torch.empty, torch.Tensor.new_empty) == before and 'new_empty' not in vars(torch.Tensor)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_poison_survives_compilation():
    @torch.compile(backend="aot_eager", fullgraph=True)
    def unwritten(x):
        return torch.empty(3) + x, x.new_empty(3) + x

    for result in unwritten(torch.zeros(3)):
        assert bool(torch.isnan(result).all())


def test_poison_in_place_and_freed_blocks():
    x = torch.zeros(3, requires_grad=True)
    assert bool(torch.isnan(poison_(x)).all())
    assert x.grad_fn is None
    leave_nan_blocks([(3, 4), (128,)])
