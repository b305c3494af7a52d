"""What the passes over a pack share: the work plan and, for each wave, its loaded and prepared tensors."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from cake_shared.gdn.intra import Chunks, make_chunks, make_gates
from cake_shared.gdn.options import Inputs, Options
from cake_shared.gdn.plan import Plan, Problem, plan_rule
from cake_shared.gdn.prologue import Decays, load_decays, normalised
from cake_shared.gdn.tiles import Pack, WaveIndex, gather, make_pack, wave_index
from cake_shared.plan import SEGMENT_TOKENS, Group, Round, WorkBudget


@dataclass
class Walk:
    """One call's pack, plan and dtype of the arithmetic."""

    pack: Pack
    plan: Plan
    dtype: torch.dtype

    @property
    def groups(self) -> tuple[Group, ...]:
        """The plan's work batches."""
        return self.plan.groups

    @property
    def state_shape(self) -> tuple[int, int]:
        """Padded key and value width."""
        return self.plan.key_width, self.plan.value_width

    def key_range(self, group: Group) -> tuple[int, int]:
        """First key head and number of key heads of a group."""
        return group.first_key_head, group.key_heads

    def value_range(self, group: Group) -> tuple[int, int]:
        """First value head and number of value heads of a group."""
        ratio = self.plan.problem.group_heads
        return group.first_key_head * ratio, group.key_heads * ratio

    def unpadded(self, group: Group, states: torch.Tensor) -> torch.Tensor:
        """View a group's states `[n * value heads, padded K, padded V]` as `[n, value heads, K, V]`."""
        problem = self.plan.problem
        states = states.view(-1, self.value_range(group)[1], *self.state_shape)
        return states[:, :, : problem.key_dim, : problem.value_dim]

    def indices(self, group: Group, rnd: Round) -> Iterator[WaveIndex]:
        """Yield the coordinates of a round's waves, first to last."""
        for wave in rnd.waves:
            yield wave_index(self.pack, group, rnd, wave, rnd.segment * SEGMENT_TOKENS, self.plan.first_chunk)


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the arithmetic for inputs of `dtype`: FP64 for FP64, FP32 for all others."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def offsets_of(cu_seqlens: torch.Tensor | None) -> tuple[int, ...] | None:
    """Return offsets as integers."""
    return None if cu_seqlens is None else tuple(cu_seqlens.tolist())


def make_walk(inputs: Inputs, value_heads: int, value_dim: int, budget: WorkBudget | None = None) -> Walk:
    """Plan the work of a call from its keys and offsets."""
    batch, tokens, key_heads, key_dim = inputs.k.shape
    pack = make_pack(batch, tokens, offsets_of(inputs.cu_seqlens))
    dtype = compute_dtype(inputs.k.dtype)
    problem = Problem(batch, tokens, pack.lengths, key_heads, value_heads, key_dim, value_dim, dtype.itemsize)
    return Walk(pack, plan_rule(problem, budget), dtype)


@dataclass
class WaveData:
    """A wave after its prologue: coordinates, gates, normalised keys and what they were scaled by, chunk algebra."""

    index: WaveIndex
    decays: Decays
    chunks: Chunks
    k_scale: torch.Tensor | None


def load_wave(walk: Walk, group: Group, index: WaveIndex, inputs: Inputs, options: Options) -> WaveData:
    """Gather keys, gates and betas of a wave and form everything that needs neither values nor states."""
    k = gather(inputs.k, walk.pack, index, walk.key_range(group), walk.dtype)
    k_scale = None
    if options.qk_l2norm:
        k, k_scale = normalised(k)
    decays = load_decays(inputs, options, walk.pack, index, walk.value_range(group))
    chunks = make_chunks(k, decays.beta.to(walk.dtype), make_gates(decays.g, walk.dtype))
    return WaveData(index, decays, chunks, k_scale)


def load_queries(
    walk: Walk, group: Group, index: WaveIndex, inputs: Inputs, options: Options
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gather the queries of a wave; return them and what normalisation scaled them by."""
    q = gather(inputs.q, walk.pack, index, walk.key_range(group), walk.dtype)
    return normalised(q) if options.qk_l2norm else (q, None)


def load_values(walk: Walk, group: Group, index: WaveIndex, x: torch.Tensor) -> torch.Tensor:
    """Gather a wave's tiles of values, or of their gradient: `[chunks * value heads, rows, padded width]`."""
    return gather(x, walk.pack, index, walk.value_range(group), walk.dtype).flatten(0, 1)
