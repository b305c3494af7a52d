"""What the kernels on warps, barriers, data movement and clusters of ``cu/`` must write, restated in Python."""

from __future__ import annotations

import numpy as np

from cake_shared.emulator.conformance.families.expected import M32, scramble, signed32, words_of

Array = np.ndarray


def _ballot(bits: list[bool]) -> int:
    return sum(1 << lane for lane, bit in enumerate(bits) if bit)


def votes(data: Array) -> Array:
    """Results of the kernel ``votes``."""
    out = []
    for warp in data.reshape(-1, 32).tolist():
        common = [
            _ballot([v & 1 != 0 for v in warp]),
            int(any(v == 7 for v in warp)) | int(all(v != 7 for v in warp)) << 1,
            int(len({v > 15 for v in warp}) == 1),
        ]
        low = _ballot([v & 2 != 0 for v in warp]) & 0x1FFF
        high = (_ballot([v & 4 != 0 for v in warp]) & 0xFFFFE000).bit_count() + 100
        for lane in range(32):
            out += [*common, *((low, 0x1FFF, 0) if lane < 13 else (0, 0, high)), 1, 1]
    return words_of(out)


def _shfl(mode: int, values: list[int], lane: int, b: int, c: int) -> int:
    limit, segment, b = c & 31, c >> 8 & 31, b & 31
    low = lane & segment
    high = low | (limit & ~segment & 31)
    if mode == 0:
        source, ok = lane - b, lane - b >= high
    elif mode == 1:
        source, ok = lane + b, lane + b <= high
    elif mode == 2:
        source, ok = lane ^ b, (lane ^ b) <= high
    else:
        source = low | (b & ~segment & 31)
        ok = source <= high
    return values[source if ok else lane] * 2 + ok


def shuffles(data: Array) -> Array:
    """Results of the kernel ``shuffles``."""
    out = []
    for warp in (data & 0xFFFF).reshape(-1, 32).tolist():
        for lane in range(32):
            p = []
            for k, mask in enumerate((0, 16 << 8, 24 << 8, 30 << 8)):
                p.append(_shfl(0, warp, lane, 1 + k, mask))
                p.append(_shfl(1, warp, lane, 3 - k, mask | 31))
                p.append(_shfl(2, warp, lane, 5 * k + 1, mask | 31))
                p.append(_shfl(3, warp, lane, warp[lane] >> 3, mask | 31))
            if 8 <= lane < 24:
                p[0] += warp[8 + (lane * 7 & 15)]
            out += p
    return words_of(out)


def matches(data: Array) -> Array:
    """Results of the kernel ``matches``."""
    out = []
    for warp in (data & 7).reshape(-1, 32).tolist():
        odd = [v & 1 != 0 for v in warp]
        for lane in range(32):
            v = warp[lane]
            same = _ballot([u == v for u in warp])
            parity = _ballot([u & 1 == v & 1 for u in warp])
            whole = M32 + 1 if len(set(warp)) == 1 else 0
            tail = [_ballot([odd[k] and warp[k] == v for k in range(32)]) & 1, 0] if odd[lane] else [0, 3]
            out += [same, parity, whole, M32 + 1, *tail]
    return words_of(out)


def reductions(data: Array) -> Array:
    """Results of the kernel ``reductions``."""
    out = []
    for warp in data.reshape(-1, 32).tolist():
        signed = [signed32(v) for v in warp]
        all_and, all_or, odd_xor = M32, 0, 0
        for lane, v in enumerate(warp):
            all_and &= v | 0xFF00FF00
            all_or |= v & 0x0F0F0F0F
            if lane & 1:
                odd_xor ^= v
        even_sum = sum(warp[0::2])
        common = [sum(warp), min(warp), max(warp), sum(signed), min(signed), max(signed), all_and, all_or]
        for lane in range(32):
            out += [*common, odd_xor if lane & 1 else even_sum]
    return words_of(out)


def named_barriers(data: Array) -> Array:
    """Results of the kernel ``named_barriers``."""
    words = data.tolist()
    out = []
    for t in range(64):
        r = 0
        for k in range(8):
            r = r * 7 + words[t ^ 5] * (k + 1) & M32
        out.append(r)
    return words_of(out)


def reducing_barriers(data: Array) -> Array:
    """Results of the kernel ``reducing_barriers``."""
    v = data.tolist()
    common = [sum(x & 1 for x in v), int(all(x != 12345 for x in v)), int(any(x == 3 for x in v))]
    big = sum(x > 9 for x in v[:64])
    return words_of([w for i in range(128) for w in (*common, big if i < 64 else 0)])


def diverged_barrier() -> Array:
    """Results of the kernel ``diverged_barrier``."""
    return words_of([(i - 1) * 5 + 1 if i & 1 else (i + 1) * 3 + 2 for i in range(64)])


def _matrix(tile: Array, addresses: list[int], which: int, trans: bool) -> Array:
    """One 8x8 matrix of 16-bit elements whose rows are at word addresses 8*which..; one word a lane."""
    rows = np.stack([tile[a : a + 4].view(np.uint16) for a in addresses[8 * which : 8 * which + 8]])
    rows = np.ascontiguousarray(rows.T) if trans else rows
    return rows.reshape(-1).view(np.uint32)


def matrix_loads(data: Array) -> Array:
    """Results of the kernel ``matrix_loads``."""
    addresses = [(lane * 5 % 32) * 4 + 128 for lane in range(32)]
    parts = []
    for trans in (False, True):
        for count in (1, 2, 4):
            parts += [_matrix(data, addresses, m, trans) for m in range(count)]
    moved = np.ascontiguousarray(data[:32].view(np.uint16).reshape(8, 8).T).reshape(-1).view(np.uint32)
    return np.concatenate([*parts, moved])


def matrix_stores(data: Array) -> Array:
    """Results of the kernel ``matrix_stores``."""
    tile = np.full(6 * 128, 0xDEADBEEF, np.uint32)
    registers = data.reshape(4, 32)
    block = 0
    for trans in (False, True):
        for count in (1, 2, 4):
            for m in range(count):
                rows = registers[m].view(np.uint16).reshape(8, 8)
                rows = np.ascontiguousarray(rows.T) if trans else rows
                for k in range(8):
                    at = block * 128 + ((8 * m + k) * 7 % 32) * 4
                    tile[at : at + 4] = rows[k].view(np.uint32)
            block += 1
    return tile


def async_copies(data: Array) -> Array:
    """Results of the kernel ``async_copies``."""
    raw = data.view(np.uint8)
    tiles = np.zeros((3, 128, 16), np.uint8)
    for i in range(128):
        tiles[0, i] = raw[16 * i : 16 * i + 16]
        second = raw[2048 + 16 * i :]
        tiles[1, i, :8], tiles[1, i, 8:12] = second[:8], second[4:8]
        tiles[1, i, 12 : 12 + (i & 3)] = raw[16 * i : 16 * i + (i & 3)]
        tiles[2, i, : i % 17] = raw[16 * i : 16 * i + i % 17]
    words = tiles.view(np.uint32)
    with np.errstate(over="ignore"):
        first = words[0, :, 1] * np.uint32(3) + words[1, :, 0] + words[1, :, 2]
    return np.concatenate([first, words.reshape(-1)])


def async_copies_to_barrier(data: Array) -> Array:
    """Results of the kernel ``async_copies_to_barrier``."""
    i = np.arange(64)
    with np.errstate(over="ignore"):
        return data[(4 * i + 77) & 255] * np.uint32(5) + data[256 + ((4 * i + 130) & 255)]


def bulk_copies(data: Array, sums: Array) -> dict[str, Array]:
    """Results of the kernel ``bulk_copies``."""
    tile = data * np.uint32(3) + np.uint32(1)
    out = sums.copy()
    v = tile[:32]
    section = lambda k: sums[32 * k : 32 * k + 32]  # noqa: E731
    results = [
        section(0) + v,
        np.minimum(section(1), v),
        np.maximum(section(2).view(np.int32), v.view(np.int32)).view(np.uint32),
        section(3) & v,
        section(4) | v,
        section(5) ^ v,
        np.where(section(6) >= v, 0, section(6) + 1),
        np.where((section(7) == 0) | (section(7) > v), v, section(7) - 1),
    ]
    for k, result in enumerate(results):
        out[32 * k : 32 * k + 32] = result
    out[256:288] = (sums[256:288].view(np.uint64) + v.view(np.uint64)).view(np.uint32)
    floats = np.arange(64, dtype=np.float32) + np.arange(64, dtype=np.float32) * np.float32(0.25)
    return {"out": tile, "sums": out, "floats": floats.view(np.uint32), "halves": np.full(64, 0x4040, np.uint16)}


def mbarrier_states() -> Array:
    """The answers that the ISA's description of phases and counts gives, line by line of the kernel."""
    return words_of([3, 0, 2, 1, 0, 0, 1, 1, 2, 0, 1, 5])


def mbarrier_pipeline(data: Array, rounds: int) -> Array:
    """Results of the kernel ``mbarrier_pipeline``."""
    words = data.tolist()
    out = []
    for i in range(96):
        warp, lane = i // 32 + 1, i % 32
        r = warp
        for k in range(rounds):
            r = r * 31 + words[32 * k + (lane + warp & 31)] & M32
        out.append(r)
    return words_of(out)


def distributed_shared(data: Array, blocks: int, size: int) -> Array:
    """Results of the kernel ``distributed_shared``."""
    words = data.tolist()
    out = []
    for block in range(blocks):
        rank = block % size
        base = block - rank
        at = lambda r, k, base=base: words[64 * (base + r % size) + k]  # noqa: E731
        for i in range(64):
            r = at(rank + 1, i ^ 3) * 3 + at(rank - 1, i) * 7 + sum(range(64)) + at(rank - 1, i) * 5
            out.append(r + (rank + 1) % size * 1000)
    return words_of(out)


def remote_copies(data: Array, blocks: int) -> Array:
    """Results of the kernel ``remote_copies``."""
    words = data.tolist()
    out = []
    for block in range(blocks):
        peer = words[64 * (block ^ 1) :]
        out += [peer[i] * 3 + peer[63 - i] + 1 for i in range(64)]
    return words_of(out)


def register_reallocation(data: Array) -> Array:
    """Results of the kernel ``register_reallocation``."""
    words = data.tolist()
    out = []
    for i in range(384):
        r = 0
        if i < 128:
            for k in range(8):
                r = r * 3 + words[(i + k) % 384] & M32
        else:
            for k in range(24):
                r = r * 5 + scramble(words[i] + 23 - k) & M32
        out.append(r)
    return words_of(out)


def dependent_launch(data: Array) -> Array:
    """Results of the kernel ``dependent_launch``."""
    words = [scramble(v) + 7 for v in data.tolist()]
    return words_of([words[len(words) - 1 - i] * (1 + (i & 63)) for i in range(len(words))])
