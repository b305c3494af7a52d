"""Programmatic dependent launches: a missing or late griddepcontrol.wait is an error, whatever the order."""

import functools
import pathlib

import numpy as np
import pytest

from cake_shared.emulator import MissingGridWait, Module, Options, Stream

SOURCE = pathlib.Path(__file__).parent / "kernels" / "dependent_mutants.cu"
ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)]
WRONG = {
    1: "never waits",
    2: "reads before the wait",
    4: "one warp waits, the others do not ask it",
    5: "overwrites before the wait what the producer reads",
    6: "overwrites before the wait what the producer writes",
    7: "a bulk copy in is issued before the wait",
    9: "a bulk copy out is issued before the wait",
}
RIGHT = {
    0: "every thread waits",
    3: "one thread waits for its CTA",
    8: "the copying thread waits for those that use the copy",
    10: "a CTA without shared memory",
}


@functools.cache
def module() -> Module:
    return Module.from_cuda(str(SOURCE), target="sm_90a")


class Chain:
    """Launches of one stream over the same arrays."""

    def __init__(self, order: tuple[str, int], **how: object):
        self.stream = Stream(Options(order=order[0], seed=order[1]), **how)
        self.data, self.x, self.y, self.z = (np.arange(256, dtype=np.uint32) + k for k in range(4))
        self.table = np.full(256, 5, np.uint32)

    def launch(self, kernel: str, *params: np.ndarray, programmatic: bool) -> None:
        self.stream.launch(module(), kernel, grid=2, block=128, params=params, programmatic=programmatic)

    def produce(self, programmatic: bool = False) -> None:
        self.launch("produce", self.data, self.x, programmatic=programmatic)

    def between(self, how: str) -> None:
        self.launch(f"between_{how}", self.z, programmatic=True)

    def consume(self, variant: int, programmatic: bool = True) -> None:
        self.launch(f"consume_{variant}", self.data, self.x, self.table, self.y, programmatic=programmatic)


def line_of(mark: str) -> int:
    return next(k for k, row in enumerate(SOURCE.read_text().splitlines(), 1) if row.endswith(f"// {mark}"))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("variant", RIGHT, ids=RIGHT.get)
def test_a_consumer_that_waits_reads_what_was_produced(variant, order):
    chain = Chain(order)
    chain.produce()
    chain.consume(variant)
    np.testing.assert_array_equal(chain.y, np.arange(256) * 2 + 5)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("variant", WRONG, ids=WRONG.get)
def test_a_consumer_that_does_not_is_caught(variant, order):
    chain = Chain(order)
    chain.produce()
    with pytest.raises(MissingGridWait) as caught:
        chain.consume(variant)
    assert caught.value.source.rpartition("/")[2].startswith(SOURCE.name)
    assert "kernel produce" in str(caught.value)


def test_both_source_lines_are_named():
    chain = Chain(ORDERS[0])
    chain.produce()
    with pytest.raises(MissingGridWait, match=f"wrote at .*{SOURCE.name}:{line_of('PRODUCER')}") as caught:
        chain.consume(1)
    assert caught.value.source.endswith(f"{SOURCE.name}:{line_of('CONSUMER')}")


def test_an_ordinary_launch_needs_no_wait():
    chain = Chain(ORDERS[0])
    chain.produce()
    chain.consume(1, programmatic=False)
    np.testing.assert_array_equal(chain.y, np.arange(256) * 2 + 5)


def test_a_launch_after_synchronize_overlaps_nothing():
    chain = Chain(ORDERS[0])
    chain.produce()
    chain.stream.synchronize()
    chain.consume(1)


def test_a_wait_covers_everything_where_the_launch_between_waits():
    chain = Chain(ORDERS[0])
    chain.produce()
    chain.between("waits")
    chain.consume(0)
    np.testing.assert_array_equal(chain.y, np.arange(256) * 2 + 5)


def test_a_wait_does_not_reach_beyond_a_launch_that_never_waits():
    chain = Chain(ORDERS[0])
    chain.produce()
    chain.between("never_waits")
    with pytest.raises(MissingGridWait, match=r"executes no griddepcontrol\.wait"):
        chain.consume(0)


def test_what_a_launch_may_overlap_depends_on_when_the_one_before_let_it_start():
    chain = Chain(ORDERS[0])
    chain.produce()
    chain.between("starts_late")
    chain.consume(2)  # before its wait it reads what the producer wrote, whose end the launch between has waited for
    chain = Chain(ORDERS[0])
    chain.produce()
    chain.between("waits")
    with pytest.raises(MissingGridWait):
        chain.consume(2)


def test_an_unknown_predecessor_may_write_every_array():
    chain = Chain(ORDERS[0], unknown_before=True)
    chain.produce(programmatic=True)
    np.testing.assert_array_equal(chain.x, np.arange(256) * 2)
    chain = Chain(ORDERS[0], unknown_before=True)
    with pytest.raises(MissingGridWait, match="what ran before"):
        chain.consume(0)  # reads its table before it waits
    with pytest.raises(MissingGridWait, match="what ran before"):
        module().launch("consume_0", 2, 128, [chain.data, chain.x, chain.table, chain.y], programmatic=True)


@pytest.mark.parametrize("odd", [0, 1])
def test_launches_that_write_neighbouring_halves_of_words_do_not_clash(odd):
    x = np.zeros(256, np.uint16)
    stream = Stream()
    stream.launch(module(), "write_halves", 1, 128, [x, 0])
    if odd:
        stream.launch(module(), "write_halves", 1, 128, [x, 1], programmatic=True)
    else:
        with pytest.raises(MissingGridWait):
            stream.launch(module(), "write_halves", 1, 128, [x, 0], programmatic=True)


def test_accesses_are_compared_whatever_the_number_of_threads():
    texts = set()
    for threads in (1, 4):
        chain = Chain(ORDERS[0])
        chain.stream.options = Options(threads=threads)
        chain.produce()
        with pytest.raises(MissingGridWait) as caught:
            chain.consume(1)
        texts.add(str(caught.value))
    assert len(texts) == 1
