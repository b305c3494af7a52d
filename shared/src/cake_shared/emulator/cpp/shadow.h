// What is known about the bytes of a CTA's shared memory beside their values: whether they were written, by whom, who
// has read them, and whether an asynchronous copy into them is under way.
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
  void finish();  // when the CTA ends

  // By ordinary instructions of a warp of the gang. Unread: by an atomic whose result nobody looks at, so that its warp cannot
  // tell whose writes came before.
  enum class Access : u8 { Ordinary, Strong, Unread };
  void access(Warp& w, u32 offset, u32 bytes, bool reads, bool writes, Access how, int lane);
  // After a strong access: what its releases and acquires, or the fences around it, pass on.
  struct Strong {
    bool reads, looks, writes, acquires, releases;
    u32 lanes;
  };
  void order(Warp& w, u32 offset, u32 bytes, Strong how);
  // By the asynchronous proxy on behalf of `issuer`, when the operation is issued. A copy that writes is then under way
  // until async_arrived says that its data are there and which mbarrier counts them (a shared address with rank bits).
  // What it reads nobody may write before knowing `reader` up to `clock`.
  struct Reader {
    u32 actor, clock;
    u64 checked = ~0ull;  // the last cell that was in order; many bytes have one history
  };
  void async_read(Warp& issuer, u32 offset, u32 bytes, Reader& reader);
  // To another CTA's shared memory, counted there: this CTA must not end before somebody in it knows of `reader`.
  void sends(const Reader& reader, int pc) { sent_[reader.actor] = {reader.clock, 0, pc}; }
  // Reductions need no order among themselves. Those of the generic proxy need no proxy fence.
  enum class Async : u8 { Copy, Reduce, GenericReduce };
  void async_write(Warp& issuer, u32 offset, u32 bytes, Async how);
  void async_arrived(u32 offset, u32 bytes, u32 barrier);

  // cp.async: under way until a wait of the thread that issued it.
  void copy_begin(Warp& w, u32 offset, u32 bytes, int lane);
  void copy_issued(Warp& w, const std::shared_ptr<AsyncOp>& op);
  void copy_waited(Warp& w);
  // cp.async.mbarrier.arrive: the mbarrier waits for these copies of a thread. They count as written by its warp at `clock`.
  void copy_signal(Warp& w, int lane, const std::vector<std::shared_ptr<AsyncOp>>& copies, u32 clock);

  // What orders the accesses of different warps.
  void barrier_arrive(Warp& w, u32 id);
  void barrier_released(Cta& cta, u32 id);
  void mbarrier_init(Warp& w, u32 offset, int lane);
  void mbarrier_inval(Warp& w, u32 offset, int lane);
  bool is_mbarrier(u32 offset) const { return mbarriers_.count(offset) != 0; }
  // Every operation of a warp on an mbarrier, or of what it issues: the initialisation must be known to it, and who takes
  // the mbarrier away must know of the operation.
  enum class Touch : u8 { Counts, Waits, Issues };  // arrives or changes what is expected; polls; a copy will signal it
  void mbarrier_touch(Warp& w, u32 offset, Touch how, int lane);
  void mbarrier_arrive(Warp& w, u32 lanes, u32 offset, bool relaxed);
  // An asynchronous operation signals it; `told`: what its issuer knew, where it passes that on.
  void mbarrier_signal(u32 offset, int pc, const Knowledge* told);
  void mbarrier_phase(u32 offset);
  void mbarrier_acquire(Warp& w, u32 lanes, u32 offset, bool relaxed);
  // The phase that counts this arrival also tells of operations of `actor` up to `clock`.
  void mbarrier_tells(u32 offset, u32 actor, u32 clock);
  // The actor of a mbarrier and the clock of its phase under way; false for one that this shadow has not seen initialised.
  bool mbarrier_clock(u32 offset, u32& actor, u32& clock) const;
  u32 id(const Warp& w) const;  // the warp's actor

 private:
  static constexpr u32 kUnit = 16;
  // kProxy: written by the asynchronous proxy; kSynced, kPast: has an entry in synced_, past_; kMbarrier: of an mbarrier that
  // is initialised; kReducing: what is under way are reductions.
  enum : u8 { kWritten = 1, kUnderWay = 2, kProxy = 4, kSynced = 8, kPast = 16, kMbarrier = 32, kReducing = 64 };
  struct Cell {
    u32 clock = 0;   // of the last write
    u16 writer = 0;  // actor
    u8 flags = 0;
    u8 pad = 0;
  };
  // A write that still counts where the last one does not tell of all: of cells with strong writes, which need no order among
  // themselves, by warp the last one, with the ordinary ones before them; and ordinary ones that were let pass.
  struct Past {
    u32 clock;
    u16 actor;
    bool strong, proxy;
    bool chained;  // who reads the last write reads this one too: nothing but atomics since
    int pc;
    std::vector<std::pair<u32, u32>> observers;  // warps that have read it by a strong access, and when first
  };
  struct Use {
    u32 clock = 0, phase = 0;
    int pc = -1;
    Touch how = Touch::Counts;
  };
  struct Mbarrier {
    u32 actor;
    Knowledge arriving, completed;
    u32 initialiser, clock;  // mbarrier.init
    int pc;
    std::vector<Use> uses;   // by warp: its last operation
    u32 signals = 0;         // operations under way that will signal it
    Use signal;              // the last that has
    std::vector<Use> relaxed;  // by warp, empty without any: its last relaxed wait, and the phase that it has seen end
  };
  struct Arrival {
    u32 warp, clock;
    int pc;
  };
  struct Named {  // barrier
    Knowledge told;
    std::vector<Arrival> last, now;  // of the last phase and of the one under way
  };
  // Of a cell with strong accesses since its last ordinary write.
  struct Synced {
    Knowledge handed;            // to those who read the last write, or an atomic of the chain that follows it
    std::vector<u32> reads;      // by warp: clock of its last strong read since its last strong write
    std::vector<int> read_pcs;   // by warp: where that was
    std::vector<bool> observed;  // by warp: has read the last write
    // By warp: what its last release here told, and what its strong reads here were handed.
    std::unordered_map<u32, Knowledge> released, read;
  };
  struct Range {
    u32 offset, bytes;
    int lane;
  };
  struct Copies {
    std::shared_ptr<AsyncOp> op;
    std::vector<Range> ranges;
  };

  // An unordered write over another warp's write is forgiven when it leaves the bytes as they were: many kernels have
  // all threads store one value. The next access looks at what the store has done.
  struct Suspect {
    u32 cell, me, other, old;
    int lane;
    const Warp* warp;
    int pc, other_pc;
  };
  void confirm();

  u32* readers(u32 cell) { return readers_.data() + static_cast<size_t>(cell) * warps_; }
  u32* async_readers(u32 cell) {
    return async_readers_.data() + static_cast<size_t>(cell * granule_ / kUnit) * async_columns_;
  }
  void check_readers(u32 me, u32 cell, const u32* read, u32 first, u32 count, int lane) const;
  void check_strong_readers(u32 me, u32 cell, int lane) const;
  void async_order(Warp& issuer, u32 cell, bool reads, bool writes, bool fenced = true, bool strong = false);
  bool check_order(Warp& w, u32 cell, bool writes, bool strong, int lane, bool forgive = false);
  void unordered_write(Warp& w, u32 cell, const Past& before, bool writes, bool forgive, int lane);
  void check_fenced(const Knowledge& known, u32 cell, u32 actor, u32 clock, int pc) const;
  bool knows(u32 me, const Past& write) const;
  std::vector<Past>& past(u32 cell);
  void let_pass(u32 cell, u32 me);
  void observe(u32 cell, u32 me, u32 now);
  Synced& synced(u32 cell);
  void reduced(u32 cell, u32 actor, u32 clock);
  void claim(Warp& w, u32 offset, int lane);
  bool knows_phase(u32 me, const Mbarrier& m, u32 phase) const;
  std::string mbarrier_name(u32 offset) const;
  [[noreturn]] void gone(u32 other, const char* what, int pc) const;
  void strong_access(Warp& w, u32 cell, u32 me, u32 now, bool reads, bool looks, bool writes);
  [[noreturn]] void race(u32 me, u32 other, int other_pc, u32 cell, const char* what, const char* before, int lane) const;
  std::string unordered(u32 me, u32 other, int other_pc, u32 cell, const char* what, const char* before) const;
  std::string place(u32 cell) const;
  const char* number(const char* one, const char* many) const { return granule_ > 1 ? many : one; }  // as place says
  std::string ungrouped_copy(u32 cell) const;
  std::string ungrouped_read(u32 actor, int pc) const;
  std::string at(int pc) const;  // " at line 12 (source.cu:34)"
  std::string name(u32 actor) const;
  void settle(Warp& w, Copies& copies, u32 lanes, u32 clock);

  Cta* cta_ = nullptr;
  Gang* gang_;
  Clocks* clocks_;
  u32 granule_, warps_, warps_per_cta_;
  u32 async_columns_;  // the actors after the warps, as many as may read
  std::vector<Cell> cells_;
  std::vector<u32> readers_;        // by cell, then warp: clock of its last read
  std::vector<u32> async_readers_;  // by 16 bytes, which asynchronous operations read together, then actor
  // Where those accesses are in the program; what no access has written is left over from an earlier CTA.
  std::vector<int> write_pcs_, read_pcs_, async_read_pcs_;
  std::unordered_map<u32, Synced> synced_;
  std::unordered_map<u32, std::vector<Past>> past_;
  std::unordered_map<u32, u32> reducing_;  // by cell: how many are under way
  u32 first_warp_ = 0;                     // of the CTA
  std::vector<Use> remote_;                // by warp, of those of other CTAs: its last access
  std::unordered_map<u32, Use> sent_;      // by actor that tells of its end: the last copy out to another CTA
  std::unordered_map<u32, Mbarrier> mbarriers_;
  Named named_[16];
  std::vector<Suspect> suspects_;
  std::vector<Range> issuing_;                           // of the cp.async being issued
  std::unordered_map<u32, std::vector<Copies>> copies_;  // by warp
};

}  // namespace cake::emu
