"""What the kernels of ``cu/`` must write, restated in Python from their sources."""

from __future__ import annotations

import math

import numpy as np

Array = np.ndarray
M32 = 0xFFFFFFFF


def scramble(x: int) -> int:
    """Murmur3's 32-bit finaliser, as in ``common.cuh``."""
    x &= M32
    x ^= x >> 16
    x = x * 0x85EBCA6B & M32
    x ^= x >> 13
    x = x * 0xC2B2AE35 & M32
    return x ^ (x >> 16)


def _u32(values: list[int]) -> Array:
    return np.array([v & M32 for v in values], np.uint32)


def _s32(value: int) -> int:
    value &= M32
    return value - (1 << 32) if value >> 31 else value


def divergent_loops(data: Array) -> Array:
    """Results of the kernel ``divergent_loops``."""
    out = []
    for v in data.tolist():
        steps = odd = 0
        while v != 1:
            steps += 1
            if steps > 400:
                break
            if v % 2 == 0:
                v >>= 1
                continue
            v = 3 * v + 1 & M32
            for k in range(v & 3):
                odd = odd + (k ^ steps) & M32
        out.append(steps * 65536 + (odd & 65535))
    return _u32(out)


def switches(data: Array, fill: int) -> Array:
    """Results of the kernel ``switches``."""
    out = []
    for v in data.tolist():
        r, left = 0, False
        for _ in range(4):
            case = v % 11
            if case == 0:
                r += 7
            elif case == 1:
                r ^= v
            elif case in (2, 3):
                r = (r * 3 + 1 if case == 2 else r) - 5
            elif case == 4:
                r = ~r
            elif case == 5:
                r += v >> 3
            elif case == 6:
                r = r << 1 if r & 1 else r ^ 0x55
            elif case == 7:
                r += v.bit_count()
            elif case == 8:
                r = int(f"{r & M32:032b}"[::-1], 2)
            elif case == 9:
                left = True
                break
            else:
                r += 1000
            r &= M32
            v = scramble(v)
        out.append(fill if left else r)
    return _u32(out)


def nested_reconvergence() -> Array:
    """Results of the kernel ``nested_reconvergence``."""
    r = []
    for lane in range(32):
        if lane >= 20:
            r.append(lane * lane)
        elif lane & 1:
            r.append(sum(range(lane)) + (1000 if lane > 10 else 2000))
        else:
            r.append(7 * lane)
    return _u32([r[lane] + r[(lane + 1) & 31] for lane in range(32)] * 2)


def calls(data: Array) -> Array:
    """Results of the kernel ``calls``."""
    out = []
    for v in data.tolist():
        low, high, weight = v, ~v & M32, 1.0
        for k in range(v & 7):
            low, high, weight = high ^ k, low + k & M32, weight * 0.5 + k
        r = low * 31 + high + int(weight * 16)
        if v & 8:
            e = (v & 0xFFFF) - (0x10000 if v >> 15 & 1 else 0)
            wide = 0x123456789ABC * v & (1 << 64) - 1
            r += v + (wide >> 7) + (v & 0xFF) * 3 + int((v & 0xFFFF) * 0.25) + e
        r += math.gcd(v & 0xFFF, v >> 12 & 0xFFF)
        r += math.gcd(v & 0xFF, v >> 8 & 0xFF) * 2 + math.gcd(v >> 16 & 0xFF, 30)
        out.append(r)
    return _u32(out)


def local_arrays(data: Array) -> Array:
    """Results of the kernel ``local_arrays``."""
    out = []
    for v in data.tolist():
        values = [scramble(v + k) & 0xFFFF for k in range(12)]
        small = [0] * 16
        for k in range(16):
            small[k * 5 & 15] = values[k % 12] >> 3 & 0xFF
        wide = [0.0] * 4
        for k in range(4):
            wide[(v + k) & 3] = k * 1.5
        count = 3 + v % 10
        values[:count] = sorted(values[:count])
        r = 0
        for k in range(12):
            r = r * 33 + values[((k + v) & M32) % 12] & M32
        for k in range(16):
            r = r * 31 + small[(v >> 2) + k & 15] & M32
        out.append(r + int(wide[v >> 5 & 3] * 4))
    return _u32(out)


def vectors(data: Array, threads: int) -> Array:
    """Results of the kernel ``vectors``."""
    signed = data.view(np.int8)[:threads].astype(np.int32) * 1000 + data.view(np.int16)[:threads]
    parts = [
        data[: 16 * threads],
        data.view(np.uint32)[: 2 * threads].reshape(-1, 2)[:, ::-1],
        data.view(np.uint16)[: 4 * threads].reshape(-1, 4)[:, ::-1],
        data[: 4 * threads].reshape(-1, 4)[:, ::-1],
        data.view(np.uint64)[: 2 * threads].reshape(-1, 2)[:, ::-1],
        signed,
        data.view(np.int32)[:threads].astype(np.int64) * 3,
    ]
    return np.concatenate([np.ascontiguousarray(p).reshape(-1).view(np.uint8) for p in parts])


def variables() -> Array:
    """Results of the kernel ``variables``."""
    constant = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, -3]
    table = [1, 2, 4, 8, 16, 32, 64, 65535]
    out = []
    for run in range(2):
        zero = [0] * 4 if run == 0 else [5, 6, 7, 8]
        for i in range(64):
            r = constant[i & 15] + int([0.5, -2.25][i & 1] * 4) + table[i & 7] + table[3 + (i & 3)] * 3 + zero[i & 3]
            out.append(r + 41 + run)
    return _u32(out)


def by_value(first: int, wide: int, scale: Array, a: Array, b: int, c: Array, table: Array) -> Array:
    """Results of the kernel ``by_value``."""
    out = []
    bits = scale.view(np.uint32).tolist()
    for i in range(64):
        r = first + (wide >> (i & 31) & M32) + bits[i % 5]
        r += int(a[i % 3]) * 7 + b + int(c[i % 5]) * 11
        out.append((r & M32) ^ (int(table[i & 31]) & M32))
    return _u32(out)


def generic_addresses(data: Array) -> Array:
    """Results of the kernel ``generic_addresses``."""
    words = data.tolist()
    tile = [scramble(i) for i in range(128)]
    out = []
    for i in range(128):
        local = [words[(i + k) & 127] for k in range(4)]
        base = i & 63
        source, kind = {0: (tile[base : base + 4], 1), 1: (words[base : base + 4], 2)}.get(i % 3, (local, 4))
        r = 0
        for value in source:
            r = r * 17 + value & M32
        out.append(r + kind)
    return _u32(out)


def shared_memory(data: Array, n: int, threads: int) -> Array:
    """Results of the kernel ``shared_memory``."""
    words = data.tolist()
    dynamic = [0] * n
    for k in range(n):
        dynamic[n - 1 - k] = words[k]
    fixed = [0] * (33 * 8)
    for k in range(256):
        fixed[(k % 8) * 33 + k // 8] = dynamic[k % n]
    out = []
    for i in range(threads):
        r = 0
        for k in range(8):
            r = r * 5 + fixed[k * 33 + (i & 31)] & M32
        q = dynamic[4 * (i % (n // 4)) :][:4]
        out.append(r + (q[0] ^ q[1] ^ q[2] ^ q[3]) + (words[i % 40] >> 8 & 0xFF))
    return _u32(out)


def hints(data: Array) -> Array:
    """Results of the kernel ``hints``."""
    r = []
    for v in data.tolist():
        total = 0
        for _ in range(13):
            total = total * 3 + v & M32
        r.append(total + v)
    return _u32([value + k for k in range(9) for value in r])


def special_registers() -> Array:
    """Results of the kernel ``special_registers``."""
    out = []
    for z in range(2):
        for y in range(2):
            for x in range(4):
                for t in range(32):
                    tx, ty, tz = t % 8, t // 8 % 2, t // 16
                    below = (1 << t) - 1
                    out += [
                        tx | ty << 8 | tz << 16, x | y << 8 | z << 16, 8 | 2 << 8 | 2 << 16, 4 | 2 << 8 | 2 << 16,
                        t, below, below | 1 << t, ~(below | 1 << t), ~below, 1 << t, 512, x % 2, 2, x % 2, 2, y,
                    ]  # fmt: skip
    return _u32(out)


def _inc(start: int, limit: int, times: int) -> tuple[int, int]:
    total, value = 0, start
    for _ in range(times):
        total += value
        value = 0 if value >= limit else value + 1
    return value, total


def _dec(start: int, limit: int, times: int) -> tuple[int, int]:
    total, value = 0, start
    for _ in range(times):
        total += value
        value = limit if value == 0 or value > limit else value - 1
    return value, total


def integer_atomics(words: Array, longs: Array, threads: int) -> tuple[Array, Array, Array]:
    """Results of the kernel ``integer_atomics``."""
    w, wide = words.tolist(), longs.tolist()
    m64 = (1 << 64) - 1
    signed64 = lambda v: v - (1 << 64) if v >> 63 else v  # noqa: E731
    times = [0] * 4
    returned = [0] * 8
    for i in range(threads):
        v, s = scramble(i), i & 3
        times[s] += 1
        w[s] = w[s] + v & M32
        w[4 + s] = w[4 + s] - v & M32
        w[8 + s] = min(w[8 + s], v)
        w[12 + s] = max(w[12 + s], v)
        w[16 + s] = min(_s32(w[16 + s]), _s32(v)) & M32
        w[20 + s] = max(_s32(w[20 + s]), _s32(v)) & M32
        w[24 + s] &= v | 0xF0F0F0F0
        w[28 + s] |= v & 0x00FF00FF & (1 << (v & 31))
        w[32 + s] ^= v
        w[44] = max(w[44], v & 0xFFFF)
        wide[s] = wide[s] + 0x100000001 * v & m64
        wide[4 + s] = min(wide[4 + s], 0x123456789 * v & m64)
        wide[8 + s] = max(signed64(wide[8 + s]), signed64(0x9123456789ABCDEF * v & m64)) & m64
        wide[12 + s] ^= 0x1000000010001 * v & m64
    for s in range(4):
        w[36 + s], total = _inc(w[36 + s], 16, times[s])
        returned[0] += total
        w[40 + s], total = _dec(w[40 + s], 20, times[s])
        returned[1] += total
    returned[2] = threads * (threads - 1) // 2
    returned[3] = threads
    for i in range(2):
        returned[4 + i], w[45 + i] = w[45 + i], i + 99
    return _u32(w), np.array(wide, np.uint64), _u32(returned)


def float_atomics(threads: int) -> dict[str, Array]:
    """Results of the kernel ``float_atomics``."""
    f, d = [0.0] * 12, [0.0] * 4
    h, b = [[0.0, 0.0] for _ in range(6)], [[0.0, 0.0] for _ in range(6)]
    for i in range(threads):
        small, s = float(scramble(i) & 15), i & 3
        f[s] += small
        d[s] += small * 0.5
        for k, value in enumerate((small, 1.0, -small, 2.0)):
            f[4 + k] += value
        f[8] += small
        f[9] += 3.0
        f[10] += small
        if i < 64:
            h[s][0] += small
            h[s][1] -= small
            b[s][0] += small
            b[s][1] += 1.0
            h[4][0] += 1.0
            b[4][1] += 2.0
    return {
        "f": np.array(f, np.float32).view(np.uint32),
        "d": np.array(d).view(np.uint64),
        "h": np.array(h, np.float16).view(np.uint16).reshape(-1).view(np.uint32),
        "b": (np.array(b, np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(-1).view(np.uint32),
    }


def shared_atomics(threads: int) -> Array:
    """Results of the kernel ``shared_atomics``."""
    w = [M32 if 8 <= i < 12 or 24 <= i < 28 else 0 for i in range(40)]
    longs, floats, shorts = list(range(4)), [0.0] * 4, [0] * 4
    for i in range(threads):
        v, s = scramble(i + 1000), i & 3
        w[s] = w[s] + v & M32
        w[4 + s] = max(w[4 + s], v)
        w[8 + s] = min(w[8 + s], v)
        w[12 + s] = min(_s32(w[12 + s]), _s32(v)) & M32
        w[16 + s] |= 1 << (v & 31)
        w[20 + s] ^= v
        w[24 + s] &= v | 0xFF00FF00
        longs[s] = longs[s] + 0x200000003 * v & (1 << 64) - 1
        floats[s] += v & 7
        shorts[s] += 1
    for s in range(4):
        w[28 + s] = _inc(0, 12, shorts[s])[0]
        w[32 + s] = _dec(0, 9, shorts[s])[0]
        w[36 + s] = 77
    tail = [v & M32 for v in longs] + [v >> 32 for v in longs]
    tail += np.array(floats, np.float32).view(np.uint32).tolist() + shorts
    return _u32(w + tail)


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
    return _u32(out)


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
    return _u32(out)


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
    return _u32(out)


def reductions(data: Array) -> Array:
    """Results of the kernel ``reductions``."""
    out = []
    for warp in data.reshape(-1, 32).tolist():
        signed = [_s32(v) for v in warp]
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
    return _u32(out)


def named_barriers(data: Array) -> Array:
    """Results of the kernel ``named_barriers``."""
    words = data.tolist()
    out = []
    for t in range(64):
        r = 0
        for k in range(8):
            r = r * 7 + words[t ^ 5] * (k + 1) & M32
        out.append(r)
    return _u32(out)


def reducing_barriers(data: Array) -> Array:
    """Results of the kernel ``reducing_barriers``."""
    v = data.tolist()
    common = [sum(x & 1 for x in v), int(all(x != 12345 for x in v)), int(any(x == 3 for x in v))]
    big = sum(x > 9 for x in v[:64])
    return _u32([w for i in range(128) for w in (*common, big if i < 64 else 0)])


def diverged_barrier() -> Array:
    """Results of the kernel ``diverged_barrier``."""
    return _u32([(i - 1) * 5 + 1 if i & 1 else (i + 1) * 3 + 2 for i in range(64)])


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
    return _u32([3, 0, 2, 1, 0, 0, 1, 1, 2, 0, 1, 5])


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
    return _u32(out)


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
    return _u32(out)


def remote_copies(data: Array, blocks: int) -> Array:
    """Results of the kernel ``remote_copies``."""
    words = data.tolist()
    out = []
    for block in range(blocks):
        peer = words[64 * (block ^ 1) :]
        out += [peer[i] * 3 + peer[63 - i] + 1 for i in range(64)]
    return _u32(out)


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
    return _u32(out)


def dependent_launch(data: Array) -> Array:
    """Results of the kernel ``dependent_launch``."""
    words = [scramble(v) + 7 for v in data.tolist()]
    return _u32([words[len(words) - 1 - i] * (1 + (i & 63)) for i in range(len(words))])
