// Setting up gangs, warps and their registers; the loop over all gangs of a launch.
#include <sys/mman.h>

#include <algorithm>
#include <mutex>
#include <thread>

#include "overlap.h"
#include "scheduler.h"
#include "shadow.h"
#include "tensor_memory.h"
#include "wgmma.h"

namespace cake::emu {
namespace {

// CTAs that wait for each other through global memory must be resident together; a device holds about this many.
constexpr size_t kResidentGangs = 132;

}  // namespace

GangRunner::GangRunner(const Launch& launch, Stats& stats) : launch_(launch), program_(*launch.program), stats_(stats) {
  threads_ = launch.block[0] * launch.block[1] * launch.block[2];
  warps_ = (threads_ + kLanes - 1) / kLanes;
  ctas_ = launch.cluster[0] * launch.cluster[1] * launch.cluster[2];
  stats_.executed.resize(program_.code.size());
  gang_.launch = &launch;
  gang_.stats = &stats_;
  gang_.arena_bytes = static_cast<u64>(ctas_) * kSharedWindow;
  void* arena =
      mmap(nullptr, gang_.arena_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (arena == MAP_FAILED) fault("LaunchError", "no address space for the shared memory of a cluster");
  gang_.arena = static_cast<u8*>(arena);
  warp_register_bytes_ = (program_.register_bytes + 63) / 64 * 64;
  registers_bytes_ = std::max<size_t>(64, warp_register_bytes_ * warps_ * ctas_);
  registers_ = static_cast<u8*>(std::aligned_alloc(64, registers_bytes_));
  std::memset(registers_, 0, registers_bytes_);
  predicates_.assign(static_cast<size_t>(program_.predicates) * warps_ * ctas_, 0);
  const size_t local_bytes = static_cast<size_t>(program_.local_bytes) * kLanes * warps_ * ctas_ + 64;
  local_ = static_cast<u8*>(std::aligned_alloc(64, local_bytes / 64 * 64));
  std::memset(local_, 0xcd, local_bytes / 64 * 64);
}

GangRunner::~GangRunner() {
  munmap(gang_.arena, gang_.arena_bytes);
  std::free(registers_);
  std::free(local_);
}

void GangRunner::start(u64 gang_index) {
  gang_.random.seed(launch_.seed * 0x9e3779b97f4a7c15ull + gang_index + 1);
  gang_.async.clear();
  gang_.progress = gang_.executed = gang_.executed_at_progress = 0;
  gang_.cluster_arrived = gang_.cluster_phase = 0;
  gang_.alive = threads_ * ctas_;
  last_progress_ = 0;
  idle_rounds_ = 0;
  gang_.running = gang_.async_issuer = nullptr;
  gang_.async_pc = -1;
  if (launch_.detect == Detect::All) gang_.clocks.reset(warps_ * ctas_);
  // The cluster's place in the grid, then each CTA's place in the cluster; both x first.
  u32 clusters[3], place[3];
  for (int k = 0; k < 3; ++k) clusters[k] = launch_.grid[k] / launch_.cluster[k];
  place[0] = static_cast<u32>(gang_index % clusters[0]);
  place[1] = static_cast<u32>(gang_index / clusters[0] % clusters[1]);
  place[2] = static_cast<u32>(gang_index / clusters[0] / clusters[1]);
  for (u32 rank = 0; rank < ctas_; ++rank) {
    if (gang_.ctas.size() <= rank) gang_.ctas.push_back(std::make_unique<Cta>());
    auto& cta = gang_.ctas[rank];
    const u32 within[3] = {rank % launch_.cluster[0], rank / launch_.cluster[0] % launch_.cluster[1],
                           rank / launch_.cluster[0] / launch_.cluster[1]};
    for (int k = 0; k < 3; ++k) cta->id[k] = place[k] * launch_.cluster[k] + within[k];
    const u64 linear = (static_cast<u64>(cta->id[2]) * launch_.grid[1] + cta->id[1]) * launch_.grid[0] + cta->id[0];
    init_cta(*cta, linear, rank);
  }
  constants_ready_ = true;
}

void GangRunner::init_cta(Cta& cta, u64 linear, u32 rank) {
  cta.gang = &gang_;
  cta.rank = rank;
  cta.linear = linear;
  cta.shared = gang_.arena + static_cast<u64>(rank) * kSharedWindow;
  cta.shared_end = program_.shared_end + launch_.dynamic_shared;
  cta.alive = threads_;
  cta.done = cta.grid_waited = cta.dependents_started = false;
  cta.free_registers = 0;
  cta.barrier_uses.clear();
  cta.tensor.reset();
  cta.wgmma.reset();
  for (auto& b : cta.barriers) b = NamedBarrier{};
  std::memset(cta.shared + kSharedBase, 0xcd, cta.shared_end - kSharedBase);
  cta.warps.resize(warps_);
  for (u32 k = 0; k < warps_; ++k) init_warp(cta.warps[k], cta, static_cast<int>(k));
  // Barriers pass on what warps know of earlier launches even in a CTA without shared memory.
  const bool overlaps = launch_.record && launch_.record->programmatic;
  if (launch_.detect == Detect::All && (cta.shared_end > kSharedBase || launch_.record)) {
    if (!cta.shadow) cta.shadow = std::make_unique<SharedShadow>(cta, program_.shared_granule);
    cta.shadow->reset(cta);
    for (u32 k = 0; k < warps_ && !overlaps; ++k) gang_.clocks.know_grid(cta.shadow->id(cta.warps[k]), kFull);
  }
}

void GangRunner::init_warp(Warp& w, Cta& cta, int index) {
  const size_t slot = static_cast<size_t>(cta.rank) * warps_ + index;
  w.registers = registers_ + slot * warp_register_bytes_;
  w.predicates = predicates_.data() + slot * program_.predicates;
  w.index = index;
  w.cta = &cta;
  w.gang = &gang_;
  w.stats = &stats_;
  w.signal = Signal::None;
  w.pc = 0;
  w.current = 0;
  w.copies.lanes.reset();
  w.bulk.lanes.reset();
  w.flight.reset();
  w.poll_pc = -1;
  w.registers_held = launch_.registers;
  w.register_changes.clear();
  std::memset(w.cluster_phase, 0, sizeof w.cluster_phase);
  std::memset(w.gathered, 0, sizeof w.gathered);
  w.local_bytes = program_.local_bytes;
  w.local = local_ + slot * kLanes * program_.local_bytes;
  const u32 left = threads_ - static_cast<u32>(index) * kLanes;
  w.alive = left >= kLanes ? kFull : (1u << left) - 1;
  w.splits.clear();
  Split all;
  all.mask = w.alive;
  all.pc = 0;
  w.splits.push_back(std::move(all));
  if (!constants_ready_) {
    for (const auto& c : program_.constants) {
      for (int l = 0; l < kLanes; ++l) {
        if (c.width == 4) {
          w.set32(c.slot, l, static_cast<u32>(c.value));
        } else {
          w.set64(c.slot, l, c.value);
          if (c.width == 16) w.set64(c.slot + 8 * kLanes, l, 0);
        }
      }
    }
  }
  for (const auto& s : program_.specials) {
    for (int l = 0; l < kLanes; ++l) {
      const u64 value = special_value(s, cta, index, l);
      if (s.width == 4) w.set32(s.slot, l, static_cast<u32>(value));
      else w.set64(s.slot, l, value);
    }
  }
}

u64 GangRunner::special_value(const Program::SpecialSlot& s, const Cta& cta, int warp, int lane) const {
  const u32 thread = static_cast<u32>(warp * kLanes + lane), axis = s.aux;
  const u32* block = launch_.block;
  switch (s.id) {
    case Special::Tid:
      return axis == 0 ? thread % block[0] : axis == 1 ? thread / block[0] % block[1] : thread / block[0] / block[1];
    case Special::Ntid: return block[axis];
    case Special::Ctaid: return cta.id[axis];
    case Special::Nctaid: return launch_.grid[axis];
    case Special::ClusterCtaid: return cta.id[axis] % launch_.cluster[axis];
    case Special::ClusterNctaid: return launch_.cluster[axis];
    case Special::Clusterid: return cta.id[axis] / launch_.cluster[axis];
    case Special::Nclusterid: return launch_.grid[axis] / launch_.cluster[axis];
    case Special::ClusterRank: return cta.rank;
    case Special::ClusterSize: return ctas_;
    case Special::Lane: return static_cast<u32>(lane);
    case Special::WarpId: return static_cast<u32>(warp);
    case Special::WarpCount: return warps_;
    case Special::SmId: return cta.linear % kResidentGangs;
    case Special::SmCount: return kResidentGangs;
    case Special::GridId: return 1;
    case Special::ExplicitCluster: return ctas_ > 1;
    case Special::LaneMaskEq: return 1u << lane;
    case Special::LaneMaskLt: return (1u << lane) - 1;
    case Special::LaneMaskLe: return (2u << lane) - 1;
    case Special::LaneMaskGt: return ~((2u << lane) - 1);
    case Special::LaneMaskGe: return ~((1u << lane) - 1);
    case Special::DynamicShared: return launch_.dynamic_shared;
    case Special::TotalShared: return cta.shared_end;
    case Special::SharedSymbol: return (static_cast<u64>(cta.rank) << kRankShift) + s.aux;
    case Special::DynamicSymbol: return (static_cast<u64>(cta.rank) << kRankShift) + program_.shared_end + s.aux;
    case Special::ParamAddress: return s.aux;
  }
  return 0;
}

namespace {

void check_waited(const GroupList& list, const char* what, const char* group, int lane) {
  if (const AsyncOp* op = list.unwaited()) {
    std::string text = "the CTA ends with " + std::string(what) + " that no wait has covered";
    if (!list.open.empty() && op == list.open.front().get()) text += ": no " + std::string(group) + ".commit_group follows";
    throw Fault{"AsyncInFlight", text, lane, op->issuer, op->pc};
  }
}

// Copies that an mbarrier has counted need a thread that waits for it.
void check_counted(const Cta& cta) {
  for (const auto& use : cta.barrier_uses) {
    if (use.counted <= use.waited) continue;
    throw Fault{"AsyncInFlight",
                "the CTA ends with copies that no wait has covered: nobody has waited for phase " +
                    std::to_string((use.counted - 1) & 1) + " of mbarrier " + hex(use.offset),
                -1, use.issuer, use.pc};
  }
}

}  // namespace

void GangRunner::check_exit(Cta& cta) {
  cta.done = true;
  if (cta.shadow) cta.shadow->finish();
  if (launch_.record && !cta.dependents_started && cta.grid_waited) launch_.record->starts_late = true;
  for (const auto& w : cta.warps) {
    if (w.register_changes != cta.warps[static_cast<size_t>(w.index) / 4 * 4].register_changes) {
      fault("IllegalInstruction", "warps " + std::to_string(w.index / 4 * 4) + " and " + std::to_string(w.index) +
            " of one warpgroup executed different setmaxnreg instructions");
    }
  }
  for (const auto& w : cta.warps) {
    for (int l = 0; l < kLanes; ++l) {
      if (w.copies.lanes) check_waited(w.copies.lanes[l], "cp.async copies", "cp.async", l);
      if (w.bulk.lanes) check_waited(w.bulk.lanes[l], "bulk copies", "cp.async.bulk", l);
    }
  }
  check_counted(cta);
  if (cta.wgmma) cta.wgmma->check_exit();
  if (cta.tensor) cta.tensor->check_exit();
}

void GangRunner::finish() {
  if (!gang_.async.empty()) {
    const AsyncOp& op = gang_.async.oldest();
    throw Fault{"AsyncInFlight",
                std::to_string(gang_.async.size()) +
                    " asynchronous operations are not done when the last thread exits, this the oldest",
                -1, op.issuer, op.pc};
  }
  for (const auto& cta : gang_.ctas) check_counted(*cta);  // what was done after the last thread had exited
}

namespace {

// Gangs that do not talk to each other: each from start to end, on any thread. The fault of the first gang is reported,
// whatever the number of threads.
void run_independent(Launch& launch, u64 count, int threads, Stats& total) {
  std::atomic<u64> next{0}, failed{~0ull};
  std::mutex lock;
  std::vector<std::pair<u64, Located>> faults;
  std::vector<std::pair<u64, std::string>> printed;
  auto work = [&] {
    Stats stats;
    GangRunner runner(launch, stats);
    for (u64 k; (k = next++) < count && k < failed.load();) {
      try {
        stats.printed.clear();
        runner.start(k);
        Outcome o;
        while ((o = runner.round()) == Outcome::Running) {
        }
        if (o == Outcome::Stuck) fault("Deadlock", "no warp can go on:" + runner.waiting());
        runner.finish();
      } catch (const Fault& f) {
        std::lock_guard<std::mutex> guard(lock);
        faults.emplace_back(k, runner.locate(f));
        u64 seen = failed.load();
        while (k < seen && !failed.compare_exchange_weak(seen, k)) {
        }
      }
      if (!stats.printed.empty()) {
        std::lock_guard<std::mutex> guard(lock);
        printed.emplace_back(k, stats.printed);
      }
    }
    stats.printed.clear();
    std::lock_guard<std::mutex> guard(lock);
    total.add(stats);
  };
  const u64 workers = std::min<u64>(count, static_cast<u64>(std::max(1, threads)));
  std::vector<std::thread> pool;
  for (u64 k = 1; k < workers; ++k) pool.emplace_back(work);
  work();
  for (auto& t : pool) t.join();
  std::sort(printed.begin(), printed.end());
  for (const auto& p : printed) total.printed += p.second;
  if (!faults.empty()) {
    throw std::min_element(faults.begin(), faults.end(), [](auto& a, auto& b) { return a.first < b.first; })->second;
  }
}

// Gangs that talk through global memory: one schedule, drawn from the seed, over those that a device would hold.
void run_together(Launch& launch, u64 count, Stats& total) {
  Stats stats;
  std::vector<std::unique_ptr<GangRunner>> resident, spare;
  u64 next = 0;
  Random random{launch.seed + 77};
  const bool mix = launch.order == Order::Random;
  auto admit = [&] {
    std::unique_ptr<GangRunner> r;
    if (spare.empty()) {
      r = std::make_unique<GangRunner>(launch, stats);
    } else {
      r = std::move(spare.back());
      spare.pop_back();
    }
    r->start(next++);
    resident.push_back(std::move(r));
  };
  size_t at = 0, fruitless = 0;
  while (next < count || !resident.empty()) {
    if (resident.empty() || (mix && next < count && resident.size() < 4)) {
      admit();
      continue;
    }
    if (mix) at = random() % resident.size();
    at %= resident.size();
    GangRunner& r = *resident[at];
    try {
      r.wake();
      const u64 executed = r.gang().executed, advances = r.advances();
      Outcome o = Outcome::Running;
      int rounds = 0;
      while (o == Outcome::Running && (!mix || rounds < 8)) {
        o = r.round();
        ++rounds;
      }
      if (o == Outcome::Done) {
        r.finish();
        spare.push_back(std::move(resident[at]));
        resident.erase(resident.begin() + static_cast<std::ptrdiff_t>(at));
        fruitless = 0;
        continue;
      }
      // Parts that only poll execute a few instructions a visit; long computation is the Hang detector's business.
      const bool advanced = r.advances() != advances || r.gang().executed - executed > 2048u * static_cast<u32>(rounds);
      fruitless = advanced ? 0 : fruitless + 1;
      ++at;
      if (fruitless > resident.size() && next < count && resident.size() < kResidentGangs) {
        admit();
        at = resident.size() - 1;
        fruitless = 0;
      } else if (fruitless > 32 * resident.size() + 64) {
        std::string text;
        for (const auto& each : resident) text += each->waiting();
        fault("Deadlock", "no warp can go on:" + text.substr(0, 6000));
      }
    } catch (const Fault& f) {
      total.add(stats);
      throw r.locate(f);
    }
  }
  total.add(stats);
}

}  // namespace

void run_gangs(Launch& launch, int threads, Stats& total) {
  u64 count = 1;
  for (int k = 0; k < 3; ++k) count *= launch.grid[k] / launch.cluster[k];
  total.executed.resize(launch.program->code.size());
  if (launch.program->communicates) {
    run_together(launch, count, total);
  } else {
    run_independent(launch, count, threads, total);
  }
}

}  // namespace cake::emu
