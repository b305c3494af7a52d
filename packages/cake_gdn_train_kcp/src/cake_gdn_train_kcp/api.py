"""The public function of cake_gdn_train_kcp: the gated delta rule with the sequence axis sharded over ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cake_gdn_train import chunk_gated_delta_rule as single_rank_rule
from cake_gdn_train_kcp.check import check_rank, cuts_of, make_place
from cake_gdn_train_kcp.ops import run_eager, run_operator
from cake_gdn_train_kcp.plan import Shard
from cake_shared.check import check_backend, check_flag, kind_of
from cake_shared.gdn.options import make_call


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
    group: dist.ProcessGroup | None = None,
    shards: Sequence[Shard] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule over a pack whose tokens are spread over the ranks of `group`.

    Every rank calls with its own tokens and the offsets of the whole pack, and gets the outputs of its own tokens. A
    sequence may be cut anywhere and span any number of ranks. One all-gather of a pair `[HV, K, K + V]` in the states'
    dtype is made in the forward pass and one in the backward pass, none when no sequence is cut. A collective needs
    every rank: where one rank computes gradients all must, a rank without tokens included (its output takes part in
    autograd; `0 * o.sum()` will do).

    The rule and all arguments not listed here are those of `cake_gdn_train.chunk_gated_delta_rule`; so are the dtypes.
    The gradients of q, k, v, g, beta and initial_state are those of the sum of all ranks' losses. The gradients of
    A_log and dt_bias are this rank's part of them, the terms of its own tokens: the all-reduce (sum) over `group` that
    data-parallel training makes for every parameter completes them.

    Parameters
    ----------
    q, k, v, g, beta
        This rank's tokens: `[1, T, H, K]`, `[1, T, H, K]`, `[1, T, HV, V]`, `[1, T, HV]`, `[1, T, HV]`, with T at least
        the tokens of its shard. Rows beyond them give zeros, in the output and in every gradient.
    initial_state
        FP32 `[n, HV, K, V]`, n the local sequences (`shard.sequences`): row i is the state before local sequence i. The
        row of a sequence that continues from an earlier rank is not used and its gradient is zero.
    output_final_state
        Whether the states after the last local token of each local sequence are returned: the final state of a
        sequence that ends here, the state at the cut of one that continues. All are differentiable.
    cu_seqlens
        Offsets of the whole pack, the same on every rank: int32 or int64 `[N + 1]` in host memory, from 0 to the number
        of tokens of all ranks together.
    backend
        As in `cake_gdn_train`.
    group
        The ranks that share the pack. None: no sharding; the call is `cake_gdn_train.chunk_gated_delta_rule` on this
        process alone, `cu_seqlens` then being optional and local.
    shards
        What `plan_shards` returned for the same offsets and the group's size; planned here with its defaults when None.

    Returns
    -------
    tuple
        `o` `[1, T, HV, V]` in the dtype of v, and the states `[n, HV, K, V]` of the local sequences, or None unless
        `output_final_state`.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, shape, device or value, before any communication; the message names
        it, what it got and takes. The other ranks cannot see that and wait for this one until the group's timeout.
    UnsupportedArchError
        For a CUDA device of an architecture that lacks a program of cake_gdn_train; the message has the way out.
    """
    if group is None:
        if shards is not None:
            raise ValueError(f"shards: got {kind_of(shards)} without group, takes None then")
        return single_rank_rule(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )
    inputs, options = make_call(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        A_log,
        dt_bias,
        cu_seqlens,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    check_flag("output_final_state", output_final_state)
    cuts = cuts_of(shards)
    if torch.compiler.is_compiling():
        check_backend(backend)
        return run_operator(inputs, options, output_final_state, cuts, group.group_name)
    place = make_place(group, cu_seqlens, cuts, shards)
    check_rank(inputs, options, place, backend)
    return run_eager(place, inputs, options, output_final_state)
