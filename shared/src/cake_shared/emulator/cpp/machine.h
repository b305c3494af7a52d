// What runs: warps of diverging parts, CTAs, and gangs of CTAs (clusters) that one worker executes together.
#pragma once
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "async.h"
#include "clocks.h"
#include "flight.h"
#include "memory.h"
#include "program.h"
#include "types.h"

namespace cake::emu {

struct Cta;
struct Gang;
class SharedShadow;
class TensorMemory;
struct WgmmaState;
class LaunchRecord;

enum class State : u8 { Run, WaitLanes, WaitBarrier, WaitCluster };
enum class Signal : u8 {
  None,
  Yield,  // the instruction is done but found nothing new: run others first
  Rest,   // the instruction is done: give others a turn
  Wait,   // the handler has put the current part into a waiting state; whoever ends the wait moves its pc on
  Again,  // run the same instruction again after others have run
  Turn    // the instruction is done and the turn of the warp is over; the same part goes on with its next
};

// Lanes of a warp that share a program counter.
struct Split {
  u32 mask;
  i32 pc;
  State state = State::Run;
  u8 barrier = 0;
  u32 want = 0;        // WaitLanes: the lanes that must come together
  u64 parked = ~0ull;  // Gang::progress when it last found nothing new
  u32 token = 0;       // phase it waits for
  std::vector<i32> returns;
};

struct Stats {
  std::vector<u64> executed;  // by instruction
  u64 thread_instructions = 0;
  u64 bytes[7][2] = {};  // by Space, read and written
  u64 shared_accesses = 0, shared_wavefronts = 0;
  u64 mma_flops = 0, async_copies = 0;
  std::string printed;
  void add(const Stats& other);
};

struct Warp {
  u8* registers = nullptr;
  u32* predicates = nullptr;
  u32 mask = 0;   // lanes that execute the current instruction
  u32 alive = 0;  // lanes that have not exited
  Signal signal = Signal::None;
  i32 pc = 0;  // of the current instruction
  int index = 0;
  int current = 0;     // index in splits
  int allocation = 0;  // last one found, tried first
  Cta* cta = nullptr;
  Gang* gang = nullptr;
  Stats* stats = nullptr;
  u8* local = nullptr;  // thread-local memory, lane after lane
  u32 local_bytes = 0;
  std::vector<Split> splits;
  LaneCopies copies;  // cp.async groups
  BulkGroups bulk;    // cp.async.bulk groups
  u32 cluster_phase[kLanes] = {};  // that the lane has arrived for and not waited for; 0: none
  u32 gathered[16] = {};           // by named barrier: lanes that have arrived while others of the warp have not
  std::unique_ptr<RegisterFlight> flight;  // null until the first operation with registers in flight
  u64 poll_value = 0;
  i32 poll_pc = -1;
  u32 registers_held = 0;               // a thread's, after setmaxnreg
  std::vector<u32> register_changes;    // what its setmaxnreg asked for, to compare the four warps of a warpgroup

  Split& split() { return splits[current]; }
  template <class T>
  auto* slot(u32 offset) {
    return reinterpret_cast<std::conditional_t<sizeof(T) == 8, u64, u32>*>(registers + offset);
  }
  u32 lane32(u32 slot_offset, int lane) const { return reinterpret_cast<const u32*>(registers + slot_offset)[lane]; }
  u64 lane64(u32 slot_offset, int lane) const { return reinterpret_cast<const u64*>(registers + slot_offset)[lane]; }
  void set32(u32 slot_offset, int lane, u32 value) { reinterpret_cast<u32*>(registers + slot_offset)[lane] = value; }
  void set64(u32 slot_offset, int lane, u64 value) { reinterpret_cast<u64*>(registers + slot_offset)[lane] = value; }
  void set_predicate(u32 index, u32 bits) { predicates[index] = (predicates[index] & ~mask) | (bits & mask); }
};

struct NamedBarrier {
  u32 arrived = 0, expected = 0;  // lanes; expected 0: all that are alive
  bool used = false, has_count = false;
  u32 predicate_true = 0, predicate_lanes = 0;  // bar.red
};

// An mbarrier that counts bytes of copies: whether anybody has waited for the last of them.
struct BarrierUse {
  u32 offset = 0;
  u64 phases = 0;        // completed
  u64 waited = 0;        // phases that a thread has waited for
  u64 counted = 0;       // phase, from 1, that counts the last bytes
  Warp* issuer = nullptr;  // of the copy that brought them
  int pc = -1;
};

struct Cta {
  Gang* gang = nullptr;
  u32 rank = 0;  // in its cluster
  u32 id[3] = {};
  u64 linear = 0;
  u8* shared = nullptr;  // host address of shared offset 0
  u32 shared_end = 0;
  u32 alive = 0;  // lanes
  std::vector<Warp> warps;
  NamedBarrier barriers[16];
  std::unique_ptr<SharedShadow> shadow;
  std::unique_ptr<TensorMemory> tensor;
  std::unique_ptr<WgmmaState> wgmma;
  bool done = false;
  bool grid_waited = false, dependents_started = false;  // griddepcontrol.wait and .launch_dependents
  std::vector<BarrierUse> barrier_uses;
  u32 free_registers = 0;                                // of those that setmaxnreg moves between its warps
};

// A small generator, cheap to seed for every gang (splitmix64).
struct Random {
  u64 state = 0;
  void seed(u64 s) { state = s; }
  u64 operator()() {
    u64 z = state += 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
  }
};

// What a launch may ask of the target.
struct Limits {
  u32 threads = 0, shared_bytes = 0, registers_per_sm = 0, registers_per_thread = 0, cluster_ctas = 0, tmem_columns = 0;
};

struct Launch {
  const Program* program = nullptr;
  Limits limits;
  u32 registers = 0;               // a thread's at the start, where setmaxnreg needs to know
  const std::vector<std::string>* lines = nullptr;  // of the PTX text, for traces
  const std::map<u32, std::string>* files = nullptr;  // names of the source files, where known
  LaunchRecord* record = nullptr;  // of its accesses to global memory, on a stream under Detect::All
  u32 grid[3] = {1, 1, 1}, block[3] = {1, 1, 1}, cluster[3] = {1, 1, 1};
  u32 dynamic_shared = 0;
  std::vector<u8> params;  // 128-byte aligned copy lives in `param_data`
  u8* param_data = nullptr;
  Registry registry;
  Order order = Order::Eager;
  Detect detect = Detect::All;
  u64 seed = 0;
  u64 max_instructions = 0;  // of one gang without any progress
  bool profile = false;      // count bank conflicts
  int trace_warp = -1;
  i64 trace_cta = -1;
  u32 stop_line = 0;
  u32 dump_shared[2] = {0, 0}, dump_tensor[2] = {0, 0};
  std::string target;
};

// A cluster of CTAs (of one CTA without clusters): executed by one worker, warps interleaved.
struct Gang {
  const Launch* launch = nullptr;
  u8* arena = nullptr;  // shared memory windows of its CTAs, rank after rank; also what generic addresses point to
  u64 arena_bytes = 0;
  std::vector<std::unique_ptr<Cta>> ctas;
  AsyncQueue async;
  u64 progress = 0;  // changes whenever another warp could find something new
  u64 executed = 0, executed_at_progress = 0;
  Random random;
  u32 cluster_arrived = 0, cluster_phase = 0;  // lanes that have arrived and are alive
  u32 alive = 0;
  Stats* stats = nullptr;
  Warp* running = nullptr;       // the warp whose instruction is being executed
  Warp* async_issuer = nullptr;  // the warp that issued the asynchronous operation being performed,
  int async_pc = -1;             // and where
  Clocks clocks;
};

// ---------------------------------------------------------------- lanes

template <class F>
inline __attribute__((always_inline)) void for_lanes(u32 mask, F&& f) {
  if (mask == kFull) {
#pragma GCC ivdep
    for (int l = 0; l < kLanes; ++l) f(l);
  } else {
    for (; mask; mask &= mask - 1) f(std::countr_zero(mask));
  }
}

// One lane after the other, for handlers whose body has side effects.
template <class F>
inline void each_lane(u32 mask, F&& f) {
  for (; mask; mask &= mask - 1) f(std::countr_zero(mask));
}

template <class T>
using SlotWord = std::conditional_t<sizeof(T) == 8, u64, u32>;

template <class T>
inline T get(const SlotWord<T>* slot, int lane) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat>) {
    return T{static_cast<u16>(slot[lane])};
  } else if constexpr (sizeof(T) == sizeof(SlotWord<T>)) {
    return std::bit_cast<T>(slot[lane]);
  } else {
    return static_cast<T>(slot[lane]);
  }
}

template <class T>
inline void put(SlotWord<T>* slot, int lane, T value) {
  if constexpr (std::is_same_v<T, Half> || std::is_same_v<T, BFloat>) {
    slot[lane] = value.bits;
  } else if constexpr (sizeof(T) == sizeof(SlotWord<T>)) {
    slot[lane] = std::bit_cast<SlotWord<T>>(value);
  } else {
    slot[lane] = static_cast<std::make_unsigned_t<T>>(value);
  }
}

// d = f(a), d = f(a, b), d = f(a, b, c), lane by lane; D may differ from the operands' type.
template <class D, class A, class F>
inline void map1(Warp& w, const Ins& i, F f) {
  auto* d = w.slot<D>(i.d);
  auto* a = w.slot<A>(i.a);
  for_lanes(w.mask, [&](int l) { put<D>(d, l, f(get<A>(a, l))); });
}
template <class D, class A, class B, class F>
inline void map2(Warp& w, const Ins& i, F f) {
  auto* d = w.slot<D>(i.d);
  auto* a = w.slot<A>(i.a);
  auto* b = w.slot<B>(i.b);
  for_lanes(w.mask, [&](int l) { put<D>(d, l, f(get<A>(a, l), get<B>(b, l))); });
}
template <class D, class A, class B, class C, class F>
inline void map3(Warp& w, const Ins& i, F f) {
  auto* d = w.slot<D>(i.d);
  auto* a = w.slot<A>(i.a);
  auto* b = w.slot<B>(i.b);
  auto* c = w.slot<C>(i.c);
  for_lanes(w.mask, [&](int l) { put<D>(d, l, f(get<A>(a, l), get<B>(b, l), get<C>(c, l))); });
}

// After an instruction that tells other warps something: under Order::Random the turn often ends here, so that those who
// do not wait for each other overtake each other.
inline void told_others(Warp& w) {
  if (w.gang->launch->order == Order::Random && w.signal == Signal::None && (w.gang->random() & 1)) w.signal = Signal::Turn;
}

// The lanes that are not alive any more satisfy barriers; called after arrivals and exits.
void release_barriers(Cta& cta);
void leave_barriers(Warp& w);  // lanes exit
void release_cluster(Gang& gang);
void leave_cluster(Warp& w, u32 lanes);  // lanes exit

// Where an instruction stands, for messages: "line 12 (source.cu:34)".
std::string place_text(const Launch& launch, int pc);

}  // namespace cake::emu
