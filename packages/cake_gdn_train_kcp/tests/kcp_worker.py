"""One rank of the tests' process groups, and the scenarios that they run; started by the tests as a script.

`python kcp_worker.py RANK WORLD_SIZE INIT_FILE FOLDER` runs every scenario of that world size and leaves its results in
`FOLDER/<scenario>_<rank>.pt`.
"""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend

import cake_gdn_train_kcp
from cake_shared.testing import poisoned_allocations
from cake_shared.testing.gdn_inputs import base, generator, packed
from cake_shared.testing.gdn_run import run

GATE = {"use_gate_in_kernel": True, "A_log": torch.linspace(-1.0, 1.0, 4), "dt_bias": torch.linspace(0.0, 1.0, 4)}
EVERYTHING = {
    **GATE,
    "use_qk_l2norm_in_kernel": True,
    "use_beta_sigmoid_in_kernel": True,
    "allow_neg_eigval": True,
    "state_v_first": True,
}


@dataclass(frozen=True)
class Scenario:
    """A pack, its cuts (None: planned), and what the call asks for."""

    lengths: tuple
    cuts: tuple | None
    dtype: torch.dtype = torch.float32
    options: dict = field(default_factory=dict)
    with_states: bool = True
    losses: tuple = ("o", "state")
    rest: int = 0
    gate: str = "Gmild"


def random_scenario(seed, world_size):
    """A seeded pack of a few ragged sequences, with cuts anywhere."""
    rng = random.Random(seed)
    lengths = tuple(rng.choice((0, 1, 5, 40, 63, 64, 65, 130)) for _ in range(rng.randint(1, 5)))
    cuts = tuple(sorted(rng.randint(0, sum(lengths)) for _ in range(world_size - 1)))
    return Scenario(lengths, cuts, gate=rng.choice(("Gmild", "G0", "Gqwen")))


SCENARIOS = {
    2: {
        "inside a chunk": Scenario((300,), (101,)),
        "at a chunk border": Scenario((300,), (128,)),
        "at a sequence border": Scenario((100, 200), (100,)),
        "beside empty sequences": Scenario((30, 0, 50, 0, 0, 70), (80,)),
        "among empty sequences": Scenario((0, 30, 0, 50, 0, 70, 0), (60,)),
        "nothing on the first rank": Scenario((100, 20), (0,)),
        "nothing on the last rank": Scenario((100, 20, 0), (120,)),
        "no token at all": Scenario((0, 0), (0,)),
        "planned": Scenario((70, 200, 30), None),
        "one token each": Scenario((2,), (1,)),
        "bf16": Scenario((40, 150, 30), (100,), torch.bfloat16),
        "float64": Scenario((40, 100), (70,), torch.float64),
        "all options": Scenario((40, 150, 30), (101,), options=EVERYTHING),
        "gate without states": Scenario((40, 150, 30), (101,), options=GATE, with_states=False),
        "loss of o alone": Scenario((200, 30), (101,), losses=("o",)),
        "loss of states alone": Scenario((200, 30), (101,), losses=("state",)),
        "rows behind the shard": Scenario((200, 30), (101,), rest=9),
        "strong gates": Scenario((200,), (101,), gate="Gqwen"),
    },
    4: {
        "over all ranks": Scenario((300,), (64, 128, 192)),
        "over all ranks, ragged": Scenario((150,), (3, 70, 71)),
        "an empty rank inside": Scenario((250,), (50, 50, 200)),
        "two empty ranks inside": Scenario((20, 250), (50, 50, 50)),
        "everything at the end": Scenario((100, 60), (0, 0, 0)),
        "everything at the start": Scenario((100, 60, 0), (160, 160, 160)),
        "many sizes": Scenario((5, 0, 130, 64, 1, 0, 80), (20, 100, 200)),
        "planned": Scenario((64, 300, 10, 33), None),
        "three ranks of four": Scenario((10, 220, 10), (60, 120, 235)),
        "all options": Scenario((10, 220, 10), (60, 120, 180), options=EVERYTHING),
        "bf16": Scenario((10, 220, 10), (60, 120, 180), torch.bfloat16),
        "no gate": Scenario((260,), (60, 120, 180), gate="G0"),
    },
}
for world, scenarios in SCENARIOS.items():
    scenarios.update({f"random {seed}": random_scenario(seed, world) for seed in range(8)})


def global_case(scenario):
    """Tensors of the whole pack; g and beta raw where the options activate them."""
    case = base(sum(scenario.lengths), 2, 4, K=16, V=24, gate=scenario.gate, dtype=scenario.dtype)
    if scenario.options:
        rng = generator(5)
        raw = {name: torch.randn(case.g.shape, generator=rng) for name in ("g", "beta")}
        raw["beta"] = raw["beta"] if scenario.options.get("use_beta_sigmoid_in_kernel") else raw["beta"].sigmoid()
        case = case.with_(**raw, options=scenario.options)
    return packed(case, scenario.lengths)


def local_states(scenario, shard):
    """Initial states of a rank's local sequences and gradients of their last ones; NaN where a row must not matter."""
    shape = (shard.sequences, 4, 24, 16) if scenario.options.get("state_v_first") else (shard.sequences, 4, 16, 24)
    rng = generator(100 + shard.rank)
    dtype = torch.float64 if scenario.dtype is torch.float64 else torch.float32
    initial, gradient = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
    if shard.continues_from_previous:
        initial[0] = float("nan")
    return initial if scenario.with_states else None, gradient if "state" in scenario.losses else None


def local_case(scenario, shard):
    """The tensors of one rank; rows behind the shard are NaN."""
    case = global_case(scenario)
    local = case.tokens(shard.start, shard.stop)
    changes = {}
    for name in ("q", "k", "v", "g", "beta", "do"):
        x = getattr(local, name)
        behind = torch.full((1, scenario.rest, *x.shape[2:]), float("nan"), dtype=x.dtype)
        changes[name] = torch.cat([x, behind], 1)
    if "o" not in scenario.losses:
        changes["do"] = None
    initial, gradient = local_states(scenario, shard)
    return local.with_(**changes, cu_seqlens=case.cu_seqlens, initial_state=initial, d_state=gradient)


class Collectives:
    """Records the collective calls of this process: name and elements sent."""

    NAMES = ("all_gather", "all_gather_into_tensor", "all_reduce", "broadcast", "send", "recv", "all_to_all_single")

    def __init__(self):
        self.calls = []
        for name in self.NAMES:
            setattr(dist, name, self._recording(name, getattr(dist, name)))

    def _recording(self, name, original):
        def call(*args, **kwargs):
            sent = args[1] if name.startswith("all_gather") else args[0]
            self.calls.append((name, sent.numel()))
            return original(*args, **kwargs)

        return call


# Two local sequences or more on each of two ranks, one of them cut: one or none is a shape of its own to dynamo.
PACKS = ((30, 250, 20), (40, 10, 170, 20, 50), (9, 0, 8, 300, 7), (33, 200, 11, 12))


def compiled_runs(world_size, rank):
    """The compiled rule over packs of other lengths, with and without given shards: results, eager results, graphs."""
    runs = []
    for given in (False, True):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("aot_eager")

        def model(q, *rest, **keywords):
            o, states = cake_gdn_train_kcp.chunk_gated_delta_rule(q * 1.0, *rest, group=dist.group.WORLD, **keywords)
            return o * 1.0, states * 1.0

        compiled = torch.compile(model, backend=counter, fullgraph=True)
        for lengths in PACKS:
            scenario = Scenario(lengths, None)
            shards = cake_gdn_train_kcp.plan_shards(global_case(scenario).cu_seqlens, world_size)
            assert all(shard.sequences > 1 for shard in shards)
            assert shards[0].continues_to_next
            where = {"shards": shards} if given else {}
            case = local_case(scenario, shards[rank])
            runs.append((run(compiled, case, **where), run(model, case, **where), counter.frame_count))
    return runs


def main(rank, world_size, init_file, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=world_size)
    collectives = Collectives()
    for name, scenario in SCENARIOS[world_size].items():
        shards = cake_gdn_train_kcp.plan_shards(global_case(scenario).cu_seqlens, world_size, cuts=scenario.cuts)
        given = {} if scenario.cuts is None else {"shards": shards}

        def rule(*args, given=given, **keywords):
            return cake_gdn_train_kcp.chunk_gated_delta_rule(*args, group=dist.group.WORLD, **given, **keywords)

        collectives.calls.clear()
        results = run(rule, local_case(scenario, shards[rank]))
        torch.save(
            {"shards": shards, "results": results, "calls": list(collectives.calls)}, folder / f"{name}_{rank}.pt"
        )
    if world_size == 2:
        torch.save(compiled_runs(world_size, rank), folder / f"compiled_{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    with poisoned_allocations():
        main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
