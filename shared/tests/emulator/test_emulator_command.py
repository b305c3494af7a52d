"""The emulator's command line: what it prints, and that wrong arguments end with a sentence."""

import ctypes

import pytest

from cake_shared.emulator.__main__ import main
from cake_shared.emulator.conformance.__main__ import main as conformance

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
    assert one[3].endswith("  mul.wide.u32 %rd2, %r1, 4  | lane 0: %r1 0x20")
    assert "  st.global.f32 [%rd3], %f1  | lane 0: %rd3 0x" in one[5]
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
        ([], "--kernel: the file has 2 kernels, name one: nothing, store"),
        (["--kernel", "stor"], "'stor' names 0 kernels"),
        (["--kernel", "store", "--arg", "f32:4"], "the kernel takes 2 parameters (.u64[8] out, .f32[4] value), got 1"),
        (["--kernel", "store", "--arg", "f32:many"], "--arg 0: takes DTYPE:COUNT"),
        (
            ["--kernel", "store", "--arg", "many"],
            "--arg 0: takes a number, DTYPE=NUMBER, DTYPE:COUNT or (MEMBER,...), got 'many'",
        ),
        (["--kernel", "store", "--arg", "f32:4:nowhere"], "nowhere"),
        (["--kernel", "store", "--block", "4", "--arg", "f32:4", "--arg", "1", "--dump", "1"], "--dump: got 1, takes"),
        (["--kernel", "nothing", "--stop", "9999"], "--stop: no lane executed an instruction of PTX line 9999"),
        (["--kernel", "nothing", "--trace", "1"], "--trace: got CTA 1, takes 0 to 0"),
        (["--kernel", "nothing", "--block", "64", "--trace", "0,2"], "--trace: got warp 2, takes 0 to 1"),
        (["--kernel", "nothing", "--dump-shared", "0,4"], "--dump-shared: takes effect at a stop"),
        (["--kernel", "store", "--arg", "u32:99999999999999", "--arg", "1"], "--arg 0: 99999999999999 elements of u32"),
        (
            ["--kernel", "store", "--arg", "f32:4", "--arg", "1e300"],
            "parameter 1 (value, .f32, 4 bytes) cannot hold 1e+300",
        ),
        (
            ["--kernel", "store", "--arg", "99999999999999999999", "--arg", "1"],
            "parameter 0 (out, .u64, 8 bytes) cannot hold",
        ),
        (
            ["--kernel", "store", "--arg", "nan", "--arg", "1"],
            "parameter 0 (out, .u64, 8 bytes) takes an integer, got nan",
        ),
        (
            ["--kernel", "store", "--arg", "i8=200", "--arg", "1"],
            "--arg 0: i8 takes whole numbers from -128 to 127, got 200",
        ),
        (["--kernel", "store", "--arg", "f16=1e9", "--arg", "1"], "--arg 0: f16 cannot hold 1e9"),
        (["--kernel", "store", "--arg", "x9=1", "--arg", "1"], "--arg 0: takes DTYPE=NUMBER, DTYPE of f16,"),
        (["--kernel", "store", "--arg", "(f32:4,7)", "--arg", "1"], "--arg 0, member 1: takes DTYPE=NUMBER"),
        (["--kernel", "nothing", "--cluster", "0,2"], "cluster takes positive sizes, or zeros alone"),
        (["--kernel", "nothing", "--seed", "-1"], "seed takes a whole number from 0"),
        (["--kernel", "nothing", "--stop", "-1"], "--stop: takes LINE or FILE:LINE, counted from 1, got '-1'"),
        (["--kernel", "nothing", "--flag=-DX"], "--flag: goes to nvcc, which a .ptx file does not meet"),
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


BROKEN = (
    KERNELS
    + """.visible .entry bad() { .reg .b64 %rd<4>;
    add.f32x2 %rd1, %rd2, %rd3;
    ret;
}
"""
)


def test_a_kernel_that_cannot_be_run_is_listed_as_such(tmp_path, capsys):
    path = tmp_path / "kernels.ptx"
    path.write_text(BROKEN)
    assert main(["list", str(path)]) == 1
    shown = capsys.readouterr().out
    assert "store(.u64[8] out, .f32[4] value): 7 instructions" in shown
    assert (
        "bad(): UnsupportedInstruction: add.f32x2: exists on sm_100 and later, the target is sm_90a [kernel bad, "
        in shown
    )
    assert main(["run", str(path), "--kernel", "nothing"]) == 0
    assert main(["run", str(path), "--kernel", "bad"]) == 1
    assert "add.f32x2" in capsys.readouterr().err


def test_the_target_is_the_texts_own_unless_another_is_asked_for(tmp_path, capsys):
    path = tmp_path / "kernels.ptx"
    path.write_text(BROKEN.replace("sm_90a", "sm_100a"))
    assert main(["list", str(path)]) == 0
    assert main(["list", str(path), "--target", "sm_90a"]) == 1
    assert "the text is for sm_100a, the target is sm_90a" in capsys.readouterr().err
    path.write_text(BROKEN.replace("sm_90a", "sm_90"))
    assert main(["run", str(path), "--kernel", "nothing", "--target", "sm_103a"]) == 0


SHARED = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry fill()
{
    .reg .b32 %r<4>; .shared .align 16 .b8 words[128];
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, words;
    mad.lo.u32 %r3, %r1, 4, %r2;
    st.shared.u32 [%r3], %r1;
    bar.sync 0;
    ret;
}
"""
TENSOR = """.version 8.7
.target sm_100a
.address_size 64
.visible .entry fill()
{
    .reg .b32 %r<4>; .shared .align 16 .b32 place;
    mov.u32 %r1, place;
    tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;
    ld.shared.u32 %r2, [%r1];
    mov.u32 %r3, %tid.x;
    tcgen05.st.sync.aligned.32x32b.x1.b32 [%r2], {%r3};
    tcgen05.wait::st.sync.aligned;
    tcgen05.dealloc.cta_group::1.sync.aligned.b32 %r2, 32;
    ret;
}
"""


def test_a_stop_shows_shared_memory_of_a_ptx_file(tmp_path, capsys):
    path = tmp_path / "shared.ptx"
    path.write_text(SHARED)
    assert main(["run", str(path), "--stop", "11", "--dump-shared", "1024,16"]) == 1
    assert "000400: 00000000 00000001 00000002 00000003" in capsys.readouterr().err


def test_a_stop_shows_tensor_memory_of_a_ptx_file(tmp_path, capsys):
    path = tmp_path / "tensor.ptx"
    path.write_text(TENSOR)
    assert main(["run", str(path), "--stop", "13", "--dump-tensor", "0,2"]) == 1
    shown = capsys.readouterr().err
    assert "lane   3: 00000003 --------" in shown
    assert main(["run", str(path)]) == 0


CUDA = """extern "C" __global__ void twice(float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i <= n) x[i] *= FACTOR;
}
"""


def test_a_cu_file_its_ptx_and_its_source_lines(tmp_path, capsys):
    path = tmp_path / "twice.cu"
    path.write_text(CUDA)
    assert main(["ptx", str(path), "--flag=-DFACTOR=2", "--out", str(tmp_path / "twice.ptx")]) == 0
    assert ".visible .entry twice(" in (tmp_path / "twice.ptx").read_text()
    for file, flags in ((path, ["--flag=-DFACTOR=2"]), (tmp_path / "twice.ptx", [])):
        arguments = ["run", str(file), *flags, "--block", "128", "--arg", "f32:100:ones"]
        assert main([*arguments, "--arg", "99", "--dump", "0,98"]) == 0
        assert "2 of 100 elements from 98 on: [2. 2.]" in capsys.readouterr().out
        assert main([*arguments, "--arg", "100"]) == 1
        assert "twice.cu:3" in capsys.readouterr().err
    assert main(["ptx", str(tmp_path / "twice.ptx")]) == 2
    assert "takes a .cu file" in capsys.readouterr().err


TEMPLATES = """namespace inner {
template <int kBy> __global__ void scale(float* x) {
  x[threadIdx.x] *= kBy;
}
template __global__ void scale<2>(float*);
template __global__ void scale<3>(float*);
__global__ void plain() {}
}
"""


def test_kernels_are_named_as_cpp_names_them(tmp_path, capsys):
    path = tmp_path / "templates.cu"
    path.write_text(TEMPLATES)
    assert main(["list", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "(.u64[8] param_0): " in shown
    assert "void inner::scale<2>(float*)" in shown
    for name in ("inner::scale<2>", "scale<2>", "_ZN5inner5scaleILi2EEEvPf"):
        arguments = ["run", str(path), "--kernel", name, "--arg", "f32:32:ones", "--dump", "0,0,1"]
        assert main(arguments) == 0
        assert "from 0 on: [2.]" in capsys.readouterr().out
    for name in ("plain", "inner::plain"):
        assert main(["run", str(path), "--kernel", name]) == 0
    assert main(["run", str(path), "--kernel", "scale", "--arg", "f32:32"]) == 2
    assert "'scale' names 2 kernels of templates.ptx: inner::plain, inner::scale<2>" in capsys.readouterr().err
    assert main(["run", str(path), "--kernel", "scale<3>", "--arg", "f32:31"]) == 1
    assert "of parameter 0 (param_0) (124 bytes) [kernel inner::scale<3>, " in capsys.readouterr().err


def test_a_name_of_c_is_shown_as_it_is(tmp_path, capsys):
    path = tmp_path / "plain.cu"
    path.write_text('extern "C" __global__ void f() {}\nextern "C" __global__ void w() {}\n')
    assert main(["list", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "float" not in shown
    assert "wchar_t" not in shown
    assert main(["run", str(path), "--kernel", "f"]) == 0


RACES = """extern "C" __global__ void overwrites(int* out) {
  __shared__ int x;
  if (threadIdx.x == 0) x = 1;
  __syncthreads();
  if (threadIdx.x == 32) out[0] = x;
  if (threadIdx.x == 0) x = 2;
}
extern "C" __global__ void reads(int* out) {
  __shared__ int x[64];
  x[threadIdx.x] = 0;
  __syncthreads();
  if (threadIdx.x >= 32) x[threadIdx.x] = 1;
  else out[threadIdx.x] = x[threadIdx.x ^ 32];
}
"""


def test_a_race_says_what_the_other_side_did(tmp_path, capfd):
    path = tmp_path / "races.cu"
    path.write_text(RACES)
    for kernel in ("overwrites", "reads"):
        assert main(["run", str(path), "--kernel", kernel, "--block", "64", "--arg", "i32:64"]) == 1
    shown = capfd.readouterr().err
    assert "nothing that orders it after the read of warp" in shown
    assert "nothing that orders it after the write of warp" in shown


def test_a_stop_may_be_at_a_line_of_the_source(tmp_path, capfd):
    path = tmp_path / "templates.cu"
    path.write_text(TEMPLATES)
    run = ["run", str(path), "--kernel", "scale<2>", "--arg", "f32:32", "--stop"]
    assert main([*run, "templates.cu:3", "--trace", "0"]) == 1
    shown = capfd.readouterr().err
    assert "Stop: " in shown
    assert "templates.cu:3" in shown
    assert "  ld.param.u64 %rd" in shown
    assert main([*run, "templates.cu:8"]) == 2
    assert "--stop: no instruction is of templates.cu:8" in capfd.readouterr().err
    assert main([*run, "other.cu:3"]) == 2
    assert "--stop: no source other.cu; known are " in capfd.readouterr().err
    assert main([*run, "0"]) == 2
    assert "--stop: takes LINE or FILE:LINE, counted from 1, got '0'" in capfd.readouterr().err


BRANCH = """.version 8.7
.target sm_90a
.address_size 64
.visible .entry k() {
.reg .pred p; .reg .b32 r;
setp.ne.u32 p, 0, 0;
@p bra END;
@p mov.b32 r, 1;
END: ret;
}
"""


def test_a_stop_is_where_a_lane_executes_and_a_branch_not_taken_is_executed(tmp_path, capsys):
    path = tmp_path / "branch.ptx"
    path.write_text(BRANCH)
    assert main(["run", str(path), "--stop", "7"]) == 1
    assert "stopped at line 7" in capsys.readouterr().err
    assert main(["run", str(path), "--stop", "8"]) == 2
    assert "--stop: no lane executed an instruction of PTX line 8" in capsys.readouterr().err


STRUCT = """#include <cuda_bf16.h>
struct Arguments { char by; float* x; short n; double offset; };
extern "C" __global__ void fill(Arguments a, __nv_bfloat16 factor, __nv_bfloat16* y) {
  int i = threadIdx.x;
  if (i < a.n) a.x[i] = a.by * __bfloat162float(factor) + a.offset;
  y[i] = __float2bfloat16(__bfloat162float(y[i]) * 3);
}
"""


def test_structures_and_scalars_of_a_type_are_arguments(tmp_path, capsys):
    path = tmp_path / "struct.cu"
    path.write_text(STRUCT)
    run = ["run", str(path), "--arg", "bf16=1.5", "--arg", "bf16:32:ones", "--dump", "0.1,0,4", "--dump", "2,1,2"]
    run[2:2] = ["--arg", "(i8=-2, f32:3, i16=3, f64=0.25)"]
    assert main(run) == 0
    shown = capsys.readouterr().out
    assert "argument 0.1, 3 of 3 elements from 0 on: [-2.75 -2.75 -2.75]" in shown
    assert "argument 2, 2 of 32 elements from 1 on: [3. 3.]" in shown
    run[3] = "(i8=-2, f32:3, i16=4, f64=0.25)"
    assert main(run) == 1
    assert "0 bytes past the end of --arg 0.1 (12 bytes)" in capsys.readouterr().err
    run[3] = "(i8=-2, f32:3, i16=3)"
    assert main(run) == 2
    assert "parameter 0 (param_0, .b8, 32 bytes) takes 32 bytes, got 24" in capsys.readouterr().err


def test_the_comparison_with_a_gpu_says_when_there_is_no_driver(monkeypatch, capsys):
    def missing(name):
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", missing)
    assert conformance(["--device", "--only", "integer arithmetic"]) == 2
    assert capsys.readouterr().err.startswith("--device: no CUDA driver on this machine: libcuda.so.1")
