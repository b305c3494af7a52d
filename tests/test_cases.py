import importlib.util
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
spec = importlib.util.spec_from_file_location("cases_waiting", Path(__file__).with_name("cases_waiting.py"))
cases = importlib.util.module_from_spec(spec)
spec.loader.exec_module(cases)

TESTS = [
    *ROOT.glob("shared/tests/test_*.py"),
    *ROOT.glob("shared/src/cake_shared/testing/gdn_suite/*.py"),
    *ROOT.glob("packages/*/tests/test_*.py"),
    *ROOT.glob("tests/test_*.py"),
]


def ids_with_tests():
    """Ids in the names of test functions and classes."""
    names = []
    for path in TESTS:
        names += re.findall(r"^\s*(?:def|class) (\w*[tT]est\w*)", path.read_text(), re.M)
    return {
        found.upper()
        for name in names
        for found in re.findall(r"(?:(?<=_)|(?<=Test))(?:[Uu]\d\d|[Cc][Ff]\d)(?=_|$)", name)
    }


def test_every_known_case_is_tested_or_waits():
    assert len(set(cases.KNOWN)) == len(cases.KNOWN)
    assert ids_with_tests() - set(cases.KNOWN) == set(), "a test names a case that is not known"
    places = [*ids_with_tests(), *cases.TESTED_AS, *cases.WAITING]
    assert set(cases.KNOWN) - set(places) == set(), "cases without a test or a reason"
    assert sorted(places) == sorted(set(places)), "cases in two places"
    assert set(places) <= set(cases.KNOWN)


@pytest.mark.parametrize("case", cases.TESTED_AS)
def test_tests_of_other_names_exist(case):
    for path, name in cases.TESTED_AS[case]:
        assert f"def {name}(" in (ROOT / path).read_text()
