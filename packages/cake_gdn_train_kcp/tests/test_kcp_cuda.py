"""The sharded rule on a GPU: the exchange in one process, with threads for ranks, and over NCCL on two GPUs."""

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cake_gdn_train
import cake_gdn_train_kcp
from cake_gdn_train_kcp import plan_shards, sharded
from cake_shared.gdn.options import Options
from cake_shared.testing import assert_bitwise_equal
from cake_shared.testing.gdn_cuda import gate_gradient_scale, moved, on_cpu
from cake_shared.testing.gdn_inputs import base, packed
from cake_shared.testing.gdn_reference import widened
from cake_shared.testing.gdn_run import run

pytestmark = pytest.mark.gpu

TOKEN_RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta")

# Products have BF16 operands; a rank's boundary states are FP32.
LIMIT = 6e-3

# gate_gradient_scale holds a sequence's pairs of tokens at once.
DENSE_TOKENS = 2048

CASES = {
    "inside a chunk": ((300,), (101,)),
    "two sequences": ((70, 230), (150,)),
    "beside empty sequences": ((0, 130, 0, 70), (100,)),
    "three ranks of one sequence": ((300,), (64, 190)),
    "four ranks, ragged": ((40, 330, 10), (60, 61, 300)),
    "an empty rank inside": ((250,), (50, 50, 200)),
    "segments": ((9000, 4000), (8500,)),
}
# Over NCCL: what takes float64 no time.
TWO_RANKS = {name: case for name, case in CASES.items() if len(case[1]) == 1 and sum(case[0]) < 1000}
OPTIONS = {
    "use_qk_l2norm_in_kernel": True,
    "use_gate_in_kernel": True,
    "A_log": torch.tensor([-1.0, -0.3, 0.3, 1.0]),
    "dt_bias": torch.linspace(0.0, 1.0, 4),
    "use_beta_sigmoid_in_kernel": True,
}


class Ranks:
    """Threads that stand for ranks: their exchange is a list in this process, in rank order."""

    def __init__(self, world_size):
        self.pairs = [None] * world_size
        self.barrier = threading.Barrier(world_size, timeout=120)
        self.here = threading.local()

    def gather(self, pair, group):
        torch.cuda.current_stream().synchronize()
        self.pairs[self.here.rank] = pair
        self.barrier.wait()
        gathered = torch.stack(self.pairs)
        torch.cuda.current_stream().synchronize()
        self.barrier.wait()
        return gathered

    def run(self, function):
        """`function(rank)` of every rank, at once; returns their results."""
        results, errors = [None] * len(self.pairs), []

        def body(rank):
            self.here.rank = rank
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=body, args=(rank,)) for rank in range(len(self.pairs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return results


def sharded_results(case, cuts, monkeypatch):
    """Token results of all ranks in a row, from the two passes of each rank."""
    shards = plan_shards(case.cu_seqlens, len(cuts) + 1, cuts=cuts)
    ranks = Ranks(len(shards))
    monkeypatch.setattr(sharded, "gather_pairs", ranks.gather)
    per_head = {name: case.options.get(name) for name in ("A_log", "dt_bias")}
    options = Options(
        case.scale if case.scale is not None else case.q.shape[-1] ** -0.5,
        case.options.get("use_qk_l2norm_in_kernel", False),
        case.options.get("use_gate_in_kernel", False),
        case.options.get("use_beta_sigmoid_in_kernel", False),
    )
    on_gpu = moved(case, "cuda")

    def body(rank):
        from cake_shared.gdn.options import Inputs

        shard = shards[rank]
        place = sharded.Place(None, shards, rank)
        own = on_gpu.tokens(shard.start, shard.stop)
        inputs = Inputs(
            own.k, own.g, own.beta, own.q, own.v, None, *(None if x is None else x.cuda() for x in per_head.values()),
            place.local_offsets(),
        )  # fmt: skip
        needs = cake_gdn_train.Needs(True, True, True, True, True, False, False, False)
        o, _, tape = sharded.forward(inputs, options, place, False, True)
        grads = sharded.backward(inputs, options, place, own.do, None, tape, needs)
        torch.cuda.current_stream().synchronize()
        return (o, *grads[:5])

    results = ranks.run(body)
    return {name: torch.cat([rank[i] for rank in results], 1).cpu() for i, name in enumerate(TOKEN_RESULTS)}


def assert_near_float64(results, case):
    expected = run(cake_gdn_train.chunk_gated_delta_rule, widened(case), output_final_state=False)
    faults = []
    for name in TOKEN_RESULTS:
        size = float(expected[name].norm())
        if name == "dg" and not case.options and case.g.shape[1] <= DENSE_TOKENS:
            size = gate_gradient_scale(case, expected)
        error = float((results[name].double() - expected[name]).norm())
        if not error <= LIMIT * size:
            faults.append(f"{name}: {error / size:.2e}")
    assert not faults, "; ".join(faults)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gate", ["Gmild", "G0"])
def test_ranks_together_are_float64s(monkeypatch, name, gate):
    lengths, cuts = CASES[name]
    case = packed(base(sum(lengths), 2, 4, gate=gate), lengths)
    assert_near_float64(sharded_results(case, cuts, monkeypatch), case)


def test_options(monkeypatch):
    case = packed(base(300, 2, 4), (300,))
    raw = torch.randn(2, *case.g.shape, generator=torch.Generator().manual_seed(5))
    case = case.with_(g=raw[0], beta=raw[1], options=OPTIONS)
    assert_near_float64(sharded_results(case, (64, 190), monkeypatch), case)


def test_one_rank_is_the_single_rank_rule():
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
    try:
        case = packed(base(200, 2, 4), (70, 130))
        on_gpu = moved(case, "cuda").with_(cu_seqlens=case.cu_seqlens)

        def rule(*arguments, **keywords):
            return cake_gdn_train_kcp.chunk_gated_delta_rule(*arguments, group=dist.group.WORLD, **keywords)

        results, expected = on_cpu(run(rule, on_gpu)), on_cpu(run(cake_gdn_train.chunk_gated_delta_rule, on_gpu))
        for name in (*TOKEN_RESULTS, "final_state"):
            assert_bitwise_equal(results[name], expected[name], name)
        narrow = moved(base(20, 1, 1, K=64, V=64), "cuda").with_(cu_seqlens=torch.tensor([0, 20]))
        with pytest.raises(ValueError, match="q: got K = 64, takes K = 128 on CUDA"):
            run(rule, narrow, wrt=[])
    finally:
        dist.destroy_process_group()


def test_a_group_of_gloo_is_refused():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        case = packed(base(200, 2, 4), (200,))
        on_gpu = moved(case, "cuda").with_(cu_seqlens=case.cu_seqlens)
        with pytest.raises(ValueError, match=r"group: got one with gloo for tensors on cuda:\d, takes one with nccl"):
            cake_gdn_train_kcp.chunk_gated_delta_rule(
                on_gpu.q, on_gpu.k, on_gpu.v, on_gpu.g, on_gpu.beta, cu_seqlens=case.cu_seqlens, group=dist.group.WORLD
            )
    finally:
        dist.destroy_process_group()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_over_nccl(tmp_path):
    """Every result of two ranks against float64 and the single rank, from passes that never wait for the device."""
    worker = Path(__file__).with_name("kcp_cuda_worker.py")
    processes = [
        subprocess.Popen([sys.executable, str(worker), str(rank), "2", str(tmp_path / "init"), str(tmp_path)])
        for rank in range(2)
    ]
    try:
        codes = [process.wait(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert codes == [0, 0]
    spoken = [torch.load(tmp_path / f"results_{rank}.pt") for rank in range(2)]
    for name, (lengths, _) in TWO_RANKS.items():
        case = packed(base(sum(lengths), 2, 4), lengths)
        together = {x: torch.cat([ranks[name][x] for ranks in spoken], 1) for x in TOKEN_RESULTS}
        assert_near_float64(together, case)
        alone = on_cpu(run(cake_gdn_train.chunk_gated_delta_rule, moved(case, "cuda"), output_final_state=False))
        for x in TOKEN_RESULTS:
            error = float((together[x].double() - alone[x].double()).norm() / alone[x].double().norm())
            assert error <= LIMIT, f"{name}, {x}: {error:.2e} from the single rank"
