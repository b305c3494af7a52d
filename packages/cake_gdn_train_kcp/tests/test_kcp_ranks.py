import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cake_gdn_train
from cake_gdn_train_kcp import plan_shards
from cake_shared.gdn.oracle import ref_chunk_gated_delta_rule
from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.gdn_reference import assert_near_in_fp32
from cake_shared.testing.gdn_run import run

WORKER = Path(__file__).with_name("kcp_worker.py")
spec = importlib.util.spec_from_file_location("kcp_worker", WORKER)
worker = importlib.util.module_from_spec(spec)
sys.modules["kcp_worker"] = worker
spec.loader.exec_module(worker)

EVERY = [pytest.param(w, name, id=f"{w} ranks, {name}") for w, found in worker.SCENARIOS.items() for name in found]
TOKEN_RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta")


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Results of every scenario on every rank: `ranks(world_size, name)` is a list by rank."""

    @functools.cache
    def folder_of(world_size):
        folder = tmp_path_factory.mktemp(f"kcp{world_size}")
        command = [sys.executable, str(WORKER)]
        processes = [
            subprocess.Popen([*command, str(rank), str(world_size), str(folder / "init"), str(folder)])
            for rank in range(world_size)
        ]
        try:
            codes = [process.wait(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
        assert codes == [0] * world_size
        return folder

    def results(world_size, name):
        folder = folder_of(world_size)
        return [torch.load(folder / f"{name}_{rank}.pt", weights_only=False) for rank in range(world_size)]

    return results


@functools.cache
def expected(world_size, name):
    """Float64 results of each rank: the recurrence run piece by piece, each from the state that the one before left."""
    scenario = worker.SCENARIOS[world_size][name]
    case = worker.global_case(scenario)
    shards = plan_shards(case.cu_seqlens, world_size, cuts=scenario.cuts)
    leaves = {n: getattr(case, n).double().requires_grad_() for n in ("q", "k", "v", "g", "beta")}
    per_head = {n: scenario.options[n].double().requires_grad_() for n in ("A_log", "dt_bias") if n in scenario.options}
    options = {**scenario.options, **per_head}
    loss, per_rank, carried = torch.zeros((), dtype=torch.float64), [], None
    for shard in shards:
        initial, gradient = worker.local_states(scenario, shard)
        initial = None if initial is None else initial.double().requires_grad_()
        outputs, finals = [leaves["v"][:, :0]], []
        for n in range(shard.sequences):
            a, b = (shard.start + x for x in shard.cu_seqlens[n : n + 2])
            state = None if initial is None else initial[n : n + 1]
            if n == 0 and shard.continues_from_previous:
                state = carried
            tensors = (leaves[x][:, a:b] for x in ("q", "k", "v", "g", "beta"))
            o, final = ref_chunk_gated_delta_rule(
                *tensors, case.scale, initial_state=state, output_final_state=True, **options
            )
            carried = final
            outputs.append(o)
            finals.append(final)
            if "o" in scenario.losses:
                loss = loss + (o * case.do[:, a:b].double()).sum()
            if gradient is not None:
                loss = loss + (final[0] * gradient[n].double()).sum()
        state = torch.cat(finals) if finals else torch.zeros(0, dtype=torch.float64)
        per_rank.append({"o": torch.cat(outputs, 1).detach(), "final_state": state.detach(), "leaf": initial})
    if loss.requires_grad:
        loss.backward()
    zeros = {n: torch.zeros_like(x) if x.grad is None else x.grad for n, x in {**leaves, **per_head}.items()}
    for shard, results in zip(shards, per_rank):
        for n in leaves:
            results["d" + n] = zeros[n][:, shard.start : shard.stop]
        leaf = results.pop("leaf")
        results["d_initial_state"] = (
            leaf if leaf is None else torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        )
    return shards, per_rank, {"d" + n: zeros[n] for n in per_head}


def limit(name, dtype):
    if dtype == torch.bfloat16:
        return 4e-3
    return 1e-13 if dtype == torch.float64 and name not in ("dg", "dbeta") else 1e-5


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_every_rank_agrees_with_float64(ranks, world_size, name):
    shards, right, _ = expected(world_size, name)
    for shard, got, reference in zip(shards, ranks(world_size, name), right):
        results = got["results"]
        for result in TOKEN_RESULTS:
            actual = results[result][:, : shard.tokens]
            assert_near_in_fp32(
                actual, reference[result], limit(result, actual.dtype), f"{result} of rank {shard.rank}"
            )
            assert not bool(results[result][:, shard.tokens :].any()), f"rows of {result} behind the shard"
        for result in ("final_state", "d_initial_state"):
            actual, wanted = results[result], reference[result]
            assert (actual is None) == (wanted is None), result
            if actual is not None and shard.sequences:
                assert_near_in_fp32(actual, wanted, limit(result, actual.dtype), f"{result} of rank {shard.rank}")


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_an_unused_row_has_a_zero_gradient(ranks, world_size, name):
    for shard, got in zip(expected(world_size, name)[0], ranks(world_size, name)):
        gradient = got["results"]["d_initial_state"]
        if gradient is not None and shard.continues_from_previous:
            assert not bool(gradient[0].any())


@pytest.mark.parametrize("world_size", [2, 4])
def test_parameter_gradients_add_up_over_ranks(ranks, world_size):
    _, _, whole = expected(world_size, "all options")
    for name, wanted in whole.items():
        parts = [got["results"][name].double() for got in ranks(world_size, "all options")]
        assert_near_in_fp32(sum(parts), wanted, 1e-5, name)
        assert all(bool(part.any()) for part in parts), "each rank holds tokens, so each has a part"


@pytest.mark.parametrize(("world_size", "name"), EVERY)
def test_only_pairs_of_fixed_size_travel(ranks, world_size, name):
    shards = expected(world_size, name)[0]
    pair = ("all_gather", 4 * 16 * (16 + 24))
    calls = [pair, pair] if any(shard.continues_to_next for shard in shards) else []
    for got in ranks(world_size, name):
        assert got["calls"] == calls


@pytest.mark.parametrize(("world_size", "name"), [(2, "loss of o alone"), (4, "over all ranks, ragged")])
def test_ranks_together_are_the_single_rank(ranks, world_size, name):
    """Outputs of all ranks in a row are those of one process that has the whole pack."""
    scenario = worker.SCENARIOS[world_size][name]
    case = worker.global_case(scenario)
    first = worker.local_states(scenario, plan_shards(case.cu_seqlens, world_size, cuts=scenario.cuts)[0])[0]
    h0 = torch.zeros(len(scenario.lengths), 4, 16, 24)
    h0[0] = first[0]
    if len(scenario.lengths) > 1:
        h0[1] = worker.local_states(scenario, plan_shards(case.cu_seqlens, world_size, cuts=scenario.cuts)[1])[0][1]
    whole = run(cake_gdn_train.chunk_gated_delta_rule, case.with_(initial_state=h0))
    together = torch.cat([got["results"]["o"] for got in ranks(world_size, name)], 1)
    assert_near_in_fp32(together, whole["o"].double(), 4e-6, "o")
    if "state" not in scenario.losses:
        for result in ("dq", "dk", "dv", "dg", "dbeta"):
            together = torch.cat([got["results"][result] for got in ranks(world_size, name)], 1)
            assert_near_in_fp32(together, whole[result].double(), 1e-5, result)


def test_the_compiled_rule_has_the_bits_of_the_eager_one(ranks):
    """One graph without a break, at most one recompilation over four packs, shards given or not."""
    for runs in ranks(2, "compiled"):
        assert len(runs) == 2 * len(worker.PACKS)
        for results, eager, _ in runs:
            for name, value in eager.items():
                assert_bitwise_equal(results[name], value, name)
        planned, given = (runs[half * len(worker.PACKS) :][: len(worker.PACKS)] for half in (0, 1))
        assert planned[-1][2] <= 2
        assert given[-1][2] <= 2
