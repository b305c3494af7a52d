// Where things stand, for messages: the place of a fault, and of every warp that waits.
#include "mbarrier.h"
#include "scheduler.h"

namespace cake::emu {

std::string place_text(const Launch& launch, int pc) {
  const Ins& i = launch.program->code[static_cast<size_t>(pc)];
  std::string text = "line " + std::to_string(i.line);
  if (!i.loc.line) return text;
  if (!launch.files) return text + " (source line " + std::to_string(i.loc.line) + ")";
  const auto file = launch.files->find(i.loc.file);
  return text + " (" + (file == launch.files->end() ? "?" : file->second) + ":" + std::to_string(i.loc.line) + ")";
}

std::string GangRunner::waiting() const {
  std::string text;
  int shown = 0;
  for (const auto& cta : gang_.ctas) {
    for (const auto& w : cta->warps) {
      for (const auto& s : w.splits) {
        if (++shown > 40) return text + "\n  ...";
        const Ins& i = program_.code[s.pc];
        text += "\n  CTA " + std::to_string(cta->linear) + " warp " + std::to_string(w.index) + " lanes " +
                hex(s.mask) + " at line " + std::to_string(i.line) +
                (i.loc.line ? " (source line " + std::to_string(i.loc.line) + ")" : "") + ": ";
        if (s.state == State::WaitBarrier) {
          const NamedBarrier& b = cta->barriers[s.barrier];
          text += "barrier " + std::to_string(s.barrier) + ", " + std::to_string(b.arrived) + " of " +
                  std::to_string(b.has_count ? b.expected : cta->alive) + " threads have arrived";
        } else if (s.state == State::WaitLanes) {
          text += program_.opcodes[i.opcode] + " waits for lanes " + hex(s.want & ~s.mask);
        } else if (s.state == State::WaitCluster) {
          text += "barrier.cluster.wait, " + std::to_string(gang_.cluster_arrived) + " of " +
                  std::to_string(gang_.alive) + " threads have arrived";
        } else {
          // A poll is a branch back to an instruction that found nothing; others are tried again themselves.
          const Ins& tried = i.kind == Kind::Sync || s.pc == 0 ? i : program_.code[s.pc - 1];
          text += "polls (" + program_.opcodes[tried.opcode] + ", line " + std::to_string(tried.line) +
                  (tried.loc.line ? ", source line " + std::to_string(tried.loc.line) : "") + ")" + mbarrier_waiting(w, tried, s.mask);
          if (program_.moves_registers && program_.opcodes[i.opcode].rfind("setmaxnreg", 0) == 0) {
            text += ", needs " + std::to_string((static_cast<u32>(i.imm) - w.registers_held) * kLanes) + " registers, " +
                    std::to_string(cta->free_registers) + " of the CTA's " +
                    std::to_string(launch_.registers * kLanes * warps_) + " are free";
          }
        }
      }
    }
  }
  return text;
}

Located GangRunner::locate(const Fault& f) const {
  Located out;
  out.detector = f.detector;
  out.text = f.text;
  out.lane = f.lane;
  const Warp* warp = f.warp ? static_cast<const Warp*>(f.warp) : gang_.running;
  i32 pc = f.warp ? f.pc : warp ? warp->pc : -1;
  if (!warp) {  // a deadlock: the first warp that waits
    for (const auto& cta : gang_.ctas) {
      for (const auto& w : cta->warps) {
        if (!warp && !w.splits.empty()) warp = &w, pc = w.splits[0].pc;
      }
    }
  }
  if (warp) {
    const Ins& i = program_.code[pc];
    out.line = i.line;
    out.loc = i.loc;
    out.cta = static_cast<i64>(warp->cta->linear);
    std::copy(warp->cta->id, warp->cta->id + 3, out.cta_id);
    out.warp = warp->index;
    if (i.kind != Kind::Label) out.text = program_.opcodes[i.opcode] + ": " + f.text;
  } else if (!gang_.ctas.empty()) {
    out.cta = static_cast<i64>(gang_.ctas[0]->linear);
    std::copy(gang_.ctas[0]->id, gang_.ctas[0]->id + 3, out.cta_id);
  }
  return out;
}

}  // namespace cake::emu
