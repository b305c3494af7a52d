// Branches, calls, exits, traps, and the external functions that device code calls.
#include <cstdio>

#include "access.h"
#include "decode.h"
#include "handlers.h"

namespace cake::emu {
namespace {

u64 local_word(Warp& w, u32 offset, int lane, u32 bytes) {
  u64 v = 0;
  std::memcpy(&v, w.local + static_cast<u64>(lane) * w.local_bytes + offset, bytes);
  return v;
}

std::string read_string(Warp& w, u64 address, int lane) {
  std::string s;
  for (; s.size() < 4096; ++address) {
    const char c = static_cast<char>(*generic_at(w, address, 1, Rw::Read, lane));
    if (!c) break;
    s += c;
  }
  return s;
}

// Arguments of vprintf lie one after the other, each aligned to its size.
std::string format_print(Warp& w, const std::string& format, u64 arguments, int lane) {
  std::string out;
  auto next = [&](u32 bytes) {
    arguments = (arguments + bytes - 1) / bytes * bytes;
    u64 v = 0;
    std::memcpy(&v, generic_at(w, arguments, bytes, Rw::Read, lane), bytes);
    arguments += bytes;
    return v;
  };
  char buffer[512];
  for (size_t k = 0; k < format.size(); ++k) {
    if (format[k] != '%') {
      out += format[k];
      continue;
    }
    std::string spec = "%";
    int longs = 0;
    for (++k; k < format.size(); ++k) {
      const char c = format[k];
      if (c == 'l' || c == 'z' || c == 'j') {
        longs += c == 'l' ? 1 : 2;
        continue;
      }
      if (c == 'h') continue;
      if (c == '*') {
        spec += std::to_string(static_cast<i32>(next(4)));
        continue;
      }
      if (std::string("0123456789.+-# ").find(c) != std::string::npos) {
        spec += c;
        continue;
      }
      if (c == '%') {
        out += '%';
      } else if (c == 's') {
        out += read_string(w, next(8), lane);
      } else if (std::string("eEfFgGaA").find(c) != std::string::npos) {
        std::snprintf(buffer, sizeof buffer, (spec + c).c_str(), std::bit_cast<double>(next(8)));
        out += buffer;
      } else if (c == 'p') {
        out += hex(next(8));
      } else {
        const u64 v = next(longs ? 8 : 4);
        const long long value =
            longs || c == 'u' || c == 'x' || c == 'X' || c == 'o' ? static_cast<long long>(v) : static_cast<i32>(v);
        std::snprintf(buffer, sizeof buffer, (c == 'c' ? spec + c : spec + "ll" + c).c_str(), value);
        out += buffer;
      }
      break;
    }
  }
  return out;
}

void h_vprintf(Warp& w, const Ins& i) {
  const u32* arguments = w.gang->launch->program->operands.data() + i.list;
  each_lane(w.mask, [&](int l) {
    const std::string format = read_string(w, local_word(w, arguments[0], l, 8), l);
    const std::string text = format_print(w, format, local_word(w, arguments[1], l, 8), l);
    w.stats->printed += text;
    const u32 n = static_cast<u32>(text.size());
    if (i.flags) std::memcpy(w.local + static_cast<u64>(l) * w.local_bytes + i.d, &n, 4);
  });
}

void h_assertfail(Warp& w, const Ins& i) {
  const u32* arguments = w.gang->launch->program->operands.data() + i.list;
  const int l = first_lane(w.mask);
  const std::string message = read_string(w, local_word(w, arguments[0], l, 8), l);
  const std::string file = read_string(w, local_word(w, arguments[1], l, 8), l);
  fault("Trap",
        "assertion failed: " + message + " (" + file + ":" + std::to_string(local_word(w, arguments[2], l, 4)) + ")",
        l);
}

void h_trap(Warp& w, const Ins&) { fault("Trap", "trap", first_lane(w.mask)); }
void h_rest(Warp& w, const Ins&) { w.signal = Signal::Rest; }
void h_nothing(Warp&, const Ins&) {}

void decode_return(Decoder& d, Ins& i) {
  d.mods().take("uni");
  i.kind = d.in_kernel() ? Kind::Exit : Kind::Return;
}

}  // namespace

Handler external_function(const std::string& name) {
  if (name == "vprintf") return h_vprintf;
  if (name == "__assertfail") return h_assertfail;
  return nullptr;
}

void register_control(DecoderTable& table) {
  table.add("bra", [](Decoder& d, Ins& i) {
    d.mods().take("uni");
    d.set_branch(i, d.op(0).name);
  });
  table.add("brx", [](Decoder& d, Ins& i) {
    if (!d.mods().take("idx")) d.unsupported("form");
    d.mods().take("uni");
    i.a = d.source(0, 4u);
    d.set_indexed_branch(i, d.op(1).name);
  });
  table.add("call", [](Decoder& d, Ins& i) {
    d.mods().take("uni");
    d.call(i);
  });
  table.add("ret", decode_return);
  table.add("exit", [](Decoder& d, Ins& i) {
    (void)d;
    i.kind = Kind::Exit;
  });
  table.add("trap", [](Decoder&, Ins& i) { i.fn = h_trap; });
  table.add("brkpt", [](Decoder&, Ins& i) { i.fn = h_trap; });
  table.add("nanosleep", [](Decoder& d, Ins& i) {
    d.mods().take("u32");
    i.fn = h_rest;
  });
  table.add("pmevent", [](Decoder& d, Ins& i) {
    d.mods().take("mask");
    i.fn = h_nothing;
  });
}

}  // namespace cake::emu
