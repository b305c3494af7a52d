"""What the kernels on control flow, memory and atomics of ``cu/`` must write, restated in Python."""

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


def words_of(values: list[int]) -> Array:
    """Integers of any size as 32-bit words, wrapped."""
    return np.array([v & M32 for v in values], np.uint32)


def signed32(value: int) -> int:
    """The low 32 bits of a number as a signed one."""
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
    return words_of(out)


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
    return words_of(out)


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
    return words_of([r[lane] + r[(lane + 1) & 31] for lane in range(32)] * 2)


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
    return words_of(out)


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
    return words_of(out)


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
    return words_of(out)


def by_value(first: int, wide: int, scale: Array, a: Array, b: int, c: Array, table: Array) -> Array:
    """Results of the kernel ``by_value``."""
    out = []
    bits = scale.view(np.uint32).tolist()
    for i in range(64):
        r = first + (wide >> (i & 31) & M32) + bits[i % 5]
        r += int(a[i % 3]) * 7 + b + int(c[i % 5]) * 11
        out.append((r & M32) ^ (int(table[i & 31]) & M32))
    return words_of(out)


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
    return words_of(out)


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
    return words_of(out)


def hints(data: Array) -> Array:
    """Results of the kernel ``hints``."""
    r = []
    for v in data.tolist():
        total = 0
        for _ in range(13):
            total = total * 3 + v & M32
        r.append(total + v)
    return words_of([value + k for k in range(9) for value in r])


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
    return words_of(out)


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
        w[16 + s] = min(signed32(w[16 + s]), signed32(v)) & M32
        w[20 + s] = max(signed32(w[20 + s]), signed32(v)) & M32
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
    return words_of(w), np.array(wide, np.uint64), words_of(returned)


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
        w[12 + s] = min(signed32(w[12 + s]), signed32(v)) & M32
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
    return words_of(w + tail)
