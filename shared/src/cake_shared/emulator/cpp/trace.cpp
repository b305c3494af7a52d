// What a person who debugs sees: a line an instruction, and memory where the program is stopped.
#include <cstdio>

#include "scheduler.h"
#include "tensor_memory.h"

namespace cake::emu {
namespace {

std::string dump_shared(const Cta& cta, u32 offset, u32 bytes) {
  std::string text;
  char buffer[24];
  offset &= kSharedWindow - 1;
  for (u32 at = offset / 4 * 4; at < offset + bytes && at + 4 <= cta.shared_end; at += 4) {
    if ((at - offset / 4 * 4) % 32 == 0) {
      std::snprintf(buffer, sizeof buffer, "\n  %06x:", at);
      text += buffer;
    }
    u32 word;
    std::memcpy(&word, cta.shared + at, 4);
    std::snprintf(buffer, sizeof buffer, " %08x", word);
    text += buffer;
  }
  return text;
}

std::string dump_tensor(const Cta& cta, u32 column, u32 count) {
  if (!cta.tensor) return "\n  no tensor memory is allocated";
  std::string text;
  char buffer[24];
  for (u32 row = 0; row < TensorMemory::kRows; ++row) {
    std::snprintf(buffer, sizeof buffer, "\n  lane %3u:", row);
    text += buffer;
    for (u32 c = column; c < column + count && c < cta.tensor->columns(); ++c) {
      try {
        std::snprintf(buffer, sizeof buffer, " %08x", cta.tensor->read(row, c));
        text += buffer;
      } catch (const Fault&) {  // outside of allocations, or never written
        text += " --------";
      }
    }
  }
  return text;
}

}  // namespace

void GangRunner::trace(const Warp& w, const Ins& i, u32 mask) const {
  if (i.kind == Kind::Label) return;
  if (launch_.trace_warp >= 0 && w.index != launch_.trace_warp) return;
  if (launch_.trace_cta >= 0 && static_cast<u64>(launch_.trace_cta) != w.cta->linear) return;
  if (launch_.stop_line && i.line == launch_.stop_line && mask) {
    std::string text = "stopped at line " + std::to_string(i.line);
    if (launch_.dump_shared[1]) text += dump_shared(*w.cta, launch_.dump_shared[0], launch_.dump_shared[1]);
    if (launch_.dump_tensor[1]) text += dump_tensor(*w.cta, launch_.dump_tensor[0], launch_.dump_tensor[1]);
    fault("Stop", text, first_lane(mask));
  }
  if (launch_.stop_line && launch_.trace_warp < 0) return;  // only stopping was asked for
  std::fprintf(stderr, "cta %llu warp %d %08x %6u  %s\n", static_cast<unsigned long long>(w.cta->linear), w.index, mask,
               i.line, program_.opcodes[i.opcode].c_str());
}

}  // namespace cake::emu
