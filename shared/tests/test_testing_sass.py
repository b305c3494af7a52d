"""The look at machine code: which writes hit the registers of products that are still running."""

import pytest

from cake_shared.testing import sass

PRODUCT = "HGMMA.64x128x16.F32.BF16 R24, R88, gdesc[UR4], R24"
LAST = f"{PRODUCT}, gsb0"
WAIT = "WARPGROUP.DEPBAR.LE gsb0, 0x0"


def function(*lines, name="kernel"):
    """A disassembly; a line that ends in a colon is a label."""
    text, address = [f"\t\tFunction : {name}"], 0
    for line in lines:
        if line.endswith(":"):
            text.append(line)
        else:
            text.append(f"        /*{address:04x}*/                   {line} ;  /* 0x0000000000000000 */")
            address += 16
    return "\n".join(text)


def faults(*lines):
    (code,) = sass.functions_of(function(*lines)).values()
    return sass.writes_to_running_products(code)


@pytest.mark.parametrize(
    "write",
    [
        "MOV R88, R0",
        "@P0 IMAD.MOV.U32 R91, RZ, RZ, R0",
        "LDS.128 R88, [R4]",
        "LDS.64 R90, [R4+0x10]",
        "LDG.E.128 R88, desc[UR8][R4.64]",
        "IMAD.WIDE.U32 R90, R4, R5, RZ",
        "CS2R R90, SRZ",
        "ATOMG.E.ADD.STRONG.GPU PT, R89, desc[UR8][R4.64], R6",
    ],
)
def test_a_write_before_the_wait(write):
    assert faults(LAST, write, WAIT, "EXIT") == [f"0x10: {write}"]
    assert faults(LAST, WAIT, write, "EXIT") == []


@pytest.mark.parametrize(
    "harmless",
    [
        "MOV R92, R88",
        "LDS.128 R84, [R88]",
        "STS.128 [R88], R4",
        "STG.E desc[UR8][R88.64], R4",
        "ISETP.GE.AND P0, PT, R88, R4, PT",
        "BAR.SYNC.DEFER_BLOCKING R88, 0x100",
        "R2UR UR4, R88",
        "HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24",
    ],
)
def test_reads_and_other_registers(harmless):
    assert faults(LAST, harmless, WAIT, "EXIT") == []


def test_a_product_from_shared_memory_has_no_such_registers():
    assert faults("HGMMA.64x128x16.F32.BF16 R24, gdesc[UR4], R24, gsb0", "MOV R88, R0", WAIT, "EXIT") == []


def test_groups_that_a_wait_leaves_running():
    second = LAST.replace("R88", "R92")
    some = "WARPGROUP.DEPBAR.LE gsb0, 0x1"
    assert faults(LAST, second, some, "MOV R88, R0", WAIT, "EXIT") == []
    assert faults(LAST, second, some, "MOV R92, R0", WAIT, "EXIT") == ["0x30: MOV R92, R0"]
    assert faults(PRODUCT, some, "MOV R88, R0", "EXIT") == ["0x20: MOV R88, R0"], "a group that nothing has ended"


def test_every_path_is_followed():
    loop = (".L_x_1:", LAST, "@P0 BRA `(.L_x_2)", WAIT, "@P1 BRA `(.L_x_1)", "EXIT", ".L_x_2:", "MOV R88, R0", "EXIT")
    assert faults(*loop) == ["0x50: MOV R88, R0"]
    assert faults(*(line.replace("`(.L_x_2)", "0x50") for line in loop)) == ["0x50: MOV R88, R0"]
    back = (".L_x_1:", "MOV R88, R0", LAST, "@P1 BRA `(.L_x_1)", WAIT, "EXIT")
    assert faults(*back) == ["0x0: MOV R88, R0"], "in flight over the loop's back edge"
    skipped = (LAST, "BRA `(.L_x_1)", "MOV R88, R0", ".L_x_1:", WAIT, "EXIT")
    assert faults(*skipped) == []


def test_functions_are_apart():
    text = function(LAST, "MOV R88, R0", "EXIT", name="one") + "\n" + function("MOV R88, R0", "EXIT", name="two")
    found = {name: sass.writes_to_running_products(code) for name, code in sass.functions_of(text).items()}
    assert found == {"one": ["0x10: MOV R88, R0"], "two": []}


def test_what_nvdisasm_prints():
    branch = "@!P0 BRA `(.L_x_0)"
    text = (
        f".text.kernel:\n.L_x_0:\n        /*0000*/                   {LAST} ;\n        /*0010*/              {branch} ;"
    )
    (code,) = sass.functions_of(text).values()
    assert [i.name for i in code] == ["HGMMA.64x128x16.F32.BF16", "BRA"]
    assert (code[1].predicate, code[1].target) == ("@!P0", 0)


def test_a_missing_disassembler(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sass, "_USUAL", tmp_path / "cuobjdump")
    assert sass.disassembler() is None
    (tmp_path / "cuobjdump").write_text("#!/bin/sh\necho $1 $2\n")
    (tmp_path / "cuobjdump").chmod(0o755)
    assert sass.disassemble(sass.disassembler(), tmp_path / "x.cubin") == f"-sass {tmp_path / 'x.cubin'}\n"
