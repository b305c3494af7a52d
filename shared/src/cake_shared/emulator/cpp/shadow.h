// What is known about the bytes of a CTA's shared memory beside their values: whether they were written, by whom, who has
// read them, and whether an asynchronous copy into them is under way.
#pragma once
#include <memory>
#include <unordered_map>
#include <vector>

#include "clocks.h"

namespace cake::emu {

struct Cta;
struct Gang;
struct Warp;
struct AsyncOp;

class SharedShadow {
 public:
  SharedShadow(Cta& cta, u32 granule);
  void reset(Cta& cta);  // for the next CTA

  // By ordinary instructions of a warp of the gang.
  void access(Warp& w, u32 offset, u32 bytes, bool reads, bool writes, bool atomic, int lane);
  // By the asynchronous proxy on behalf of `issuer`, when the operation is issued. A copy that writes is then under way
  // until async_arrived says that its data are there and which mbarrier counts them (a shared address with rank bits).
  void async_access(Warp& issuer, u32 offset, u32 bytes, bool reads, bool writes);
  void async_arrived(u32 offset, u32 bytes, u32 barrier);

  // cp.async: under way until a wait of the thread that issued it.
  void copy_begin(Warp& w, u32 offset, u32 bytes, int lane);
  void copy_issued(Warp& w, const std::shared_ptr<AsyncOp>& op);
  void copy_waited(Warp& w);
  void copy_signal(Warp& w, u32 barrier);  // cp.async.mbarrier.arrive: the mbarrier waits for the thread's copies

  // What orders the accesses of different warps.
  void barrier_arrive(Warp& w, u32 id);
  void barrier_released(Cta& cta, u32 id);
  void fence(Warp& w);
  void proxy_fence(Warp& w);
  void mbarrier_init(Warp& w, u32 offset);
  void mbarrier_inval(u32 offset) { mbarriers_.erase(offset); }
  bool is_mbarrier(u32 offset) const { return mbarriers_.count(offset) != 0; }
  void mbarrier_arrive(Warp& w, u32 offset);
  void mbarrier_phase(u32 offset);
  void mbarrier_acquire(Warp& w, u32 offset);

 private:
  enum : u8 { kWritten = 1, kAtomic = 2, kUnderWay = 4, kProxy = 8 };  // kProxy: written by the asynchronous proxy
  struct Cell {
    u32 clock = 0;   // of the last write
    u16 writer = 0;  // actor
    u8 flags = 0;
    u8 pad = 0;
  };
  struct Mbarrier {
    u32 actor;
    Knowledge arriving, completed;
  };
  struct Copies {
    std::shared_ptr<AsyncOp> op;
    std::vector<std::pair<u32, u32>> ranges;  // offset, bytes
  };

  u32 id(const Warp& w) const;
  u32* readers(u32 cell) { return readers_.data() + static_cast<size_t>(cell) * warps_; }
  void check_order(Warp& w, u32 cell, bool writes, bool atomic, int lane);
  [[noreturn]] void race(u32 me, u32 other, u32 cell, const char* what, int lane) const;
  std::string place(u32 cell) const;
  std::string name(u32 actor) const;
  void settle(Warp& w, const std::vector<std::pair<u32, u32>>& ranges);

  Gang* gang_;
  Clocks* clocks_;
  u32 granule_, warps_, warps_per_cta_;
  std::vector<Cell> cells_;
  std::vector<u32> readers_;  // by cell, then warp: clock of its last read
  std::unordered_map<u32, Mbarrier> mbarriers_;
  Knowledge named_[16];
  std::vector<std::pair<u32, u32>> issuing_;      // ranges of the cp.async being issued
  std::unordered_map<u32, std::vector<Copies>> copies_;  // by warp
};

}  // namespace cake::emu
