// Runs gangs of CTAs: which warp, which part of a diverged warp, and when nothing can go on any more.
#pragma once
#include <functional>
#include <map>
#include <memory>

#include "machine.h"

namespace cake::emu {

// A fault with its place, as it leaves the emulator.
struct Located {
  std::string detector, text;
  u32 line = 0;
  SourceLoc loc;
  i64 cta = -1;
  u32 cta_id[3] = {0, 0, 0};
  int warp = -1, lane = -1;
};

enum class Outcome : u8 { Running, Stuck, Done };
enum class SliceEnd : u8 { Busy, Idle, Done };

// One gang with the memory it runs in; reused for one gang after another.
class GangRunner {
 public:
  GangRunner(const Launch& launch, Stats& stats);
  ~GangRunner();
  GangRunner(const GangRunner&) = delete;
  GangRunner& operator=(const GangRunner&) = delete;

  void start(u64 gang_index);
  Outcome round();  // gives every warp a slice
  // Lets every poll try again: another gang may have written what it looks for. That alone is no progress.
  void wake() {
    last_progress_ = ++gang_.progress;
    idle_rounds_ = 0;
  }
  u64 advances() const { return advances_; }  // rounds in which something was stored or signalled
  Gang& gang() { return gang_; }
  std::string waiting() const;  // where every warp stands, for a deadlock report
  void finish();                // checks what must hold when a gang ends
  Located locate(const Fault& f) const;

 private:
  void init_cta(Cta& cta, u64 linear, u32 rank);
  void init_warp(Warp& w, Cta& cta, int index);
  u64 special_value(const Program::SpecialSlot& s, const Cta& cta, int warp, int lane) const;
  template <bool kTrace>
  SliceEnd run(Warp& w, u64 budget);
  bool pick(Warp& w, bool rotate);
  void merge(Warp& w);
  void check_parted(Warp& w);
  bool needs_lanes(Warp& w, const Ins& i, u32 current);
  void leave(Warp& w, u32 lanes, i32 pc);
  void check_exit(Cta& cta);
  void trace(const Warp& w, const Ins& i, u32 mask) const;

  const Launch& launch_;
  const Program& program_;
  Stats& stats_;
  Gang gang_;
  u8* registers_ = nullptr;
  size_t registers_bytes_ = 0, warp_register_bytes_ = 0;
  std::vector<u32> predicates_;
  u8* local_ = nullptr;
  bool constants_ready_ = false;
  u32 threads_ = 0, warps_ = 0, ctas_ = 0;
  u64 last_progress_ = 0, advances_ = 0;
  int idle_rounds_ = 0;
};

// Throws Located when a detector fires.
void run_gangs(Launch& launch, int threads, Stats& total);

}  // namespace cake::emu
