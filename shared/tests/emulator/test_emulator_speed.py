"""The committed measurements of the emulator's speed: what they say, and that EMULATOR.md quotes them."""

import json
from pathlib import Path

import pytest

from cake_shared.emulator import native, speed

PAGE = Path(__file__).parents[2] / "EMULATOR.md"


@pytest.fixture
def result():
    return json.loads(speed.RESULTS.read_text())


def test_the_committed_measurement_meets_the_demands(result):
    assert speed.shortfalls(result) == []
    assert set(result["kernels"]) == {"arithmetic", "shared_tile"}


def test_the_page_quotes_both_measurements():
    page = PAGE.read_text()
    assert speed.renewed(page) == page
    for path in (speed.RESULTS, speed.RESULTS_AVX2):
        begin, end = speed.markers(path)
        assert speed.markdown(json.loads(path.read_text())) in page.partition(begin)[2].partition(end)[0]


def test_what_is_too_slow_is_named(result):
    slow = json.loads(json.dumps(result))
    slow["kernels"]["arithmetic"]["cheap"] = 29.9
    slow["build_seconds"]["wall"] = 41.0
    assert len(speed.shortfalls(slow)) == 2


def test_rates_are_measured():
    rates = speed.kernel_rates()
    assert all(rate > 0 for by_detectors in rates.values() for rate in by_detectors.values())


def test_every_source_is_built_once():
    assert sorted(" ".join(native._UNITS).split()) == sorted(path.stem for path in native.SOURCES.glob("*.cpp"))
