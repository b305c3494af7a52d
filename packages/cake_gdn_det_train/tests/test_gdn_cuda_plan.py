"""The plan of the CUDA path and the host code that follows it, on the CPU: launches are recorded, nothing runs."""

import csv
import ctypes
import dataclasses
import math
from collections import defaultdict
from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cake_gdn_det_train.cuda import ErrorWord
from cake_shared import jit
from cake_shared.bench.gdn_gpu import title
from cake_shared.emulator import native
from cake_shared.gdn.backward import Needs
from cake_shared.gdn.cuda import rule
from cake_shared.gdn.cuda.plan import (
    Problem,
    chain_warps,
    cut_slots,
    half_chunks,
    plan_backward,
    plan_forward,
    slots_per_row,
)
from cake_shared.gdn.cuda.rule import RuleBackend, uses_native
from cake_shared.gdn.options import make_call
from cake_shared.program import programs_of
from cake_shared.testing import deterministic_fill
from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.workloads import GDN

PACKAGE = "cake_gdn_det_train"


class Recorder:
    """A backend whose launches are only noted."""

    def __init__(self, multiprocessors=132):
        self.launches, self.programmatic = [], []
        module = jit.build_host_for_emulator(PACKAGE)
        self.tensors = defaultdict(list)
        jit.install_emulator(module, self.note, self.told)
        encode = native.library().cake_emulator_encode_tiled
        module["cake_set_emulator_encode_tiled"](ctypes.cast(encode, ctypes.c_void_p))
        self.module = module
        self.backend = RuleBackend(module, ErrorWord(torch.zeros(1, dtype=torch.int32)), multiprocessors, lambda: 0)

    def note(self, name, launch, params):
        self.launches.append((name, launch.grid[0], launch.block[0], launch.smem_bytes))
        self.programmatic.append(bool(launch.programmatic))

    def told(self, name, address, size_bytes, writable):
        self.tensors[name].append(address)

    def stages(self):
        return [name.removesuffix("_any") for name, *_ in self.launches]


def call_of(case, **options):
    switches = (
        "use_qk_l2norm_in_kernel",
        "use_gate_in_kernel",
        "use_beta_sigmoid_in_kernel",
        "allow_neg_eigval",
        "state_v_first",
    )
    keywords = {**dict.fromkeys(switches, False), **options}
    return make_call(
        case.q, case.k, case.v, case.g, case.beta, case.scale, case.initial_state,
        keywords.pop("A_log", None), keywords.pop("dt_bias", None), case.cu_seqlens, *keywords.values(),
    )  # fmt: skip


@pytest.fixture
def recorder():
    return Recorder()


def test_forward_of_a_short_pack(recorder):
    inputs, options = call_of(packed(base(200, 1, 2), (100, 0, 65)))
    o, final, *_ = recorder.backend.forward(inputs, options, True, True)
    assert o.shape == inputs.v.shape
    assert final.shape == (3, 2, 128, 128)
    assert recorder.stages() == ["prologue", "wy", "chunk_output"]


def test_every_stage_of_the_records_is_launched_by_calls_that_ask_for_everything(recorder):
    case = base(8193, 1, 2)
    per_head = {"A_log": torch.zeros(2), "dt_bias": torch.zeros(2)}
    inputs, options = call_of(case, use_gate_in_kernel=True, use_qk_l2norm_in_kernel=True, **per_head)
    _, _, *saved = recorder.backend.forward(inputs, options, False, True)
    recorder.backend.backward(inputs, options, case.do, None, *saved, Needs(), 128)
    assert recorder.stages() == [
        *("prologue", "wy", "segment_pairs", "segment_entries", "chunk_output"),
        *("segment_pairs", "segment_gradients", "segment_exits"),
        *("value_gradients", "chunk_states", "token_gradients", "gate_parameters"),
    ]
    recorder.backend.forward(*call_of(packed(base(1025, 1, 1), [1] * 1025)), False, False)
    assert recorder.stages()[-4:] == ["pack_offsets", "prologue", "wy", "chunk_output"]
    assert set(recorder.stages()) == set(programs_of(PACKAGE).stages)


def test_the_backward_makes_the_groundwork_where_it_is_not_given(recorder):
    """With it, token_gradients writes the rows past the end of a pack."""
    needs = Needs(A_log=False, dt_bias=False)
    chains = ["value_gradients", "chunk_states", "token_gradients"]
    pack, batch = packed(base(200, 1, 2), (100, 65)), base(100, 1, 2, B=2)
    for case, options in ((pack, {}), (batch, {"use_qk_l2norm_in_kernel": True})):
        inputs, options = call_of(case, **options)
        _, _, tape, groundwork = recorder.backend.forward(inputs, options, False, True)
        recorder.launches.clear()
        recorder.backend.backward(inputs, options, case.do, None, tape, groundwork, needs, 128)
        assert recorder.stages() == chains
        recorder.launches.clear()
        recorder.backend.backward(inputs, options, case.do, None, tape, None, needs, 128)
        assert recorder.stages() == ["prologue", "wy", *chains]
        with pytest.raises(ValueError, match="groundwork: expected 1024 bytes more than it has"):
            recorder.backend.backward(inputs, options, case.do, None, tape, groundwork[:-1024], needs, 128)


def test_a_calls_first_stage_starts_after_all_that_came_before(recorder):
    case = base(8193, 1, 2)
    inputs, options = call_of(case)
    _, _, *saved = recorder.backend.forward(inputs, options, False, True)
    recorder.backend.backward(inputs, options, case.do, None, *saved, Needs(A_log=False, dt_bias=False), 128)
    recorder.backend.forward(*call_of(packed(base(1025, 1, 1), [1] * 1025)), False, False)
    stages = recorder.stages()
    firsts = [0, stages.index("segment_pairs", 3), stages.index("pack_offsets")]
    assert not any(recorder.programmatic[place] for place in firsts)


@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a", "sm_103a", "sm_107a"])
def test_launches_stay_within_the_records_budgets(recorder, architecture):
    recorder.backend.native = uses_native(PACKAGE, architecture)
    budgets = {record.program: record.budget for record in programs_of(PACKAGE).records_for(architecture)}
    for multiprocessors in (1, 1000):
        recorder.backend.multiprocessors = multiprocessors
        case = base(8193, 1, 2)
        inputs, options = call_of(case, use_qk_l2norm_in_kernel=True)
        _, _, *saved = recorder.backend.forward(inputs, options, True, True)
        recorder.backend.backward(inputs, options, case.do, None, *saved, Needs(A_log=False, dt_bias=False), 128)
    for name, _, threads, smem_bytes in recorder.launches:
        assert threads <= budgets[name].threads, name
        assert smem_bytes <= max(budgets[name].shared_bytes, 512), name


def test_gradients_of_values_alone_need_no_forward_states(recorder):
    case = base(100, 1, 2)
    inputs, options = call_of(case)
    inputs.v = None
    needs = Needs(False, False, True, False, False, True, False, False)
    grads = recorder.backend.backward(inputs, options, case.do, None, None, None, needs, 128)
    assert [x is not None for x in grads] == list(needs)
    assert "chunk_states" not in recorder.stages()
    assert recorder.stages()[-1] == "value_gradients"


@pytest.mark.parametrize("lengths", [(), (0, 0)])
def test_packs_without_tokens_launch_no_chunk(recorder, lengths):
    case = packed(base(1, 1, 2), lengths).tokens(0, 0)
    h0, _ = states(case, len(lengths))
    offsets = torch.zeros(len(lengths) + 1, dtype=torch.int32)
    inputs, options = call_of(case.with_(cu_seqlens=offsets, initial_state=h0))
    o, *_ = recorder.backend.forward(inputs, options, True, False)
    assert o.numel() == 0
    assert recorder.stages()[0] == "prologue"
    assert (recorder.stages() == ["prologue"]) == (len(lengths) == 0)


def test_grid_follows_capacities_not_offsets(recorder):
    grids = []
    for lengths in ((100, 100), (0, 3)):
        inputs, options = call_of(packed(base(200, 1, 2), lengths))
        recorder.launches.clear()
        recorder.backend.forward(inputs, options, False, False)
        grids.append(list(recorder.launches))
    assert grids[0] == grids[1]


def test_wrong_workspace_is_refused(recorder, monkeypatch):
    inputs, options = call_of(base(100, 1, 2))
    scratch = rule._scratch
    for change, message in ((-1024, "more than it has"), (1024, "less than it has")):
        monkeypatch.setattr(rule, "_scratch", lambda size, device, change=change: scratch(size + change, device))
        with pytest.raises(ValueError, match=f"groundwork: expected 1024 bytes {message}"):
            recorder.backend.forward(inputs, options, False, False)


def test_other_head_dimensions_and_dtypes_are_refused(recorder):
    for case, message in (
        (base(10, 1, 1, K=64), "q: got K = 64, takes K = 128"),
        (base(10, 1, 1, V=64), "v: got V = 64, takes V = 128"),
    ):
        with pytest.raises(ValueError, match=message):
            recorder.backend.forward(*call_of(case), False, False)
    with pytest.raises(TypeError, match="q: got float32, takes bfloat16"):
        recorder.backend.forward(*call_of(base(10, 1, 1, dtype=torch.float32)), False, False)


def test_misaligned_rows_are_copied_and_aligned_views_are_not(recorder):
    case = base(8, 2, 2)
    fused = torch.zeros(1, 8, 5 * 128, dtype=torch.bfloat16)
    view = fused[..., 128:384].unflatten(-1, (2, 128))
    odd = torch.zeros(1, 8, 257, dtype=torch.bfloat16)[..., :256].unflatten(-1, (2, 128))
    shifted = torch.zeros(8 * 256 + 1, dtype=torch.bfloat16)[1:].view(1, 8, 2, 128)
    expanded = torch.zeros((), dtype=torch.bfloat16).expand(1, 8, 2, 128)
    for name in ("q", "k", "v", "do"):
        for x, copied in ((view, False), (odd, True), (shifted, True), (expanded, True)):
            changed = case.with_(**{name: x})
            inputs, options = call_of(changed)
            recorder.tensors.clear()
            _, _, *saved = recorder.backend.forward(inputs, options, False, True)
            recorder.backend.backward(inputs, options, changed.do, None, *saved, Needs(A_log=False, dt_bias=False), 128)
            addresses = recorder.tensors[{"do": "d_o"}.get(name, name)]
            assert (x.data_ptr() != addresses[-1]) == copied, name
            assert addresses[-1] % 16 == 0
            assert (len(addresses) == (1 if name == "do" else 2)) != copied


@pytest.mark.parametrize(
    ("batch", "tokens", "waves"), [(1, 2500, (5, 1)), (1, 2600, (5, 2)), (4, 700, (3, 1)), (300, 1, (3, 1))]
)
def test_native_gradients_are_made_in_waves(recorder, batch, tokens, waves):
    """In two of halves where the device holds all chains of both kinds, else in two of heads; a small call in one."""
    recorder.backend.native = True
    case = base(tokens, 5, 20, B=batch)
    inputs, options = call_of(case)
    _, _, *saved = recorder.backend.forward(inputs, options, False, True)
    recorder.launches.clear()
    recorder.backend.backward(inputs, options, case.do, None, *saved, Needs(A_log=False, dt_bias=False), 128)
    names = [name for name, *_ in recorder.launches if name.endswith("_sm90")]
    count = 1 if waves == (5, 1) else 2
    assert names == count * ["value_gradients_sm90", "chunk_states_sm90", "token_gradients_sm90"]
    plan = plan_backward(Problem(batch, tokens, 5, 20, None, False, False, 132, True), True)
    assert (plan.wave_key_heads, plan.wave_halves) == waves
    call = recorder.backend.prepared(inputs, options, False, 128)
    for field, expected in (("wave_key_heads", "1 to 5"), ("wave_halves", "1 or 2")):
        call._plan = lambda make, choice, field=field: dataclasses.replace(plan, **{field: 6})
        with pytest.raises(ValueError, match=f"{field}: expected {expected}, got 6"):
            call.backward(rule._in_order(inputs), case.do, None, None, None, Needs(A_log=False, dt_bias=False))


def test_portable_gradients_are_made_in_one_wave(recorder):
    case = base(100, 1, 2)
    inputs, options = call_of(case)
    call = recorder.backend.prepared(inputs, options, False, 128)
    plan = plan_backward(Problem(1, 100, 1, 2, None, False, False, 132), True)
    call._plan = lambda make, choice: dataclasses.replace(plan, wave_halves=2)
    with pytest.raises(ValueError, match="wave_halves: expected 1, got 2"):
        call.backward(rule._in_order(inputs), case.do, None, None, None, Needs(A_log=False, dt_bias=False))


@pytest.mark.parametrize("chunks", [0, 1, 16, 17, 31, 32, 33, 48, 70000])
def test_half_of_the_chunks_of_a_pack(chunks):
    """Sixteen chunks of either colour in turn; a cut needs a change of colour, so it is one in 16 chunks."""
    earlier = sum(chunk // 16 % 2 == 0 for chunk in range(chunks))
    assert half_chunks(chunks) == earlier >= chunks - earlier
    assert cut_slots(chunks) == sum(chunk % 16 == 0 for chunk in range(1, chunks))


def test_peak_of_the_published_workloads_is_at_most_flash_qlas():
    """What a forward and backward pass hold at once beside inputs and gradients, against FlashQLA's measured peak."""
    results = Path(__file__).parents[1] / "benchmarks" / "results" / "h200.csv"
    with results.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["table"] == "Peak memory with FP32 beta"]
    measured = {row["row"]: row["value"] for row in rows if row["column"] == "FlashQLA"}
    compared = 0
    for w in GDN:
        theirs = measured[title(w)]
        if theirs == "failed":
            continue
        plan = plan_backward(Problem(1, w.tokens, w.h, w.hv, len(w.cu_seqlens) - 1, False, False, 132, True), True)
        saved = w.tokens * w.hv * 128 * 2 + plan.slots * w.hv * 128 * 128 * 4 + plan.groundwork_bytes
        assert saved + plan.workspace_bytes <= float(theirs) * 2**30, w.name
        compared += 1
    assert compared == len(GDN) - 1


def test_chain_warps_follow_the_load_alone():
    assert chain_warps(4, 16, 132) == 4
    assert chain_warps(16, 32, 132) == 8
    assert chain_warps(4, 16, 64) == 8


@pytest.mark.parametrize(
    ("key_heads", "tokens", "warps", "wave_warps"),
    [(8, 16384, 4, 8), (4, 16384, 4, 4), (8, 32768, 8, 8), (8, 300, 4, 4)],
)
def test_chains_of_a_wave_share_the_device(key_heads, tokens, warps, wave_warps):
    """Forward and reverse chains of one of two waves run side by side, so that half of the device is for either."""
    plan = plan_backward(Problem(1, tokens, key_heads, 2 * key_heads, None, False, False, 132, True), True)
    assert (plan.warps, plan.wave_warps) == (warps, wave_warps)


@pytest.mark.parametrize("tokens", [1, 8192, 8193, 12288, 16385, 131071])
def test_slots_hold_every_border_of_segments(tokens):
    """Each segment after a sequence's first has a slot of its own, wherever its sequence starts in the row."""
    from cake_shared.plan import segment_lengths

    for first in range(0, tokens, max(1, tokens // 7)):
        lengths = [first, tokens - first]
        begin, taken = 0, []
        for length in lengths:
            at = begin
            for place, segment in enumerate(segment_lengths(length)):
                if place:
                    taken.append(at // 4096 - 1)
                at += segment
            begin += length
        assert len(set(taken)) == len(taken)
        assert all(0 <= slot < slots_per_row(tokens) for slot in taken)


def test_workspace_of_a_long_and_of_a_short_call():
    problem = Problem(1, 16384, 8, 16, None, False, False, 132)
    forward = plan_forward(problem, True)
    assert forward.slots == 4
    assert "segment entries" not in {region.name for region in forward.regions}
    assert "segment entries" in {region.name for region in plan_forward(problem, False).regions}
    short = plan_backward(Problem(4, 4096, 8, 16, None, False, False, 132), True)
    assert short.slots == 0
    assert short.workspace_bytes == sum(-(-region.bytes // 1024) * 1024 for region in short.regions)


@pytest.mark.parametrize("shape", [(3, 0, 2), (5,), (2, 3, 4), ()])
def test_the_deterministic_switch_fills_nothing_that_kernels_write(shape):
    """Shapes, dtypes and strides are those of torch.empty, which it would fill."""
    plain = rule._new(shape, torch.bfloat16, torch.device("cpu"))

    def fills(call):  # of at least one element
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiled:
            made = call()
        filled = [event.input_shapes[0] for event in profiled.events() if event.name == "aten::fill_"]
        return made, [sizes for sizes in filled if math.prod(sizes)]

    with deterministic_fill():
        made, filled = fills(lambda: rule._new(shape, torch.bfloat16, torch.device("cpu")))
        assert filled == []
        assert [3] in fills(lambda: torch.empty(3))[1]
        like, filled = fills(lambda: rule._like(made))
        assert filled == []
    for x in (made, like):
        assert (x.shape, x.stride(), x.dtype) == (plain.shape, plain.stride(), plain.dtype)
        x.fill_(1.0)
