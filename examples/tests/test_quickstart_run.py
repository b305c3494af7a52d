"""The quickstart's training: it learns, its bits repeat, it resumes, and its proofs can fail."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cake_shared.errors import UnsupportedArchError
from quickstart import backend
from quickstart import model as quickstart_model
from quickstart.__main__ import main, parser
from quickstart.config import Config
from quickstart.data import load_corpus, make_pack
from quickstart.model import ByteModel, convolve
from quickstart.proofs import Proof, prove_packs
from quickstart.report import new_folder, smooth
from quickstart.train import CHECKPOINT, CheckpointError, Run, learning_rate, read_checkpoint

TINY = {"steps": 6, "width": 32, "layers": 2, "head_dim": 16, "tokens": 160, "max_document": 90}
FLAGS = [part for name, value in TINY.items() for part in (f"--{name.replace('_', '-')}", str(value))]
EXAMPLES = Path(__file__).resolve().parents[1]


@pytest.fixture(autouse=True)
def torch_settings_as_before():
    threads, fill = torch.get_num_threads(), torch.utils.deterministic.fill_uninitialized_memory
    deterministic = torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)
    torch.utils.deterministic.fill_uninitialized_memory = fill


@pytest.fixture
def text(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(24):
        words = " ".join(f"word{(i * j) % 7}" for j in range(3 + i))
        (folder / f"{i:02}.txt").write_text(f"File {i} says {words}.\n\nAnd then it says {words[::-1]}.\n")
    return folder


def run_of(text, **changes):
    config = Config(**{**TINY, **changes})
    return Run(config, load_corpus(text, config.max_document), "cpu", torch.device("cpu"))


def steps(run, number):
    for _ in range(number):
        run.advance()
    return run


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps: got 0, takes 2 or more"),
        ({"width": 100, "head_dim": 64}, "width: got 100, takes a positive multiple of head_dim, 64"),
        ({"width": 48, "head_dim": 48}, "width: got 48, takes a multiple of 32"),
        ({"head_dim": 20}, "head_dim: got 20, takes a positive multiple of 16"),
        ({"layers": 0}, "layers: got 0, takes 1 or more"),
        ({"tokens": 10}, "tokens: got 10, takes 64 or more"),
        ({"max_document": 500}, "max_document: got 500, takes at most tokens, 160"),
        ({"learning_rate": 0.0}, "learning_rate: got 0.0, takes a value between 0 and 1"),
        ({"seed": -1}, "seed: got -1, takes 0 to"),
    ],
)
def test_settings_that_make_no_sense_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        Config(**{**TINY, **changes})


def test_the_convolution_stops_at_the_start_of_a_document():
    documents = [b"abcdefg", b"h", b"ijklmnopqrs"]
    pack = make_pack(documents, 24)
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(1, 24, 6, generator=generator), torch.randn(4, 6, generator=generator)
    got = convolve(x, weight, pack.position)
    for begin, end in zip(pack.cu_seqlens, pack.cu_seqlens[1:]):
        part = torch.nn.functional.pad(x[:, begin:end].transpose(1, 2), (3, 0))
        expected = torch.nn.functional.conv1d(part, weight.flip(0).T[:, None], groups=6).transpose(1, 2)
        torch.testing.assert_close(got[:, begin:end], expected)


def test_training_lowers_the_loss(text):
    run = steps(run_of(text, steps=40), 40)
    assert run.losses[0] == pytest.approx(5.55, abs=0.15)
    assert sum(run.losses[-5:]) / 5 < 3.5
    held_out, count = run.held_out_loss()
    assert held_out < 4.0
    assert count == sum(map(len, run.corpus.held_out))


def test_the_loss_is_over_the_bytes_of_the_documents_and_nothing_else(text):
    run = run_of(text)
    documents = run.packs[0]
    full = run.model.loss(make_pack(documents, run.config.tokens)).item()
    alone = [run.model.loss(make_pack([document])).item() * len(document) for document in documents]
    assert full == pytest.approx(sum(alone) / sum(map(len, documents)), rel=1e-3)


def test_a_resumed_run_ends_with_the_same_bits(text, tmp_path):
    whole = steps(run_of(text), 6)
    first = steps(run_of(text), 3)
    first.save(tmp_path)
    second = run_of(text)
    second.load(read_checkpoint(tmp_path))
    steps(second, 3)
    assert second.weights_sha256() == whole.weights_sha256()
    assert second.losses == whole.losses
    assert second.weights_sha256() != first.weights_sha256()
    assert steps(run_of(text, seed=1), 6).weights_sha256() != whole.weights_sha256()


def test_activation_checkpointing_changes_no_bit(text, monkeypatch):
    whole = steps(run_of(text), 3)
    monkeypatch.setattr(quickstart_model, "checkpoint", lambda layer, x, pack, **_: layer(x, pack))
    assert steps(run_of(text), 3).weights_sha256() == whole.weights_sha256()


def test_checkpoints_that_cannot_be_used_are_refused(text, tmp_path):
    with pytest.raises(CheckpointError, match=r"holds no checkpoint\.pt"):
        read_checkpoint(tmp_path)
    run = steps(run_of(text), 1)
    run.save(tmp_path)
    state = read_checkpoint(tmp_path)
    (text / "00.txt").write_text("Something else.")
    with pytest.raises(CheckpointError, match="the text changed since the checkpoint"):
        run_of(text).load(state)
    path = tmp_path / CHECKPOINT
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(CheckpointError, match="is damaged"):
        read_checkpoint(tmp_path)
    torch.save({"step": 1}, path)
    with pytest.raises(CheckpointError, match="lacks backend, config"):
        read_checkpoint(tmp_path)


def test_a_document_has_the_same_bits_in_every_pack(text):
    proofs = prove_packs(steps(run_of(text), 2))
    assert [proof.holds for proof in proofs] == [True, True]
    assert all(list(proof.hashes) == ["alone", "first", "last", "among others"] for proof in proofs)
    assert proofs[0].hashes["alone"] != proofs[1].hashes["alone"]


def test_a_model_that_looks_across_documents_is_caught(text, monkeypatch):
    def leaking(x, weight, position):
        return convolve(x, weight, torch.full_like(position, 100))

    monkeypatch.setattr(quickstart_model, "convolve", leaking)
    proofs = prove_packs(steps(run_of(text), 2))
    assert [proof.holds for proof in proofs] == [False, False]
    assert "DIFFERENT" in proofs[0].text()


def test_the_weights_drawn_do_not_depend_on_the_global_generator():
    config = Config(**TINY)
    torch.manual_seed(1)
    one = ByteModel(config, "cpu").state_dict()
    torch.manual_seed(2)
    two = ByteModel(config, "cpu").state_dict()
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_the_learning_rate_warms_up_and_falls():
    config = Config(steps=100)
    rates = [learning_rate(config, step) for step in range(100)]
    assert max(rates) == pytest.approx(config.learning_rate)
    assert rates.index(max(rates)) in (4, 5)
    assert rates[-1] < 0.11 * config.learning_rate


def test_folders_are_never_reused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [str(new_folder(None)) for _ in range(3)] == [f"runs/quickstart{tail}" for tail in ("", "-2", "-3")]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("precious")
    with pytest.raises(FileExistsError, match=r"takes a new or an empty folder$"):
        new_folder(tmp_path / "mine")
    (tmp_path / "mine" / CHECKPOINT).write_text("a run")
    with pytest.raises(FileExistsError, match=r"\(or --resume .*mine\)$"):
        new_folder(tmp_path / "mine")


def test_a_running_mean_starts_with_what_there_is():
    assert smooth([4.0, 2.0, 0.0, 2.0], 2) == [4.0, 3.0, 1.0, 1.0]


def test_a_gpu_that_the_records_do_not_serve_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "A GPU")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))

    def refuse(package, architecture):
        raise UnsupportedArchError(f"{package} has no program for {architecture}")

    monkeypatch.setattr(backend, "require_programs", refuse)
    chosen, reason = backend.choose_backend("auto", 128)
    assert chosen == "cpu"
    assert reason == "there is A GPU, but cake_gdn_det_train has no program for sm_90a"
    with pytest.raises(UnsupportedArchError, match="no program for sm_90a"):
        backend.choose_backend("cuda", 128)
    monkeypatch.setattr(backend, "require_programs", lambda package, architecture: ())
    assert backend.choose_backend("auto", 128) == ("cuda", "A GPU, the records serve every stage on sm_90a")
    assert backend.choose_backend("auto", 16) == ("cpu", "the CUDA programs take heads of 128, these have 16")
    with pytest.raises(ValueError, match="head_dim: got 16, takes 128 with --backend cuda"):
        backend.choose_backend("cuda", 16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert backend.choose_backend("auto", 128) == ("cpu", "torch sees no CUDA device")
    with pytest.raises(ValueError, match="backend: got cuda, takes cpu or auto here"):
        backend.choose_backend("cuda", 128)


def test_help_shows_the_options():
    shown = parser().format_help()
    assert all(f"--{option}" in shown for option in ("steps", "width", "seed", "backend", "data", "resume"))
    assert "(default: 110)" in shown
    assert "(default: 0)" in shown
    assert shown.count("runs/quickstart") == 1
    assert "None)" not in shown
    assert "False)" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "8"], "steps: got 8, takes 6, the setting of the run in"),
        (["--seed", "3"], "seed: got 3, takes 0, the setting of the run in"),
        (["--backend", "cuda"], "backend: got cuda, takes cpu, the setting of the run in"),
        (["--out", "elsewhere"], "out: got elsewhere, takes nothing with resume"),
    ],
)
def test_a_resumed_run_keeps_its_settings(arguments, message, text, tmp_path, capsys):
    steps(run_of(text), 1).save(tmp_path)
    assert main([*FLAGS, "--data", str(text), "--resume", str(tmp_path), *arguments]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "0"], "steps: got 0"),
        (["--data", "nowhere"], "data: nowhere does not exist"),
        (["--resume", "nowhere"], "nowhere holds no checkpoint.pt"),
        (["--stop-at", "7"], "stop-at: got 7, takes 1 to the number of steps, 6"),
    ],
)
def test_bad_input_ends_with_a_sentence(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main([*FLAGS, *arguments]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def command(*arguments):
    path = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    return [sys.executable, "-m", "quickstart", *FLAGS, *arguments], {**os.environ, "PYTHONPATH": path}


def test_the_whole_of_it_from_the_command_line(text, tmp_path):
    arguments, environment = command("--data", str(text))
    done = subprocess.run(arguments, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("equal, as promised") == 3
    folder = tmp_path / "runs" / "quickstart"
    report = json.loads((folder / "report.json").read_text())
    assert report["step"] == len(report["loss_nats_per_byte"]) == 6
    assert [proof["holds"] for proof in report["proofs"]] == [True, True, True]
    assert set(report["proofs"][0]["hashes"].values()) == {report["weights_sha256"]}
    assert report["why_this_backend"] in done.stdout
    assert (folder / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_ctrl_c_leaves_a_checkpoint_that_goes_on_with_the_same_bits(text, tmp_path):
    arguments, environment = command("--data", str(text), "--steps", "300", "--out", "run", "--no-proofs")
    child = subprocess.Popen(arguments, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    # Its text, then a line every 30 steps.
    assert any("30/300" in line for line in iter(child.stdout.readline, ""))
    child.send_signal(signal.SIGINT)
    rest = child.stdout.read()
    assert child.wait(timeout=60) == 130
    assert "To go on:" in rest
    assert "--resume run" in rest
    state = read_checkpoint(tmp_path / "run")
    assert 30 <= state["step"] < 300
    further = state["step"] + 20
    settings = ("--steps", "300", "--stop-at", str(further))
    arguments, environment = command("--data", str(text), "--resume", "run", *settings)
    assert subprocess.run(arguments, env=environment, cwd=tmp_path, stdout=subprocess.PIPE).returncode == 0
    straight = steps(run_of(text, steps=300), further)
    resumed = run_of(text, steps=300)
    resumed.load(read_checkpoint(tmp_path / "run"))
    assert resumed.step == further
    assert resumed.weights_sha256() == straight.weights_sha256()


def test_a_broken_promise_ends_with_status_one(text, tmp_path, monkeypatch, capsys):
    broken = Proof("Title", "reason", {"one": "a", "two": "b"})
    monkeypatch.setattr("quickstart.__main__.prove_packs", lambda run: [broken])
    monkeypatch.setattr("quickstart.__main__.prove_runs", lambda run, folder, data: Proof("Runs", "why", {"one": "a"}))
    assert main([*FLAGS, "--data", str(text), "--out", str(tmp_path / "run")]) == 1
    assert "DIFFERENT: the promise is broken" in capsys.readouterr().out
    report = json.loads((tmp_path / "run" / "report.json").read_text())
    assert [proof["holds"] for proof in report["proofs"]] == [True, False]
