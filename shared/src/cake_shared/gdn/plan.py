"""Problem -> Plan of the gated delta rule on the CPU: every choice that the program makes, as a frozen printable value.

Pure arithmetic, no torch. The CPU backend walks the plan's groups; nothing else decides what it does.
"""

from dataclasses import dataclass
from functools import lru_cache

from cake_shared.plan import (
    CHUNK_TOKENS,
    SEGMENT_THRESHOLD_TOKENS,
    SEGMENT_TOKENS,
    SHORT_SEQUENCE_TOKENS,
    Group,
    WorkBudget,
    ceil_div,
    extra_segment_capacity,
    plan_work,
    segment_count,
    tile_rows,
)

# Raised whenever the program's bits may change.
PROGRAM = "cake_shared.gdn.cpu/2"

# Elements to which head dims are padded, so that every matrix starts at the same alignment whatever its place.
LANES = 16

FORWARD_STAGES = (
    "gathered_tiles",
    "decays",
    "chunk_inverse",
    "chunk_state",
    "chunk_output",
    "final_state",
)
BACKWARD_STAGES = (
    "gathered_tiles",
    "decays",
    "chunk_inverse",
    "chunk_state",
    "chunk_state_gradient",
    "value_gradient",
    "beta_gradient",
    "gate_gradient",
    "query_gradient",
    "key_gradient",
    "initial_state_gradient",
    "parameter_gradients",
)
REDUCTIONS = (
    "cumulative gates: float64, token order inside the chunk",
    "contractions over head dims and chunk rows: one matrix product of fixed shape each",
    "states: chunk order inside the sequence",
    "q and k gradients of a key head: value heads in head order, before the product with K or Q",
    "gate gradients: crossing sums of the chunk's terms, then its entering and leaving terms",
    "A_log and dt_bias gradients: float64, rows, then chunks of a sequence, then sequences in pack order",
)


def padded(width: int) -> int:
    """Return `width` rounded up to whole lanes."""
    return ceil_div(width, LANES) * LANES


@dataclass(frozen=True)
class Problem:
    """What a call asks for, as far as a plan depends on it.

    `lengths` are the tokens of its sequences (the rows of the batch without offsets), `itemsize_bytes` the size of one
    element of the arithmetic: 4, or 8 for FP64 data.
    """

    batch: int
    tokens: int
    lengths: tuple[int, ...]
    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    itemsize_bytes: int = 4

    @property
    def group_heads(self) -> int:
        """Value heads of a key head."""
        return self.value_heads // self.key_heads


@dataclass(frozen=True)
class Plan:
    """How the CPU program serves a problem.

    Attributes
    ----------
    program
        Name and version of the program; equal names mean equal bits.
    forward_stages, backward_stages
        In order, each named by what it writes.
    reductions
        Every sum over more than one element, and its order.
    chunk_tokens, segment_tokens, segment_threshold_tokens, short_sequence_tokens
        How a sequence is cut, by its length alone; short sequences get tiles of `short_sequence_tokens` rows.
    key_width, value_width
        Padded head dims of the tiles.
    groups
        Work batches, in the order in which they are walked. No bit depends on them.
    first_chunk, first_extra_segment
        Per sequence, and one more: its first chunk in pack order, its first slot in the tape of segment-entry states.
    tape_bytes
        What a forward pass saves for a backward one besides its inputs.
    wave_bytes, group_bytes
        The largest wave's and the largest group's estimated workspace: a forward pass holds a wave's, a backward pass a
        group's and a wave's.
    """

    program: str
    problem: Problem
    forward_stages: tuple[str, ...]
    backward_stages: tuple[str, ...]
    reductions: tuple[str, ...]
    chunk_tokens: int
    segment_tokens: int
    segment_threshold_tokens: int
    short_sequence_tokens: int
    key_width: int
    value_width: int
    groups: tuple[Group, ...]
    first_chunk: tuple[int, ...]
    first_extra_segment: tuple[int, ...]
    tape_bytes: int
    wave_bytes: int
    group_bytes: int

    @property
    def chunk_counts(self) -> tuple[int, ...]:
        """Chunks of each sequence."""
        return tuple(ceil_div(n, tile_rows(n)) for n in self.problem.lengths)

    def __str__(self) -> str:
        """Describe the plan in a few lines, groups by their numbers."""
        p = self.problem
        waves = sum(len(r.waves) for g in self.groups for r in g.rounds)
        rounds = sum(len(g.rounds) for g in self.groups)
        return "\n".join(
            (
                f"program {self.program}",
                f"problem [{p.batch}, {p.tokens}], {len(p.lengths)} sequences, H={p.key_heads} HV={p.value_heads} "
                f"K={p.key_dim} V={p.value_dim}, {p.itemsize_bytes} bytes an element",
                f"cut chunks of {self.chunk_tokens} tokens; segments of {self.segment_tokens} beyond "
                f"{self.segment_threshold_tokens}; tiles of {self.short_sequence_tokens} rows up to that length",
                f"tiles [rows, {self.key_width}] and [rows, {self.value_width}], "
                f"states [{self.key_width}, {self.value_width}]",
                f"work {len(self.groups)} groups, {rounds} rounds, {waves} waves",
                f"bytes tape {self.tape_bytes}, wave {self.wave_bytes}, group {self.group_bytes}",
                "forward " + " -> ".join(self.forward_stages),
                "backward " + " -> ".join(self.backward_stages),
                *("order " + line for line in self.reductions),
            )
        )


def _workspace(groups: tuple[Group, ...], problem: Problem, key: int, value: int) -> tuple[int, int]:
    """Estimate the bytes of the largest wave and the largest round of a group."""
    wave_bytes = group_bytes = 0
    for group in groups:
        heads = group.key_heads * problem.group_heads
        # Tiles of keys and values, squares of a chunk, states: those alive together in a wave, those kept for a round.
        alive = group.rows * (5 * key + 6 * value + 6 * group.rows) + 3 * key * value
        kept = group.rows * (key + 2 * value + 3 * group.rows) + key * value
        for rnd in group.rounds:
            chunks = [sum(wave.active) for wave in rnd.waves]
            wave_bytes = max(wave_bytes, max(chunks) * heads * alive)
            group_bytes = max(group_bytes, sum(chunks) * heads * kept)
    return wave_bytes * problem.itemsize_bytes, group_bytes * problem.itemsize_bytes


def _plan(problem: Problem, budget: WorkBudget) -> Plan:
    key, value = padded(problem.key_dim), padded(problem.value_dim)
    groups = plan_work(
        problem.lengths, problem.key_heads, problem.group_heads, key, value, problem.itemsize_bytes, budget
    )
    chunks, extra = [0], [0]
    for n in problem.lengths:
        chunks.append(chunks[-1] + ceil_div(n, tile_rows(n)))
        extra.append(extra[-1] + max(0, segment_count(n) - 1))
    state = problem.value_heads * problem.key_dim * problem.value_dim * problem.itemsize_bytes
    return Plan(
        PROGRAM,
        problem,
        FORWARD_STAGES,
        BACKWARD_STAGES,
        REDUCTIONS,
        CHUNK_TOKENS,
        SEGMENT_TOKENS,
        SEGMENT_THRESHOLD_TOKENS,
        SHORT_SEQUENCE_TOKENS,
        key,
        value,
        groups,
        tuple(chunks),
        tuple(extra),
        extra_segment_capacity(problem.batch, problem.tokens) * state,
        *_workspace(groups, problem, key, value),
    )


_plan_again = lru_cache(maxsize=16)(_plan)

# Beyond this many sequences a plan is large and not kept for the next call.
KEPT_SEQUENCES = 1024


def plan_rule(problem: Problem, budget: WorkBudget | None = None) -> Plan:
    """Return the CPU program's plan for a problem; a function of its arguments alone.

    Parameters
    ----------
    problem
        Shapes and sequence lengths.
    budget
        Bounds of the work batches in bytes; those of `WorkBudget` by default.
    """
    make = _plan_again if len(problem.lengths) <= KEPT_SEQUENCES else _plan
    return make(problem, budget or WorkBudget())
