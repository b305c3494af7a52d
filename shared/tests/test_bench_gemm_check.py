"""The check of the GEMM packages: what is wrong decides the status, and what was found is written."""

import json

import pytest

from cake_shared.bench.gemm_check import Findings, GemmCheck


@pytest.mark.parametrize("wrong", [False, True])
def test_status_and_file_follow_what_was_found(tmp_path, monkeypatch, capsys, wrong):
    def measure():
        found = Findings(errors={"one": 1.234e-7, "two": 2e-7})
        if wrong:
            found.refuse("two", "error 2.00e-07, limit 1.0e-07")
        return found

    def launch():
        raise AssertionError("only under a tool")

    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "a GPU")
    monkeypatch.setattr("cake_shared.bench.gemm_check.gpu_facts", lambda: {"driver": "1.0"})
    monkeypatch.setattr("cake_shared.bench.gemm_check.target_of", lambda: type("T", (), {"name": "sm_90a"}))
    monkeypatch.setattr("cake_shared.bench.gemm_check.jit.build_module", lambda package, target: tmp_path)
    (tmp_path / "manifest.json").write_text('{"compiler": "13.0"}')
    script = tmp_path / "packages" / "dense_projection_gemm" / "benchmarks" / "check_split.py"
    check = GemmCheck("dense_projection_gemm", "1.0", script, "x.json", "a check", 8, measure, launch)
    assert check.main(["--out", str(tmp_path / "x.json"), "--commit", "abc"]) == int(wrong)
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["errors"] == {"one": 1.23e-7, "two": 2e-7}
    assert (result["cases"], result["passed"], result["failed"]) == (2, 2 - wrong, int(wrong))
    assert result["failures"] == ({"two": "error 2.00e-07, limit 1.0e-07"} if wrong else {})
    assert result["programs"]
    assert ("two" in capsys.readouterr().err) == wrong
