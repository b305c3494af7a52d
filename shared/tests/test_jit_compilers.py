"""Which compiler is chosen, in which order, and what is said when none serves."""

import os
import shutil

import pytest

from cake_shared.errors import BuildError
from cake_shared.jit import compilers
from cake_shared.target import TARGETS
from cake_shared.testing.tiny_package import fake_nvcc, runs, script, without_compilers

HOPPER = TARGETS["sm_90a"]


@pytest.fixture(autouse=True)
def bare(monkeypatch, tmp_path):
    without_compilers(monkeypatch)
    monkeypatch.setenv("CAKE_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture
def everywhere(monkeypatch, tmp_path):
    """An nvcc in each of the four places, each of its own version."""
    places = {
        "CAKE_NVCC": fake_nvcc(tmp_path / "chosen" / "nvcc", "13.0.1"),
        "CUDA_HOME": fake_nvcc(tmp_path / "home" / "bin" / "nvcc", "13.0.2"),
        "PATH": fake_nvcc(tmp_path / "path" / "nvcc", "13.0.3"),
        "PyPI's nvidia-cuda-nvcc": fake_nvcc(tmp_path / "pypi" / "cu13" / "bin" / "nvcc", "13.5.4"),
    }
    monkeypatch.setenv("CAKE_NVCC", str(places["CAKE_NVCC"]))
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(compilers, "_pypi_roots", lambda: [str(tmp_path / "pypi")])
    return places


def test_places_in_order(everywhere, monkeypatch):
    for place, path in everywhere.items():
        found = compilers.find_nvcc(HOPPER)
        assert (found.place, found.path) == (place, path)
        path.unlink()
        monkeypatch.delenv("CAKE_NVCC", raising=False)
    with pytest.raises(BuildError):
        compilers.find_nvcc(HOPPER)


@pytest.mark.parametrize("name", TARGETS)
def test_first_that_supports_the_target(everywhere, name, recwarn):
    found = compilers.find_nvcc(TARGETS[name])
    assert found.version == ("13.5.4" if name == "sm_107a" else "13.0.1")
    # Being passed over is worth a warning to whoever chose that compiler.
    said = [str(w.message) for w in recwarn if "is used instead" in str(w.message)]
    assert len(said) == (1 if name == "sm_107a" else 0)


@pytest.mark.parametrize("template", [":{home}", "{home}:", ":{home}:", "{missing}:{home}", " {home} "])
def test_cuda_home_with_stray_colons_and_missing_entries(monkeypatch, tmp_path, template):
    nvcc = fake_nvcc(tmp_path / "home" / "bin" / "nvcc", "13.0.88")
    monkeypatch.setenv("CUDA_HOME", template.format(home=tmp_path / "home", missing=tmp_path / "missing"))
    assert compilers.find_nvcc(HOPPER).path == nvcc


def test_a_later_entry_of_path_serves_when_an_earlier_is_too_old(monkeypatch, tmp_path):
    fake_nvcc(tmp_path / "old" / "nvcc", "11.8.89")
    new = fake_nvcc(tmp_path / "new" / "nvcc", "13.0.88")
    monkeypatch.setenv("PATH", f"{tmp_path / 'old'}{os.pathsep}{tmp_path / 'new'}{os.pathsep}{os.environ['PATH']}")
    assert compilers.find_nvcc(HOPPER).path == new


def test_one_line_names_the_four_places_the_reasons_and_the_remedy(monkeypatch, tmp_path):
    old = fake_nvcc(tmp_path / "old" / "nvcc", "11.8.89")
    monkeypatch.setenv("PATH", f"{tmp_path / 'old'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CUDA_HOME", f":{tmp_path / 'nowhere'}")
    with pytest.raises(BuildError) as caught:
        compilers.find_nvcc(HOPPER)
    message = str(caught.value)
    assert "\n" not in message
    for part in (
        "no nvcc for sm_90a (needs 12.0 or newer)",
        "CAKE_NVCC: not set",
        f"CUDA_HOME: {tmp_path / 'nowhere' / 'bin' / 'nvcc'} is not a file",
        f"PATH: {old} is 11.8.89",
        "PyPI's nvidia-cuda-nvcc: not installed",
        "pip install nvidia-cuda-nvcc",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("text", "reason"),
    [("exit 3", "--version answers ''"), ("echo gcc 12", "--version answers 'gcc 12'"), (None, "is not executable")],
)
def test_broken_compilers_are_named(monkeypatch, tmp_path, text, reason):
    path = tmp_path / "nvcc"
    if text is None:
        path.write_text("")
    else:
        script(path, text)
    monkeypatch.setenv("CAKE_NVCC", str(path))
    with pytest.raises(BuildError, match=f"CAKE_NVCC: .*{reason}"):
        compilers.find_nvcc(HOPPER)


def test_the_version_is_asked_once_and_again_after_the_compiler_changed(monkeypatch, tmp_path):
    path = fake_nvcc(tmp_path / "nvcc", "13.0.88")
    monkeypatch.setenv("CAKE_NVCC", str(path))
    for _ in range(3):
        assert compilers.find_nvcc(HOPPER).version == "13.0.88"
    assert runs(path) == 1
    fake_nvcc(path, "13.1.100")
    assert compilers.find_nvcc(HOPPER).version == "13.1.100"
    assert runs(path) == 2


@pytest.mark.parametrize("content", ["", "{", '{"version": 7}', '{"version": "new"}', "[]"])
def test_a_damaged_memo_of_the_version_is_ignored(monkeypatch, tmp_path, content):
    path = fake_nvcc(tmp_path / "nvcc", "13.0.88")
    monkeypatch.setenv("CAKE_NVCC", str(path))
    compilers.find_nvcc(HOPPER)
    (memo,) = (tmp_path / "cache" / "compilers").iterdir()
    memo.write_text(content)
    assert compilers.find_nvcc(HOPPER).version == "13.0.88"
    assert runs(path) == 2


def test_arch_lists_of_other_projects_decide_nothing(monkeypatch, everywhere):
    before = compilers.find_nvcc(HOPPER), HOPPER.gencode_flags
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", "9.0")
    assert (compilers.find_nvcc(HOPPER), HOPPER.gencode_flags) == before
    assert HOPPER.gencode_flags == ("-gencode", "arch=compute_90a,code=sm_90a")


def test_no_cxx_compiler_is_said(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("c++") is None
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: none of c\\+\\+, g\\+\\+, clang\\+\\+ is on PATH"):
        compilers.find_cxx()
