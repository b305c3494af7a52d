"""The public function on a group of one rank, in this process: arguments, equality with the single-rank function."""

import contextlib

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import cake_gdn_train
from cake_gdn_train_kcp import chunk_gated_delta_rule, plan_shards
from cake_shared.errors import UnsupportedArchError
from cake_shared.testing import assert_bitwise_equal, deterministic_fill
from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.testing.gdn_run import run
from cake_shared.testing.gdn_suite.arguments import BAD, HV, K, T, V, check_bad, good, offsets, zeros


@pytest.fixture(scope="module")
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def case_with_states():
    case = packed(base(140, 2, 4, K=32, V=48), (60, 0, 80))
    h0, ds = states(case, 3)
    return case.with_(initial_state=h0, d_state=ds)


@pytest.mark.parametrize("grouped", [False, True], ids=("group=None", "a group of one"))
def test_one_rank_is_the_single_rank_function(world, grouped):
    case = case_with_states()
    keywords = {"group": world} if grouped else {}
    results, expected = run(chunk_gated_delta_rule, case, **keywords), run(cake_gdn_train.chunk_gated_delta_rule, case)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def test_a_batch_without_group(world):
    case = base(70, 2, 4, K=32, V=48, B=3)
    results, expected = run(chunk_gated_delta_rule, case), run(cake_gdn_train.chunk_gated_delta_rule, case)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def test_shards_given_or_planned_are_the_same(world):
    case = case_with_states()
    shards = plan_shards(case.cu_seqlens, 1)
    results = run(chunk_gated_delta_rule, case, group=world, shards=list(shards))
    expected = run(chunk_gated_delta_rule, case, group=world)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def test_deterministic_algorithms_are_accepted(world):
    case = case_with_states()
    expected = run(chunk_gated_delta_rule, case, group=world)
    with deterministic_fill():
        results = run(chunk_gated_delta_rule, case, group=world)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


@pytest.mark.parametrize("around", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), lambda: torch.device("meta")])
def test_global_state_moves_no_bit(world, around):
    case = case_with_states()
    expected = run(chunk_gated_delta_rule, case, group=world)
    with around():
        results = run(chunk_gated_delta_rule, case, group=world)
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


FLAGS = (0.25, True, True, True, False, False)


def op_tensors(case):
    parameters = torch.linspace(-1, 1, 4), torch.linspace(0, 1, 4)
    return [case.q, case.k, case.v, case.g, case.beta, case.initial_state, *parameters]


def test_opcheck_of_the_forward_operator(world):
    case = case_with_states()
    tensors = [x.clone().requires_grad_() for x in op_tensors(case)]
    op = torch.ops.cake_gdn_train_kcp.chunk_gated_delta_rule_fwd.default
    where = (case.cu_seqlens, None, world.group_name)
    torch.library.opcheck(op, (*tensors, *where, *FLAGS, False, True))
    # The number of states is in the offsets' values: their fake shape is free, which opcheck has no way to compare.
    tests = ("test_schema", "test_autograd_registration")
    torch.library.opcheck(op, (*tensors, *where, *FLAGS, True, True), test_utils=tests)


def test_opcheck_of_the_backward_operator(world):
    case = case_with_states()
    ops = torch.ops.cake_gdn_train_kcp
    where = (case.cu_seqlens, [], world.group_name)
    _, _, *tape = ops.chunk_gated_delta_rule_fwd(*op_tensors(case), *where, *FLAGS, False, True)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    for needs in ([True] * 8, [i == 1 for i in range(8)]):
        arguments = (case.do, case.d_state, *op_tensors(case), *where, *tape, *FLAGS, needs)
        torch.library.opcheck(ops.chunk_gated_delta_rule_bwd.default, arguments, test_utils=tests)


@pytest.mark.parametrize("watched", [False, True], ids=("eager", "under a dispatch mode"))
def test_a_gradient_penalty_raises(world, watched):
    case = case_with_states()
    k = case.k.float().requires_grad_()
    with FlopCounterMode(display=False) if watched else contextlib.nullcontext():
        o, _ = chunk_gated_delta_rule(
            case.q.float(), k, case.v.float(), case.g, case.beta, cu_seqlens=case.cu_seqlens, group=world
        )
        (dk,) = torch.autograd.grad(o.sum(), k, create_graph=True)
        # The plain term keeps the sum differentiable: a constant gradient would pass unnoticed.
        with pytest.raises(RuntimeError, match="no double backward"):
            (dk.square().sum() + o.sum()).backward()


# What is about offsets means the whole pack here: rows of their own below.
SHARED = {name: row for name, row in BAD.items() if "offsets" not in name and "by sequence" not in name}


@pytest.mark.parametrize("grouped", [False, True], ids=("group=None", "a group of one"))
@pytest.mark.parametrize("row", SHARED)
def test_bad_argument_of_the_rule(world, row, grouped):
    changes, kind, name, got = BAD[row]
    where = {"group": world, "cu_seqlens": offsets(0, T)} if grouped else {}
    check_bad(chunk_gated_delta_rule, good(**where, **changes), kind, name, got)


ONE = plan_shards([0, T], 1)
TWO = plan_shards([0, T], 2)
BAD_PLACES = {
    "group is a string": ({"group": "world"}, TypeError, "group", "str"),
    "group is a number": ({"group": 4}, TypeError, "group", "int"),
    "shards without group": ({"group": None, "shards": ONE}, ValueError, "shards", "tuple without group"),
    "no shards": ({"shards": ()}, ValueError, "shards", "got none"),
    "shards are numbers": ({"shards": (1,)}, TypeError, "shards", "tuple"),
    "shards are one shard": ({"shards": ONE[0]}, TypeError, "shards", "Shard"),
    "shards of another size": ({"shards": TWO}, ValueError, "shards", "2 of them"),
    "shards out of order": ({"shards": TWO[::-1]}, ValueError, "shards", r"\[1, 0\]"),
    "shards of another length": ({"shards": plan_shards([0, 30, 60], 1)}, ValueError, "shards", "tokens 0 to 60"),
    "shards of other sequences": ({"shards": plan_shards([0, 30, T], 1)}, ValueError, "shards", "other sequences"),
    "no offsets": ({"cu_seqlens": None}, ValueError, "cu_seqlens", "None"),
    "offsets are a list": ({"cu_seqlens": [0, T]}, TypeError, "cu_seqlens", "list"),
    "offsets are floats": ({"cu_seqlens": offsets(0, T, dtype=torch.float32)}, TypeError, "cu_seqlens", "float32"),
    "offsets in two dims": ({"cu_seqlens": offsets(0, T)[None]}, ValueError, "cu_seqlens", r"\[1, 2\]"),
    "offsets decrease": ({"cu_seqlens": offsets(0, 40, 30, T)}, ValueError, "cu_seqlens", "30"),
    "offsets not from zero": ({"cu_seqlens": offsets(2, T)}, ValueError, "cu_seqlens", "2"),
    "offsets elsewhere": ({"cu_seqlens": offsets(0, T).to("meta")}, ValueError, "cu_seqlens", "meta"),
    "too few tokens": ({"cu_seqlens": offsets(0, T + 1)}, ValueError, "q", "70"),
    "states of the whole pack": (
        {"cu_seqlens": offsets(0, 30, T), "initial_state": zeros(3, HV, K, V)},
        ValueError,
        "initial_state",
        "3",
    ),
    "another backend": ({"backend": "cuda"}, UnsupportedArchError, "backend", "cuda"),
    "a flag is text": ({"output_final_state": "False"}, TypeError, "output_final_state", "str"),
}


@pytest.mark.parametrize("row", BAD_PLACES)
def test_bad_argument_of_the_sharding(world, row):
    changes, kind, name, got = BAD_PLACES[row]
    check_bad(chunk_gated_delta_rule, good(**{"group": world, "cu_seqlens": offsets(0, T), **changes}), kind, name, got)


def test_a_batch_with_a_group(world):
    batch = {name: torch.cat([x, x]) for name, x in good().items()}
    where = {"group": world, "cu_seqlens": offsets(0, T)}
    check_bad(chunk_gated_delta_rule, {**batch, **where}, ValueError, "cu_seqlens", "2")
