"""Pieces of PTX text that several generated programs share."""

from __future__ import annotations

from collections.abc import Sequence


def module(*entries: str, target: str = "sm_90a") -> str:
    """A PTX module with 1024-byte aligned dynamic shared memory named ``dynamic``."""
    head = f".version 8.7\n.target {target}\n.address_size 64\n.extern .shared .align 1024 .b8 dynamic[];\n"
    return head + "\n".join(entries) + "\n"


def braces(prefix: str, count: int, start: int = 0) -> str:
    """``{prefix0, prefix1, ...}``"""
    return "{" + ", ".join(f"{prefix}{start + i}" for i in range(count)) + "}"


def copy_in(pointer: str, shared: str, byte_count: int, threads: int) -> str:
    """Every thread copies 4-byte words from global ``pointer`` to shared address ``shared`` until all are there."""
    return _copy(pointer, shared, byte_count, threads, "ld.global.b32 word, [there];\nst.shared.b32 [here], word;")


def copy_out(pointer: str, shared: str, byte_count: int, threads: int) -> str:
    """Every thread copies 4-byte words from shared address ``shared`` to global ``pointer`` until all are there."""
    return _copy(pointer, shared, byte_count, threads, "ld.shared.b32 word, [here];\nst.global.b32 [there], word;")


def _copy(pointer: str, shared: str, byte_count: int, threads: int, move: str) -> str:
    if byte_count % 4:
        raise ValueError(f"byte_count: got {byte_count}, takes a multiple of 4")
    return f"""
{{
.reg .b32 index, here, word;
.reg .b64 there;
.reg .pred go;
mov.u32 index, %tid.x;
shl.b32 index, index, 2;
again:
setp.lt.u32 go, index, {byte_count};
@!go bra done;
add.u32 here, {shared}, index;
cvt.u64.u32 there, index;
add.u64 there, there, {pointer};
{move}
add.u32 index, index, {4 * threads};
bra again;
done:
}}"""


def wait_parity(barrier: str, parity: int | str) -> str:
    """Spin until the phase of ``parity`` of the mbarrier at shared address ``barrier`` is complete."""
    return f"""
{{
.reg .pred arrived;
spin:
mbarrier.try_wait.parity.shared::cta.b64 arrived, [{barrier}], {parity};
@!arrived bra spin;
}}"""


def parameters(names: Sequence[str]) -> str:
    """Loads of 64-bit kernel parameters ``p_<name>`` into registers ``<name>``."""
    lines = [f".reg .b64 {', '.join(names)};"] if names else []
    return "\n".join(
        lines + [f"ld.param.u64 {name}, [p_{name}];\ncvta.to.global.u64 {name}, {name};" for name in names]
    )
