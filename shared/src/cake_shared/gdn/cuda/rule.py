"""The rule on a CUDA device: allocates what the plan states and makes one call into the module per direction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cake_shared.check import dtype_name
from cake_shared.gdn.backward import Needs
from cake_shared.gdn.cuda.plan import HEAD_DIM, Plan, Problem, plan_backward, plan_forward
from cake_shared.gdn.forward import TAPE_HEAD
from cake_shared.gdn.options import Inputs, Options

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi

    from cake_shared.gdn.cuda.devices import ErrorWord

_WAY_OUT = "; backend='cpu' serves others, with tensors in host memory"


def _option_bits(options: Options) -> int:
    """As enum RuleOption of cake/gdn/host/rule_stages.h."""
    return (
        options.qk_l2norm
        | options.gate << 1
        | options.beta_sigmoid << 2
        | options.neg_eigval << 3
        | options.state_v_first << 4
    )


def _aligned_rows(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return rows as the kernels read them: the tensor itself where alignment allows it, else a copy."""
    if x is None:
        return None
    if x.data_ptr() % 16 == 0:
        row, token, head, element = x.stride()
        if element == 1 and not (row | token | head) & 7:
            return x
        sizes = x.shape
        if element == 1 and all(s % 8 == 0 or n == 1 for s, n in zip((row, token, head), sizes)):
            return x
    return x.clone(memory_format=torch.contiguous_format)


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None or x.is_contiguous() else x.detach().contiguous()


def _scratch(size: int, device: torch.device) -> torch.Tensor:
    """Allocate bytes that kernels write before they read them, which no deterministic switch needs to fill."""
    if torch.are_deterministic_algorithms_enabled():
        storage = torch.UntypedStorage(size, device=device)
        return torch.tensor([], dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
    return torch.empty(size, dtype=torch.uint8, device=device)


def _check_served(inputs: Inputs, value_dim: int) -> None:
    if inputs.k.dtype is not torch.bfloat16:
        raise TypeError(f"q: got {dtype_name(inputs.k.dtype)}, takes bfloat16 on CUDA{_WAY_OUT}")
    if inputs.k.shape[3] != HEAD_DIM:
        raise ValueError(f"q: got K = {inputs.k.shape[3]}, takes K = {HEAD_DIM} on CUDA{_WAY_OUT}")
    if value_dim != HEAD_DIM:
        raise ValueError(f"v: got V = {value_dim}, takes V = {HEAD_DIM} on CUDA{_WAY_OUT}")


class RuleBackend:
    """Runs the rule through one loaded module, with the functions of `cake_shared.gdn.cpu`.

    Parameters
    ----------
    module
        The package's module: of the device's architecture, or the host module of the emulator.
    error_word
        Where the device reports malformed packs.
    multiprocessors
        How many the plan counts with. It moves no bits.
    stream
        Returns the handle of the stream to launch on.
    """

    def __init__(
        self, module: tvm_ffi.Module, error_word: ErrorWord, multiprocessors: int, stream: Callable[[], int]
    ) -> None:
        self._forward = module["rule_forward"]
        self._backward = module["rule_backward"]
        self._error_word = error_word
        self._stream = stream
        self.multiprocessors = multiprocessors

    def _problem(self, inputs: Inputs, options: Options) -> Problem:
        batch, tokens, key_heads, _ = inputs.k.shape
        cu = inputs.cu_seqlens
        return Problem(
            batch,
            tokens,
            key_heads,
            inputs.g.shape[2],
            None if cu is None else cu.shape[0] - 1,
            options.qk_l2norm,
            options.gate,
            self.multiprocessors,
        )

    def _working_memory(self, plan: Plan, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        tables = torch.empty(plan.tables.words, dtype=torch.int32, device=device)
        return tables, _scratch(plan.workspace_bytes, device)

    def forward(
        self, inputs: Inputs, options: Options, output_final_state: bool, save_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `o`, final states (no rows unless asked for) and the tape of the segments' entry states.

        Raises
        ------
        TypeError, ValueError
            For a dtype or a head dimension that no program serves.
        MalformedPackError
            An earlier call on the device was given malformed offsets.
        """
        v = inputs.v
        _check_served(inputs, v.shape[3])
        self._error_word.raise_pending()
        device, heads = v.device, v.shape[2]
        plan = plan_forward(self._problem(inputs, options), save_states)
        out = torch.empty(v.shape, dtype=v.dtype, device=device)
        sequences = plan.tables.sequences if output_final_state else 0
        final = torch.empty(sequences, heads, HEAD_DIM, HEAD_DIM, dtype=torch.float32, device=device)
        saved = plan.slots * heads * HEAD_DIM * HEAD_DIM if save_states else 0
        tape = torch.empty(TAPE_HEAD + saved, dtype=torch.float32, device=device)
        tables, workspace = self._working_memory(plan, device)
        self._forward(
            _aligned_rows(inputs.q),
            _aligned_rows(inputs.k),
            _aligned_rows(v),
            inputs.g,
            inputs.beta,
            _contiguous(inputs.initial_state),
            inputs.A_log,
            inputs.dt_bias,
            _contiguous(inputs.cu_seqlens),
            out,
            final if output_final_state else None,
            tape[TAPE_HEAD:] if save_states else None,
            tables,
            workspace,
            self._error_word.tensor,
            _option_bits(options),
            options.scale,
            plan.warps,
            self._stream(),
        )
        return out, final, tape

    def backward(
        self,
        inputs: Inputs,
        options: Options,
        d_out: torch.Tensor | None,
        d_final: torch.Tensor | None,
        tape: torch.Tensor | None,
        needs: Needs,
        value_dim: int,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k, v, g, beta, initial_state, A_log and dt_bias, None where not needed.

        Errors are those of `forward`.
        """
        _check_served(inputs, value_dim)
        self._error_word.raise_pending()
        k, g, beta = inputs.k, inputs.g, inputs.beta
        device = k.device
        batch, tokens, heads = g.shape
        token_gradients = needs.states
        plan = plan_backward(self._problem(inputs, options), token_gradients)

        def empty(like: torch.Tensor | None, wanted: bool) -> torch.Tensor | None:
            return torch.empty(like.shape, dtype=like.dtype, device=device) if wanted and like is not None else None

        dv = torch.empty(batch, tokens, heads, HEAD_DIM, dtype=k.dtype, device=device)
        dq, dk = empty(k, token_gradients), empty(k, token_gradients)
        dg, dbeta = empty(g, token_gradients), empty(beta, token_gradients)
        d_initial = None
        if needs.initial_state:
            shape = (plan.tables.sequences, heads, HEAD_DIM, HEAD_DIM)
            d_initial = torch.empty(shape, dtype=torch.float32, device=device)
        d_a_log, d_dt_bias = empty(inputs.A_log, needs.A_log), empty(inputs.dt_bias, needs.dt_bias)
        saved = None if tape is None or tape.shape[0] <= TAPE_HEAD else tape[TAPE_HEAD:]
        tables, workspace = self._working_memory(plan, device)
        keys = _aligned_rows(k)
        self._backward(
            _aligned_rows(d_out),
            _contiguous(d_final),
            keys if inputs.q is None else _aligned_rows(inputs.q),  # without a q nothing that reads it is wanted
            keys,
            _aligned_rows(inputs.v) if token_gradients else None,
            g,
            beta,
            _contiguous(inputs.initial_state) if token_gradients else None,
            inputs.A_log,
            inputs.dt_bias,
            _contiguous(inputs.cu_seqlens),
            saved if token_gradients else None,
            dv,
            d_initial,
            dq,
            dk,
            dg,
            dbeta,
            d_a_log,
            d_dt_bias,
            torch.zeros(HEAD_DIM, dtype=k.dtype, device=device) if d_out is None else None,
            tables,
            workspace,
            self._error_word.tensor,
            _option_bits(options),
            options.scale,
            plan.warps,
            self._stream(),
        )
        results = (dq, dk, dv, dg, dbeta, d_initial, d_a_log, d_dt_bias)
        return tuple(x if wanted else None for x, wanted in zip(results, needs))
