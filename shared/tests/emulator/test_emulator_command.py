"""The emulator's command line: what it prints, and that wrong arguments end with a sentence."""

import pytest

from cake_shared.emulator.__main__ import main

KERNELS = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry store(.param .u64 out, .param .f32 value)
{
    .reg .b64 %rd<4>; .reg .f32 %f1; .reg .b32 %r1;
    ld.param.u64 %rd1, [out];
    ld.param.f32 %f1, [value];
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %rd2, %r1, 4;
    add.u64 %rd3, %rd1, %rd2;
    st.global.f32 [%rd3], %f1;
    ret;
}
.visible .entry nothing() { ret; }
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "kernels.ptx"
    path.write_text(KERNELS)
    return str(path)


def test_a_run_prints_counters_and_the_arrays_asked_for(file, capsys):
    arguments = ["--kernel", "store", "--block", "4", "--arg", "f32:4", "--arg", "2.5", "--dump", "0", "--lines", "1"]
    assert main(["run", file, *arguments]) == 0
    shown = capsys.readouterr().out
    assert "bytes global_write  16" in shown
    assert "argument 0, 4 of 4 elements from 0 on: [2.5 2.5 2.5 2.5]" in shown


def test_a_dump_may_be_of_a_part(file, capsys):
    arguments = ["run", file, "--kernel", "store", "--block", "128", "--arg", "f32:4096:ones", "--arg", "2.5"]
    assert main([*arguments, "--dump", "0,126,4", "--dump", "0"]) == 0
    shown = capsys.readouterr().out
    assert "argument 0, 4 of 4096 elements from 126 on: [2.5 2.5 1.  1. ]" in shown
    assert "argument 0, 64 of 4096 elements from 0 on: [2.5 " in shown


def test_a_trace_is_of_one_warp_or_of_a_cta(file, capfd):
    arguments = ["run", file, "--kernel", "store", "--grid", "2", "--block", "64", "--arg", "f32:64", "--arg", "2.5"]
    assert main([*arguments, "--trace", "1,1"]) == 0
    one = capfd.readouterr().err.splitlines()
    assert len(one) == 7
    assert all(line.startswith("cta 1 warp 1 ") for line in one)
    assert main([*arguments, "--trace", "1"]) == 0
    both = capfd.readouterr().err.splitlines()
    assert len(both) == 14
    assert {line.split()[3] for line in both} == {"0", "1"}
    assert main([*arguments, "--trace", "1,1,1"]) == 2


def test_the_kernels_are_listed(file, capsys):
    assert main(["list", file]) == 0
    shown = capsys.readouterr().out
    assert "store(.u64[8] out, .f32[4] value): 7 instructions, 0 bytes shared" in shown
    assert "nothing(): 1 instructions" in shown


def test_a_detector_that_fires_gives_status_one(file, capsys):
    assert main(["run", file, "--kernel", "store", "--arg", "f32:4", "--arg", "1"]) == 1
    assert "OutOfBounds" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--kernel: one of "),
        (["--kernel", "stor"], "'stor' names 0 kernels"),
        (["--kernel", "store", "--arg", "f32:4"], "the kernel takes 2 parameters, got 1"),
        (["--kernel", "store", "--arg", "f32:many"], "--arg 0: takes DTYPE:COUNT"),
        (["--kernel", "store", "--arg", "many"], "--arg 0: takes a number or DTYPE:COUNT, got 'many'"),
        (["--kernel", "store", "--arg", "f32:4:nowhere"], "nowhere"),
        (["--kernel", "store", "--block", "4", "--arg", "f32:4", "--arg", "1", "--dump", "1"], "--dump: got 1, takes"),
        (["--kernel", "nothing", "--stop", "9999"], "--stop: no warp came to an instruction of PTX line 9999"),
        (["--kernel", "nothing", "--trace", "1"], "--trace: got CTA 1, takes 0 to 0"),
        (["--kernel", "nothing", "--block", "64", "--trace", "0,2"], "--trace: got warp 2, takes 0 to 1"),
        (["--kernel", "nothing", "--dump-shared", "0,4"], "--dump-shared: takes effect at a stop"),
    ],
)
def test_wrong_arguments_end_with_a_sentence(file, arguments, message, capsys):
    assert main(["run", file, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_files_and_architectures_that_are_not_there(file, tmp_path, capsys):
    assert main(["run", str(tmp_path / "absent.ptx")]) == 2
    assert "absent.ptx" in capsys.readouterr().err
    assert main(["run", file, "--target", "sm_80"]) == 1
    assert "the text is for sm_90a, the target is sm_80" in capsys.readouterr().err


def test_a_size_that_is_no_number_is_refused_by_name(file, capsys):
    with pytest.raises(SystemExit):
        main(["run", file, "--block", "4x"])
    assert "argument --block: takes whole numbers with commas between, got '4x'" in capsys.readouterr().err
