import pytest
import torch

from cake_shared.testing import parity
from cake_shared.testing.parity import Pair, Row, compare, report


class Twin:
    def __init__(self, name, program, offset):
        self.__name__, self.program, self.offset = name, program, offset


def rows(deterministic, free, device):
    exact = torch.linspace(1.0, 2.0, 8, dtype=torch.float64)
    results = [{"o": (exact * (1 + twin.offset)).float(), "h": None} for twin in (deterministic, free)]
    yield from compare("line", *results, {"o": exact, "h": None}, lambda name, dtype: 1e-6)


def run_report(monkeypatch, *twins):
    modules = {twin.__name__: twin for twin in twins}
    monkeypatch.setattr(parity.importlib, "import_module", modules.__getitem__)
    lines = []
    pair = Pair(*modules, lambda module, device: module.program, rows)
    return report(pair, lines.append), "\n".join(lines)


def test_one_program_is_said_and_passes(monkeypatch):
    faults, text = run_report(monkeypatch, Twin("det", "cpu/1", 0.0), Twin("free", "cpu/1", 0.0))
    assert faults == []
    assert "free against det on the CPU: same program, cpu/1" in text
    assert "equal" in text


def test_two_programs_may_differ_in_bits_within_the_error(monkeypatch):
    faults, text = run_report(monkeypatch, Twin("det", "cpu/1", 0.0), Twin("free", "fast/1", 5e-7))
    assert faults == []
    assert "programs cpu/1 and fast/1" in text
    assert "differ" in text


def test_one_program_with_other_bits_fails(monkeypatch):
    faults, text = run_report(monkeypatch, Twin("det", "cpu/1", 0.0), Twin("free", "cpu/1", 5e-7))
    assert faults == ["line, o: one program, but not the same bits"]
    assert "FAILS" in text


@pytest.mark.parametrize(
    ("offsets", "said"),
    [((1e-4, 1e-4), ["the deterministic twin is too far"]), ((0.0, 1e-4), ["the free twin is too far", "each other"])],
)
def test_a_twin_that_is_wrong_fails(monkeypatch, offsets, said):
    twins = Twin("det", "cpu/1", offsets[0]), Twin("free", "fast/1", offsets[1])
    faults, _ = run_report(monkeypatch, *twins)
    assert len(faults) == len(said)
    for fault, part in zip(faults, said):
        assert part in fault


def test_not_finite_is_a_fault():
    row = Row("c", "o", 0.0, float("inf"), float("inf"), False, 1e-6)
    assert len(row.faults(False)) == 2


def test_an_unknown_package_is_refused(capsys):
    with pytest.raises(SystemExit):
        parity.main(["cake_gdn"])
    assert "got cake_gdn, takes one of cake_gdn_det_train" in capsys.readouterr().err
