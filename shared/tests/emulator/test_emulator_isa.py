"""Which instructions there are on which target, what their operands are, and what the text may write for a constant."""

import json
import re

import numpy as np
import pytest

from cake_shared.emulator import EmulatorError, Module, PtxSyntaxError, UnsupportedInstruction
from cake_shared.emulator.conformance import isa
from cake_shared.emulator.conformance.model import CU_DIRECTORY
from cake_shared.errors import BuildError
from cake_shared.jit.compilers import find_nvcc
from cake_shared.target import TARGETS, target_named

HOPPER, BLACKWELL = ("sm_90a",), ("sm_100a", "sm_103a", "sm_107a")
REGISTERS = ".reg .b16 %h<4>; .reg .b32 %r<10>; .reg .b64 %d<10>; .reg .f32 %f<4>; .reg .s32 %i<4>; .reg .pred %p<4>;"


def text_of(*bodies: str, target: str = "sm_90a", above: str = "") -> str:
    entries = [f".visible .entry k{at}()\n{{ {REGISTERS}\n{body}\nret;\n}}" for at, body in enumerate(bodies)]
    return "\n".join([".version 9.0", f".target {target}", ".address_size 64", above, *entries, ""])


def load(body: str, target: str = "sm_90a", run_on: str | None = None, above: str = "") -> Module:
    return Module.from_ptx(text_of(body, target=target, above=above), run_on or target)


TENSOR_COPY = "cp.async.bulk.tensor.1d.shared::cluster.global.mbarrier::complete_tx::bytes"
ACCUMULATORS = ", ".join(f"%r{k}" for k in range(4))
ELSEWHERE = {
    "tcgen05.wait::ld.sync.aligned;": BLACKWELL,
    "tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%r1], 32;": BLACKWELL,
    "tcgen05.fence::before_thread_sync;": BLACKWELL,
    "tcgen05.mma.cta_group::1.kind::f16 [%r1], %d1, %d2, %r2, %p1;": BLACKWELL,
    "tcgen05.mma.cta_group::1.kind::i8 [%r1], %d1, %d2, %r2, %p1;": ("sm_100a",),
    "redux.sync.min.f32 %f1, %f2, 0xffffffff;": BLACKWELL,
    "redux.sync.max.abs.NaN.f32 %f1, %f2, 0xffffffff;": BLACKWELL,
    "add.f32x2 %d1, %d2, %d3;": BLACKWELL,
    "fma.rn.ftz.f32x2 %d1, %d2, %d3, %d4;": BLACKWELL,
    "min.f32 %f1, %f2, %f3, %f1;": BLACKWELL,
    "ld.global.v8.b32 {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7}, [%d1];": BLACKWELL,
    "st.global.v8.b32 [%d1], {%r0, %r1, %r2, %r3, %r4, %r5, %r6, %r7};": BLACKWELL,
    "ld.global.v4.b64 {%d0, %d1, %d2, %d3}, [%d4];": BLACKWELL,
    "ld.relaxed.gpu.global.v4.u64 {%d0, %d1, %d2, %d3}, [%d4];": BLACKWELL,
    "cvt.rn.satfinite.tf32.f32 %r1, %f1;": BLACKWELL,
    f"{TENSOR_COPY}.cta_group::2 [%r1], [%d1, {{%r2}}], [%r3];": BLACKWELL,
    "wgmma.fence.sync.aligned;": HOPPER,
    "wgmma.commit_group.sync.aligned;": HOPPER,
    "wgmma.wait_group.sync.aligned 0;": HOPPER,
    f"wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {{{ACCUMULATORS}}}, %d1, %d2, 1, 1, 1, 0, 0;": HOPPER,
}  # fmt: skip


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("line", ELSEWHERE)
def test_an_instruction_is_refused_where_the_target_has_none_of_it(line, target):
    if target in ELSEWHERE[line]:
        load(line, target)
        return
    with pytest.raises(UnsupportedInstruction) as caught:
        load(line, target)
    error = caught.value
    assert error.line == 7
    assert line.split(" ")[0].rstrip(";") in str(error)
    assert "exists on sm_" in str(error)
    assert f"the target is {target}" in str(error)


def test_what_counts_is_the_target_of_the_text():
    with pytest.raises(
        UnsupportedInstruction, match=r"wgmma.fence.sync.aligned: exists on sm_90a, the target is sm_90 "
    ):
        load("wgmma.fence.sync.aligned;", "sm_90", run_on="sm_90a")
    load("tcgen05.wait::ld.sync.aligned;", "sm_100f", run_on="sm_103a")
    with pytest.raises(UnsupportedInstruction, match=r"kind::i8: exists on sm_100a, the target is sm_100f"):
        load("tcgen05.mma.cta_group::1.kind::i8 [%r1], %d1, %d2, %r2, %p1;", "sm_100f", run_on="sm_100a")
    with pytest.raises(
        UnsupportedInstruction, match=r"\.shared::cluster exists on sm_90 and later, the target is sm_80"
    ):
        load("ld.shared::cluster.b32 %r1, [%r2];", "sm_80", run_on="sm_90a")


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ("add.s32 %r1, %r2;", "add.s32: takes 3 operands, got 2"),
        ("add.s32 %r1, %r2, %r3, %r4;", "takes 3 operands, got 4"),
        ("bar.sync;", "takes 1 to 2 operands, got 0"),
        ("add.s32 %r1, %r2, %d1;", r"operand 3 is %d1 \(.b64\), a value of .s32 is taken"),
        ("add.s32 %r1, %r2, %h1;", r"operand 3 is %h1 \(.b16\)"),
        ("add.s32 %r1, %r2, %f1;", r"operand 3 is %f1 \(.f32\)"),
        ("add.f32 %f1, %f2, %i1;", r"operand 3 is %i1 \(.s32\), a value of .f32 is taken"),
        ("add.f32 %f1, %f2, 1;", "operand 3 is the integer 1, a value of .f32 is taken"),
        ("add.s32 %r1, %r2, 1.5;", "operand 3 is a constant of .f64, a value of .s32 is taken"),
        ("add.s32 %r1, %r2+4, 1;", "a register plus a constant stands in addresses only"),
        ("add.s32 %r1, %r2, %p1;", r"operand 3 is %p1 \(.pred\)"),
        ("add.s32 7, %r2, %r1;", "operand 1 is the integer 7, a register of .s32 is taken"),
        ("and.b32 %r1, %tid.x, 1;", "special registers are read by mov and cvt"),
        ("mov.u64 %d1, %tid.x;", r"operand 2 is %tid.x, a value of .u64 is taken"),
        ("selp.b32 %r1, %r2, %r3, %r4;", r"operand 4 is %r4 \(.b32\), a predicate or an integer constant is taken"),
        ("setp.eq.s32 %r1, %r2, %r3;", r"operand 1 is %r1 \(.b32\), a predicate is taken"),
        ("ld.global.b32 %r1, %d1;", r"operand 2 is %d1 \(.b64\), an address in brackets is taken"),
        ("ld.global.b32 %r1, [%f1];", r"%f1 \(.f32\) holds no address"),
        ("ld.global.v2.b32 {%r1, %d1}, [%d1];", ""),
        ("ld.global.L2::cache_hint.b32 %r1, [%d1];", "takes 3 operands, got 2"),
        ("mul.wide.u32 %r1, %r2, %r3;", "a register of .u64 is taken"),
        ("lop3.b32 %r1, %r2, %r3, %r1, %r2;", "an integer constant is taken"),
        ("elect.sync %r1, 0xffffffff;", r"a register of .b32 and a predicate as d\|p is taken"),
        ("mbarrier.arrive.shared::cluster.b64 %d1, [%r1];", "there is no result, _ stands for it"),
        ("cvt.u16.u32 %f1, %r1;", r"operand 1 is %f1 \(.f32\)"),
        ("ret 1;", "takes 0 operands, got 1"),
        ("bra;", "takes 1 operand, got 0"),
        ("bra 5;", "bra takes a label"),
    ],
)  # fmt: skip
def test_operands_are_counted_and_of_their_kind(line, what):
    if not what:  # wider registers are taken by loads and stores
        load(line)
        return
    with pytest.raises(PtxSyntaxError, match=what) as caught:
        load(line)
    assert caught.value.line == 7


@pytest.mark.parametrize(
    "line",
    [
        "add.rn.rn.f32 %f1, %f2, %f3;",
        "add.rn.rz.f32 %f1, %f2, %f3;",
        "add.rn.s32 %r1, %r2, %r3;",
        "add.s32.s32 %r1, %r2, %r3;",
        "fma.f32 %f1, %f2, %f3, %f1;",
        "mul.s32 %r1, %r2, %r3;",
        "ld.relaxed.global.b32 %r1, [%d1];",
        "ld.global.shared.b32 %r1, [%d1];",
        "mbarrier.arrive.relaxed.shared.b64 %d1, [%r1];",
        "setp.lo.s32 %p1, %r1, %r2;",
        "setp.lt.b32 %p1, %r1, %r2;",
        "shf.l.b32 %r1, %r2, %r3, %r1;",
        "atom.global.min.f32 %f1, [%d1], %f2;",
        "cvt.rn.u32.u32 %r1, %r2;",
    ],
)
def test_modifiers_that_do_not_go_together_are_refused(line):
    with pytest.raises(UnsupportedInstruction, match="modifier") as caught:
        load(line)
    assert line.split(" ")[0] in str(caught.value)


def test_modifiers_that_the_isa_lets_one_leave_out_may_come_in_another_order():
    load("atom.global.gpu.acq_rel.add.u32 %r1, [%d1], %r2;\nadd.sat.rn.f32 %f1, %f2, %f3;")


def test_only_the_kernels_that_are_launched_must_be_executable():
    bodies = ("mov.u32 %r1, 1;", ".loc 1 42 0\nfrobnicate.u32 %r1, %r2;", "add.u32 %r1 %r2;", "call helper;")
    above = '.file 1 "some.cu"\n.func helper()\n{\n.loc 1 7 0\nblub;\nret;\n}\n'
    text = text_of(*bodies, above=above)
    at = {row: number for number, row in enumerate(text.splitlines(), 1)}
    module = Module.from_ptx(text, "sm_90a", "some.ptx")
    assert list(module.kernels) == ["k0", "k1", "k2", "k3"]
    module.launch("k0", 1, 32)
    unknown = f"kernel k1, some.ptx line {at['frobnicate.u32 %r1, %r2;']}, some.cu:42"
    comma = f"kernel k2, some.ptx line {at['add.u32 %r1 %r2;']}"
    reached = f"kernel k3, some.ptx line {at['blub;']}, some.cu:7"
    wanted = {
        "k1": (UnsupportedInstruction, f"frobnicate.u32: unknown instruction [{unknown}]"),
        "k2": (PtxSyntaxError, f"expected ';' before '%r2' [{comma}]"),
        "k3": (UnsupportedInstruction, f"blub: unknown instruction [{reached}]"),
    }
    for kernel, (kind, what) in wanted.items():
        assert isinstance(module.kernels[kernel].error, kind)
        with pytest.raises(kind, match=re.escape(what)):
            module.launch(kernel, 1, 32)
    module.require("k0")
    with pytest.raises(UnsupportedInstruction, match="kernel k1"):
        module.require()


def test_a_text_with_no_kernel_that_can_be_launched_is_refused_when_it_is_loaded():
    with pytest.raises(UnsupportedInstruction, match="kernel k0"):
        Module.from_ptx(text_of("frobnicate;", "blub;"), "sm_90a")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1<<4", 16), ("(1+2)*4", 12), ("1+2*4", 9), ("-(3-5)", 2), ("~0", 0xFFFFFFFF), ("7/2", 3), ("0b101", 5),
        ("-7/2", -3 % 2**32), ("7 % 4", 3), ("1<<2+1", 8), ("0xff&0x0f|0x30", 0x3F), ("6^3", 5), ("3>2", 1), ("!5", 0),
        ("2>=3", 0), ("2==2&&1!=1", 0), ("0||5", 1), ("1?10:20", 10), ("0?10:20", 20), ("-1>>31", 0xFFFFFFFF),
        ("0xffffffffffffffff>>60", 15), ("(.u64)-1>>60", 15), ("WARP_SZ*2", 64), ("017", 15), ("-1<0", 1),
        ("(.u64)-1<0", 0), ("2 - -3", 5),
    ],
)  # fmt: skip
def test_constant_expressions(text, value):
    out = np.zeros(1, np.uint32)
    body = f".reg .b32 %r; .reg .b64 %d;\nld.param.u64 %d, [out];\nmov.u32 %r, {text};\nst.global.u32 [%d], %r;"
    head = ".version 9.0\n.target sm_90a\n.address_size 64\n"
    Module.from_ptx(f"{head}.entry k(.param .u64 out)\n{{\n{body}\nret;\n}}\n").launch("k", 1, 1, [out])
    assert out[0] == value


def test_constant_expressions_in_sizes_addresses_and_initialisers():
    head = ".version 9.0\n.target sm_90a\n.address_size 64\n.global .u32 table[1<<2] = {1<<4, (2+3)*2, -1, ~0};\n"
    body = """.reg .b32 %r<3>; .reg .b64 %d<3>; .shared .align 4 .b8 buffer[(4+4)*4];
    ld.param.u64 %d1, [out]; mov.u64 %d2, table+2*2;
    ld.global.u32 %r1, [%d2+4*(2-1)-8+4]; st.global.u32 [%d1], %r1;
    ld.global.u32 %r2, [table]; st.global.u32 [%d1+1<<2], %r2;"""
    module = Module.from_ptx(f"{head}.entry k(.param .u64 out)\n{{\n{body.replace('+1<<2', '+(1<<2)')}\nret;\n}}\n")
    out = np.zeros(2, np.uint32)
    module.launch("k", 1, 1, [out])
    assert out.tolist() == [10, 16]
    assert module.kernels["k"].shared_bytes == 32
    assert module.symbol("table").view(np.uint32).tolist() == [16, 10, 0xFFFFFFFF, 0xFFFFFFFF]


@pytest.mark.parametrize(
    ("body", "what"),
    [
        ("mov.u32 %r1, 1/0;", "division by 0"),
        ("mov.u32 %r1, (1+2;", r"expected '\)' before ';'"),
        ("mov.u32 %r1, 1+;", "expected a number before ';'"),
        (".shared .b32 none[1-1];", "array none of 0 elements"),
        (".shared .b32 none[-4];", "array none of -4 elements"),
    ],
)
def test_constant_expressions_without_a_value(body, what):
    with pytest.raises(PtxSyntaxError, match=what):
        load(body)


@pytest.mark.parametrize("target", TARGETS)
def test_ptxas_takes_and_refuses_the_same(target):
    try:
        find_nvcc(target_named(target))
    except BuildError as error:
        pytest.skip(str(error))
    result = isa.compare(target)
    assert result["differences"] == []
    assert result["both take"] > 3000
    assert result["both refuse"] > 3000


def test_the_committed_comparison_is_of_this_table():
    results = json.loads((CU_DIRECTORY.parent / "results_isa.json").read_text())
    assert results["table_sha256"] == isa.table_hash()
    assert set(results["targets"]) == set(TARGETS)
    assert all(result["differences"] == [] for result in results["targets"].values())


def test_every_error_of_loading_is_an_emulator_error():
    for text in (
        "nonsense",
        ".version 9.0\n.target sm_90a\n.entry k( { }",
        ".version 9.0\n.target sm_90a\n.entry k() {",
    ):
        with pytest.raises(EmulatorError):
            Module.from_ptx(text).require("k")


HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (HEADER + ".entry k() { .reg .b32 %r<4>; .reg .b64 %r2; ret; }", "%r2 is declared twice"),
        (HEADER + ".entry k() { ret; }\n.entry k() { ret; }", "function k is defined twice"),
        (HEADER + ".global .b32 x;\n.global .b64 x;\n.entry k() { ret; }", "variable x is declared twice"),
        (HEADER + ".entry k(.param .b32 a, .param .b32 a) { ret; }", "parameter a is declared twice"),
        (
            HEADER + ".entry k() { .reg .b32 %r<100000000000>; ret; }",
            "100000000000 registers %r, 0 to 1048576 are taken",
        ),
        (HEADER + ".global .align 3 .b32 x;\n.entry k() { ret; }", "alignment 3 is no power of two"),
        (HEADER + ".entry k() { .shared .b8 x[99999999999]; ret; }", "array x of 99999999999 elements"),
        (HEADER + ".shared .b32 x = 1;\n.entry k() { ret; }", "variable x of this state space takes no initialiser"),
        (HEADER + ".entry k() .maxntid 0 { ret; }", "a size of 0"),
        (
            HEADER + ".entry k() { .reg .b64 %r; mov.u64 %r, 99999999999999999999; ret; }",
            "a number of more than 64 bits",
        ),
        (HEADER + ".entry k() { ret; } /* never closed", "a comment without an end"),
        (".target sm_90a\n.address_size 64\n.entry k() { ret; }", "the text has no .version"),
        (".version 9.0\n.address_size 64\n.entry k() { ret; }", "the text has no .target"),
    ],
)
def test_declarations_that_do_not_hold_are_refused(text, what):
    with pytest.raises(PtxSyntaxError, match=re.escape(what)):
        Module.from_ptx(text)
