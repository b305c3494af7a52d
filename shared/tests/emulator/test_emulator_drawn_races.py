"""Programs drawn at random: one is accused exactly where two of its accesses are unordered, whatever the schedule.

Four warps read and write 16 bytes by ordinary and strong accesses of every width and meet at barriers of all, barriers
of some, arrivals and mbarriers, which warps initialise and take away on the way; bulk copies fill the bytes and read
them. While a program is drawn its order is kept in vector clocks, and no access is taken that is unordered with one
before, but for one in some programs.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from cake_shared.emulator import EmulatorError, Module, Options

ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3)]
WARPS, COPIES, BATCH, BATCHES = 4, 10, 40, 6
SIGNALS = 192  # offset of the mbarriers of copies
STRONG = {"st.volatile", "red", "poll", "count"}  # by a polling load, by an atomic whose result is read
WRITES = {"st", "st.volatile", "red", "count", "init", "inval"}
FREE = {*STRONG, "arrive", "wait"}  # need no order among themselves


@dataclass(frozen=True)
class Step:
    """What a warp, or a copy, does to some bytes, with the clocks of all warps and copies that it knows of."""

    warp: int
    clocks: tuple[int, ...]
    kind: str
    offset: int
    size: int

    def races_with(self, before: "Step") -> bool:
        """Tell whether an access that was drawn before is unordered with this one and conflicts."""
        if self.warp == before.warp or before.clocks[before.warp] <= self.clocks[before.warp]:
            return False
        apart = self.offset + self.size <= before.offset or before.offset + before.size <= self.offset
        both_free = self.kind in FREE and before.kind in FREE
        return not apart and not both_free and bool({self.kind, before.kind} & WRITES)


@dataclass
class Drawn:
    """A program with its order."""

    rng: random.Random
    kinds: list[str]
    races_left: int
    racy: bool = False
    clocks: list[list[int]] = field(default_factory=lambda: [[0] * (WARPS + COPIES) for _ in range(WARPS)])
    steps: list[Step] = field(default_factory=list)
    lines: list[list[str]] = field(default_factory=lambda: [[] for _ in range(WARPS)])
    named: int = 0
    counts: dict[int, int] = field(default_factory=dict)  # of mbarriers by offset; 0: nobody has used it yet
    ended: set[int] = field(default_factory=set)
    copies: int = 0
    loads: list[Step] = field(default_factory=list)
    stores: list[list[int]] = field(default_factory=lambda: [[] for _ in range(WARPS)])  # not waited for, by warp
    waits: int = 0

    def take(self, warps: list[int], kind: str, offset: int, size: int) -> bool:
        """Add one step of each warp unless that would be a race too many."""
        for warp in warps:
            self.clocks[warp][warp] += 1
        return self.add([Step(warp, tuple(self.clocks[warp]), kind, offset, size) for warp in warps])

    def add(self, new: list[Step]) -> bool:
        if any(step.races_with(before) for step in new for before in self.steps):
            if not self.races_left:
                return False
            self.races_left -= 1
            self.racy = True
        self.steps += new
        return True

    def join(self, tellers: list[int], hearers: list[int]) -> None:
        """Whatever the ones know the others know from here on."""
        known = [max(self.clocks[warp][k] for warp in tellers) for k in range(WARPS + COPIES)]
        for warp in hearers:
            self.clocks[warp] = [max(pair) for pair in zip(self.clocks[warp], known, strict=True)]
        for warp in range(WARPS):
            self.clocks[warp][warp] += 1

    def access(self, warp: int) -> None:
        kind = self.rng.choice(self.kinds)
        size = 4 if kind in ("red", "count") else self.rng.choice([1, 2, 4, 4, 8])
        offset = self.rng.randrange(16 // size) * size
        if not self.take([warp], kind, offset, size):
            return
        width, register = f"b{8 * size}", "wide" if size == 8 else "word"
        keep = f"st.global.{width} [at], {register};"
        # No two stores leave the same bytes: that would be forgiven.
        value = int.from_bytes(bytes([len(self.steps) % 120 + 1] * min(size, 8)), "little")
        text = {
            "ld": f"@lead ld.shared.{width} {register}, [cells+{offset}];",
            "poll": f"@lead ld.volatile.shared.{width} {register}, [cells+{offset}]; @lead {keep}",
            "red": f"@lead red.shared.add.u32 [cells+{offset}], 1;",
            "count": f"@lead atom.shared.add.u32 word, [cells+{offset}], 1; @lead {keep}",
        }
        store = (
            f"mov.b{max(32, 8 * size)} {register}, {value}; @lead {kind}.shared.{width} [cells+{offset}], {register};"
        )
        self.lines[warp].append(text.get(kind, store))

    def barrier(self, warp: int) -> None:
        """Initialise an mbarrier, or take away one that has been used."""
        used = [offset for offset, count in self.counts.items() if count and offset not in self.ended]
        if used and self.rng.random() < 0.4:
            offset = self.rng.choice(used)
            if self.take([warp], "inval", offset, 8):
                self.ended.add(offset)
                self.lines[warp].append(f"@lead mbarrier.inval.shared.b64 [cells+{offset}];")
        elif len(self.counts) < 12:
            offset = 64 + 8 * len(self.counts)
            assert self.take([warp], "init", offset, 8)
            self.counts[offset] = 0
            self.lines[warp].append(
                f"@lead mbarrier.init.shared.b64 [cells+{offset}], COUNT_{offset}_; bar.warp.sync -1;"
            )

    def copy(self, warp: int) -> None:
        """Fill the bytes, signalling an mbarrier of the copy's own, or read them."""
        if self.copies == COPIES:
            return
        self.clocks[warp][warp] += 1
        actor, signal, loads = WARPS + self.copies, f"[cells+{SIGNALS + 8 * self.copies}]", self.rng.random() < 0.5
        clocks = [*self.clocks[warp]]
        clocks[actor] = 1
        step = Step(actor, tuple(clocks), "st" if loads else "ld", 0, 16)
        if not self.add([step]):
            return
        self.copies += 1
        if loads:
            self.loads.append(step)
            load = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
            self.lines[warp] += [
                f"@lead mbarrier.arrive.expect_tx.shared.b64 _, {signal}, 16;",
                f"@lead {load} [cells], [from], 16, {signal};",
            ]
        else:
            self.stores[warp].append(actor)
            self.lines[warp].append(
                """fence.proxy.async.shared::cta; @lead cp.async.bulk.global.shared::cta.bulk_group [at], [cells], 16;
                @lead cp.async.bulk.commit_group;"""
            )

    def wait(self, warp: int) -> None:
        """Wait for the copies out that the warp has issued, or for a copy in of any warp."""
        self.clocks[warp][warp] += 1
        if self.stores[warp] and self.rng.random() < 0.5:
            for actor in self.stores[warp]:
                self.clocks[warp][actor] = 1
            self.stores[warp].clear()
            self.lines[warp].append("@lead cp.async.bulk.wait_group 0; bar.warp.sync -1;")
        elif self.loads:
            copy = self.rng.choice(self.loads)
            self.clocks[warp] = [max(pair) for pair in zip(self.clocks[warp], copy.clocks, strict=True)]
            self.lines[warp].append(self.wait_for(copy.warp - WARPS))

    def wait_for(self, copy: int) -> str:
        self.waits += 1
        wait = f"mbarrier.try_wait.parity.shared.b64 p, [cells+{SIGNALS + 8 * copy}], 0;"
        return f"X{self.waits}: {wait} @!p bra X{self.waits};"

    def finish(self) -> None:
        """Leave no copy without a wait."""
        for lines in self.lines:
            lines.append("@lead cp.async.bulk.wait_group 0; bar.warp.sync -1;")
        self.lines[0] += [self.wait_for(copy.warp - WARPS) for copy in self.loads]

    def meet(self) -> None:
        some = self.rng.sample(range(WARPS), self.rng.randrange(2, WARPS + 1))
        cut = self.rng.randrange(1, len(some))
        first, rest = some[:cut], some[cut:]
        fresh = [offset for offset, count in self.counts.items() if not count]
        how = self.rng.choice(["all", "some", "arrive", "mbarrier", "mbarrier"])
        if how == "all":
            some = list(range(WARPS))
            self.join(some, some)
            for warp in some:
                self.lines[warp].append("bar.sync 0;")
        elif how == "mbarrier" and fresh:
            offset = self.rng.choice(fresh)
            if not self.take(some, "arrive", offset, 8):
                return
            self.counts[offset] = 32 * len(first)
            for warp in first:
                self.lines[warp].append(f"mbarrier.arrive.shared.b64 _, [cells+{offset}];")
            self.join(first, rest)
            self.steps += [Step(warp, tuple(self.clocks[warp]), "wait", offset, 8) for warp in rest]
            wait = f"mbarrier.try_wait.parity.shared.b64 p, [cells+{offset}], 0;"
            for warp in rest:
                self.lines[warp].append(f"W{warp}_{offset}: {wait} @!p bra W{warp}_{offset};")
        elif how != "mbarrier" and self.named < 15:
            self.named += 1
            place = f"{self.named}, {32 * len(some)};"
            for warp in some:
                self.lines[warp].append(("bar.arrive " if how == "arrive" and warp in first else "bar.sync ") + place)
            self.join(some, rest if how == "arrive" else some)

    def text(self) -> str:
        parts = ""
        for warp, lines in enumerate(self.lines):
            parts += f"setp.eq.u32 p, warp, {warp};\n@!p bra N{warp};\n" + "\n".join(lines) + f"\nbra END;\nN{warp}:\n"
        signals = "".join(f"@first mbarrier.init.shared.b64 [cells+{SIGNALS + 8 * k}], 1; " for k in range(COPIES))
        for offset, count in self.counts.items():
            parts = parts.replace(f"COUNT_{offset}_", str(count or 1))
        return f""".version 8.7
.target sm_90a
.address_size 64
.visible .entry k(.param .u64 out, .param .u64 in) {{
.reg .b32 t, warp, word;
.reg .b64 at, wide, from;
.reg .pred p, lead, first;
.shared .align 16 .b64 cells[40];
mov.u32 t, %tid.x; setp.eq.u32 first, t, 0; shr.u32 warp, t, 5; and.b32 word, t, 31; setp.eq.u32 lead, word, 0;
ld.param.u64 at, [out]; ld.param.u64 from, [in];
{signals}
mov.u64 wide, 0;
@first st.shared.v2.b64 [cells], {{wide, wide}};
bar.sync 0;
{parts}
END: ret;
}}
"""


def draw(seed: int, kinds: list[str], copies: float) -> Drawn:
    rng = random.Random(seed)
    program = Drawn(rng, kinds, races_left=rng.choice([0, 1, 1]))
    for _ in range(rng.randrange(2, 9)):
        for warp in rng.sample(range(WARPS), WARPS):
            for _ in range(rng.randrange(5)):
                choose = rng.random()
                if choose < copies:
                    program.copy(warp) if rng.random() < 0.4 else program.wait(warp)
                else:
                    program.access(warp) if choose < 0.85 else program.barrier(warp)
        program.meet()
    program.finish()
    return program


def outcomes(program: Drawn) -> list[EmulatorError | None]:
    module, found = Module.from_ptx(program.text()), []
    for order, seed in ORDERS:
        options = Options(order=order, seed=seed, max_instructions=100_000)
        params = [np.zeros(4, np.uint64), np.arange(4, dtype=np.uint64)]
        try:
            module.launch("k", grid=1, block=32 * WARPS, params=params, options=options)
            found.append(None)
        except EmulatorError as error:
            found.append(error)
    return found


def wrongly_judged(seed: int, kinds: list[str], always: bool, copies: float = 0.0) -> str | None:
    program = draw(seed, kinds, copies)
    found = outcomes(program)
    shown = [type(error).__name__ for error in found if error is not None]
    fits = len(shown) == len(found) if program.racy and always else bool(shown) == program.racy
    if fits and set(shown) <= {"SharedRace", "BarrierMisuse", *({"UnwaitedResult"} if copies else ())}:
        return None
    return f"seed {seed}, racy {program.racy}: {shown}, {next((str(e) for e in found if e), 'no error')}"


# Nothing here tells a warp what others did but what is meant to.
PLAIN = ["ld", "st", "st", "st.volatile", "red", "red"]


@pytest.mark.parametrize("batch", range(BATCHES))
def test_copies_are_judged_with_the_accesses_around_them(batch):
    judged = [wrongly_judged(seed, PLAIN, True, 0.4) for seed in range(batch * BATCH, (batch + 1) * BATCH)]
    assert [each for each in judged if each] == []


@pytest.mark.parametrize("batch", range(BATCHES))
def test_a_race_shows_under_every_schedule_and_nothing_else_does(batch):
    judged = [wrongly_judged(seed, PLAIN, always=True) for seed in range(batch * BATCH, (batch + 1) * BATCH)]
    assert [each for each in judged if each] == []


@pytest.mark.parametrize("batch", range(BATCHES // 2))
def test_strong_reads_may_order_a_race_away_but_make_none(batch):
    kinds = ["ld", "st", "st", "st.volatile", "red", "poll", "count", "count"]
    judged = [wrongly_judged(seed, kinds, always=False) for seed in range(batch * BATCH, (batch + 1) * BATCH)]
    assert [each for each in judged if each] == []
