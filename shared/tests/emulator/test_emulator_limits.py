"""What a launch asks beyond the target's limits is refused, and the registers that setmaxnreg moves are counted."""

import dataclasses

import pytest

from cake_shared import target as targets
from cake_shared.emulator import Deadlock, IllegalInstruction, LaunchError, Module, PtxSyntaxError, TensorMemoryLeak
from cake_shared.target import TARGETS, target_named

HOPPER = target_named("sm_90a")


def ptx(body: str = "", directives: str = "", target: str = "sm_90a") -> str:
    head = f".version 8.7\n.target {target}\n.address_size 64\n"
    return f"{head}.visible .entry k() {directives}\n{{\n{body}\nret;\n}}\n"


@pytest.mark.parametrize(
    ("launch", "what"),
    [
        ({"block": HOPPER.threads_per_cta + 1}, "threads"),
        ({"block": 32, "smem_bytes": HOPPER.shared_bytes_per_cta + 1}, "shared"),
        ({"block": 32, "cluster": (HOPPER.cluster_ctas * 2, 1, 1), "grid": 32}, "cluster"),
        ({"block": 32, "cluster": (2, 1, 1), "grid": 3}, "cluster"),
        ({"block": 32, "grid": (1, 65536)}, "grid"),
        ({"block": 0}, "block"),
    ],
)
def test_a_launch_beyond_the_target_is_refused(launch, what):
    program = Module.from_ptx(ptx())
    with pytest.raises((LaunchError, ValueError), match=f"(?i){what}"):
        program.launch("k", **({"grid": 1, "params": []} | launch))


def test_a_launch_at_the_limits_is_taken():
    program = Module.from_ptx(ptx())
    program.launch("k", grid=1, block=HOPPER.threads_per_cta, smem_bytes=HOPPER.shared_bytes_per_cta)
    program.launch("k", grid=HOPPER.cluster_ctas, block=32, cluster=(HOPPER.cluster_ctas, 1, 1))


@pytest.mark.parametrize(
    ("field", "launch"),
    [
        ("threads_per_cta", {"block": 128}),
        ("shared_bytes_per_cta", {"smem_bytes": 128}),
        ("cluster_ctas", {"grid": 4, "cluster": (4, 1, 1)}),
    ],
)
def test_the_limits_are_those_of_the_target_table(monkeypatch, field, launch):
    program = Module.from_ptx(ptx())
    launch = {"grid": 1, "block": 32} | launch
    program.launch("k", **launch)
    monkeypatch.setitem(targets.TARGETS, "sm_90a", dataclasses.replace(HOPPER, **{field: 64 if field[0] != "c" else 2}))
    with pytest.raises(LaunchError, match="at most"):
        program.launch("k", **launch)


def test_the_system_keeps_the_shared_memory_that_the_emulator_keeps():
    assert {t.shared_bytes_reserved_per_cta for t in TARGETS.values()} == {1024}  # kSharedBase of cpp/core.h


def test_registers_beyond_the_target_are_refused():
    program = Module.from_ptx(ptx("", ".maxntid 1024, 1, 1 .minnctapersm 1 .maxnreg 128"))
    with pytest.raises(LaunchError, match=r"(?i)register"):
        program.launch("k", grid=1, block=1024, params=[])


@pytest.mark.parametrize(("registers", "fits"), [(64, True), (65, False), (256, False)])
def test_the_compilers_register_count_must_fit(registers, fits):
    program = Module.from_ptx(ptx())
    if fits:
        program.launch_packed("k", 1, 1024, b"", [], registers=registers)
    else:
        with pytest.raises(LaunchError, match="registers"):
            program.launch_packed("k", 1, 1024, b"", [], registers=registers)


def tensor_memory(columns: int, times: int) -> Module:
    allocate = f"tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [a], {columns};"
    body = ".reg .b32 a;\n.shared .align 4 .b32 place[2];\nmov.u32 a, place;\n" + "\n".join([allocate] * times)
    return Module.from_ptx(ptx(body, target="sm_100a"), target="sm_100a")


def test_tensor_memory_beyond_the_target_deadlocks_and_says_where():
    most = target_named("sm_100a").tmem_columns
    with pytest.raises((Deadlock, TensorMemoryLeak), match="line 10"):
        tensor_memory(most, 2).launch("k", grid=1, block=32)
    with pytest.raises(TensorMemoryLeak, match=f"32 to {most}"):
        tensor_memory(2 * most, 1).launch("k", grid=1, block=32)


def test_the_columns_are_those_of_the_target_table(monkeypatch):
    monkeypatch.setitem(targets.TARGETS, "sm_100a", dataclasses.replace(target_named("sm_100a"), tmem_columns=256))
    with pytest.raises(TensorMemoryLeak, match="32 to 256"):
        tensor_memory(512, 1).launch("k", grid=1, block=32)


def moving(producer: str, consumer: str, directives: str = ".maxntid 384, 1, 1 .minnctapersm 1") -> Module:
    """384 threads: the first warpgroup executes `producer`, the other two `consumer`."""
    body = f""".reg .b32 t;
    .reg .pred first;
    mov.u32 t, %tid.x;
    setp.lt.u32 first, t, 128;
    @first bra PRODUCER;
    {consumer}
    bra END;
    PRODUCER:
    {producer}
    END:"""
    return Module.from_ptx(ptx(body, directives))


def change(direction: str, count: int) -> str:
    return f"setmaxnreg.{direction}.sync.aligned.u32 {count};"


def test_registers_move_from_one_warpgroup_to_the_others():
    # 65536 / 384 gives 168 a thread; 3 x 168 = 24 + 2 x 240.
    moving(change("dec", 24), change("inc", 240)).launch("k", grid=1, block=384)


@pytest.mark.parametrize(("producer", "consumer"), [(32, 240), (40, 240), (24, 248)])
def test_more_registers_than_were_given_back_deadlock(producer, consumer):
    with pytest.raises(Deadlock, match=r"setmaxnreg.*of the CTA's 64512 are free"):
        moving(change("dec", producer), change("inc", consumer)).launch("k", grid=1, block=384)


@pytest.mark.parametrize(
    ("producer", "consumer", "what"),
    [
        (change("dec", 176), change("inc", 176), "decrease"),
        (change("dec", 24), change("inc", 160), "increase"),
        (change("dec", 24) + change("dec", 32), "", "decrease"),
    ],
)
def test_a_change_in_the_wrong_direction_is_refused(producer, consumer, what):
    with pytest.raises(IllegalInstruction, match=what):
        moving(producer, consumer).launch("k", grid=1, block=384)


def test_a_warpgroup_changes_its_registers_together():
    one_warp = ".reg .pred one;\nsetp.lt.u32 one, t, 32;\n@!one bra END;\n" + change("dec", 24)
    with pytest.raises(IllegalInstruction, match="of one warpgroup executed different setmaxnreg"):
        moving(one_warp, "").launch("k", grid=1, block=384)


def test_register_counts_need_a_launch_bound():
    with pytest.raises(LaunchError, match="launch_bounds"):
        moving(change("dec", 24), "", "").launch("k", grid=1, block=384)
    moving(change("dec", 24), "", ".maxnreg 168").launch("k", grid=1, block=384)


@pytest.mark.parametrize("count", [16, 100, 264])
def test_a_register_count_outside_of_the_rules_is_a_syntax_error(count):
    with pytest.raises(PtxSyntaxError, match=f"register count {count}"):
        moving(change("dec", count), "")
