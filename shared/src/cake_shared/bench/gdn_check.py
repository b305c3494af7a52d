"""What an arm has to show on a workload before it is timed there: errors against float64, and for ours its bits."""

from collections.abc import Sequence

import torch

from cake_shared.bench.gdn_gpu import Call, Tensors, title
from cake_shared.bench.gdn_oracle import float64_rule
from cake_shared.bench.gdn_peers import GdnArm
from cake_shared.testing.bits import same_bits
from cake_shared.workloads import GdnWorkload

# Of o and each gradient under mild gates: our contract, and what a user of a peer would call right.
OUR_LIMIT, PEER_LIMIT = 4.5e-3, 1e-2
RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta")


def relative_error(got: torch.Tensor, right: torch.Tensor) -> float:
    """L2 error over the L2 norm of the float64 result; infinity where something is not finite."""
    if not bool(torch.isfinite(got).all()):
        return float("inf")
    norm = float(right.norm())
    return float((got.double() - right).norm()) / (norm if norm else 1.0)


def part_of(workload: GdnWorkload) -> tuple[slice, slice, slice]:
    """Tokens of the shortest sequence, its last key head and that head's value heads: what float64 checks."""
    shortest = min(range(len(workload.seqlens_tokens)), key=lambda n: workload.seqlens_tokens[n])
    tokens = slice(*workload.cu_seqlens[shortest : shortest + 2])
    ratio = workload.hv // workload.h
    return tokens, slice(workload.h - 1, workload.h), slice(workload.hv - ratio, workload.hv)


def right_results(workload: GdnWorkload, tensors: Tensors) -> list[torch.Tensor]:
    """Float64 results of `part_of` the workload: sequences and value groups do not depend on each other."""
    tokens, keys, values = part_of(workload)
    heads = (keys, keys, values, values, values)
    parts = [
        x.detach()[:, tokens, head].double().requires_grad_() for x, head in zip(tensors.inputs, heads, strict=True)
    ]
    o, _ = float64_rule(*parts)
    return [o.detach(), *torch.autograd.grad(o, parts, tensors.do[:, tokens, values].double())]


def check_arms(arms: Sequence[GdnArm], workload: GdnWorkload, tensors: Tensors) -> tuple[dict, list[str]]:
    """Errors of each arm, by result, and the names of those that may be timed.

    The first arm is ours: it is held to its own limit, to giving the same bits twice, and to giving them under
    `torch.use_deterministic_algorithms(True)`.

    Raises
    ------
    RuntimeError
        Ours is wrong or does not repeat its bits, so nothing may be timed.
    """
    tokens, keys, values = part_of(workload)
    right = right_results(workload, tensors)
    found, admitted = {}, []
    for place, arm in enumerate(arms):
        try:
            results = Call(arm, "fwd+bwd", tensors)()
        except Exception as problem:
            if place == 0:
                raise
            found[arm.name] = {"failed": " ".join(repr(problem).split())[:300]}
            continue
        heads = (values, keys, keys, values, values, values)
        errors = {
            name: relative_error(got[:, tokens, head], expected)
            for name, got, head, expected in zip(RESULTS, results, heads, right, strict=True)
        }
        found[arm.name] = errors
        worst = max(errors.values())
        if worst <= (PEER_LIMIT if place else OUR_LIMIT):
            admitted.append(arm.name)
        elif place == 0:
            raise RuntimeError(f"{title(workload)}: ours has errors {errors}, the limit is {OUR_LIMIT}")
        if place == 0:
            _check_bits(arm, workload, tensors, results)
        del results
    return found, admitted


def _check_bits(arm: GdnArm, workload: GdnWorkload, tensors: Tensors, results: Sequence[torch.Tensor]):
    for deterministic in (False, True):
        call = Call(arm, "fwd+bwd", tensors, deterministic)
        with call.surroundings():
            again = call()
        other = [name for name, a, b in zip(RESULTS, again, results, strict=True) if not same_bits(a, b)]
        if other:
            when = "under use_deterministic_algorithms(True)" if deterministic else "on a repeat"
            raise RuntimeError(f"{title(workload)}: ours has other bits {when} in {', '.join(other)}")
