// What a person who debugs sees: a line an instruction, and memory where the program is stopped.
#include <cstdio>

#include "handlers.h"
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

// What the decoder put beside an instruction: the statement is shown once.
bool is_helper(Handler fn) {
  return fn == h_narrow || fn == h_widen_unsigned || fn == h_widen_signed || fn == h_not_predicate || fn == h_set_predicate ||
         fn == h_clock || fn == h_copy_local;
}

// The statement as the text has it; the opcode where a line holds several.
std::string statement_of(const Launch& launch, const Program& program, const Ins& i) {
  const std::string& opcode = program.opcodes[i.opcode];
  if (!launch.lines || i.line == 0 || i.line > launch.lines->size()) return opcode;
  const std::string& line = (*launch.lines)[i.line - 1];
  const size_t from = line.find_first_not_of(" \t"), end = line.find(';');
  const bool alone = from != std::string::npos && end != std::string::npos && line.find(';', end + 1) == std::string::npos;
  if (!alone || line.find(opcode) == std::string::npos) return opcode;
  std::string text;
  for (size_t k = from; k < end; ++k) {
    const bool blank = line[k] == ' ' || line[k] == '\t';
    if (!blank) text += line[k];
    else if (text.back() != ' ') text += ' ';
  }
  return text;
}

// The last part of the source file's name and the line; "" where the text does not tell.
std::string source_of(const Launch& launch, const Ins& i) {
  if (!launch.files || !i.loc.line) return "";
  auto file = launch.files->find(i.loc.file);
  if (file == launch.files->end()) return "";
  return " " + file->second.substr(file->second.rfind('/') + 1) + ":" + std::to_string(i.loc.line);
}

// The registers that it reads, with their values in one lane.
std::string values_read(const Program& program, const Warp& w, const Ins& i, int lane) {
  const Program::Touched& t = program.touched[static_cast<size_t>(&i - program.code.data())];
  std::string text;
  for (u32 k = 0; k < t.reads; ++k) {
    const u32 slot = program.touched_slots[t.first + k];
    auto named = program.slot_names.find(slot);
    if (named == program.slot_names.end()) continue;
    const std::string value = named->second.width == 4 ? hex(w.lane32(slot, lane)) : hex(w.lane64(slot, lane));
    text += (text.empty() ? "  | lane " + std::to_string(lane) + ": " : ", ") + named->second.name + " " + value;
  }
  return text;
}

}  // namespace

void GangRunner::trace(const Warp& w, const Ins& i, u32 mask) const {
  if (i.kind == Kind::Label || is_helper(i.fn)) return;
  if (launch_.trace_warp >= 0 && w.index != launch_.trace_warp) return;
  if (launch_.trace_cta >= 0 && static_cast<u64>(launch_.trace_cta) != w.cta->linear) return;
  // A branch is executed by the lanes that do not take it, too.
  const u32 lanes = i.kind == Kind::Branch ? w.splits[static_cast<size_t>(w.current)].mask : mask;
  if (launch_.stop_line && i.line == launch_.stop_line && lanes) {
    std::string text = "stopped at line " + std::to_string(i.line);
    if (launch_.dump_shared[1]) text += dump_shared(*w.cta, launch_.dump_shared[0], launch_.dump_shared[1]);
    if (launch_.dump_tensor[1]) text += dump_tensor(*w.cta, launch_.dump_tensor[0], launch_.dump_tensor[1]);
    fault("Stop", text, first_lane(lanes));
  }
  if (launch_.stop_line && launch_.trace_cta < 0) return;  // only stopping was asked for
  const std::string values = mask ? values_read(program_, w, i, first_lane(mask)) : "";
  std::fprintf(stderr, "cta %llu warp %d %08x %6u%s  %s%s\n", static_cast<unsigned long long>(w.cta->linear), w.index, mask,
               i.line, source_of(launch_, i).c_str(), statement_of(launch_, program_, i).c_str(), values.c_str());
}

}  // namespace cake::emu
