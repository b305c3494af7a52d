// Programmatic dependent launches: which launches of a stream may run at the same time, and what each has done to global
// memory. Launches run one after the other here; what their order hides is found by comparing their accesses.
//
// A programmatic launch may start once every CTA of the launch before it has executed griddepcontrol.launch_dependents or
// has ended. griddepcontrol.wait returns when the launch before it has ended; that launch's end says that the one before
// has ended too only if some thread of it has waited.
#pragma once
#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "memory.h"
#include "program.h"

namespace cake::emu {

struct Warp;
enum class Rw : u8;

// What one launch has done, word by word: the instruction that read or wrote it last in program order, and which bytes.
class LaunchRecord {
 public:
  LaunchRecord(const Program& program, const std::map<u32, std::string>& files, const Registry& registry);
  LaunchRecord() = default;  // a launch of which nothing is known: it counts as having written everything
  bool unknown() const { return tables_.empty() && kernel.empty(); }

  void note(int allocation, u64 address, u32 bytes, bool reads, bool writes, bool by_copy, int pc);
  // The instruction that touched one of these bytes (wrote it, with `writes_only`); -1 when none did.
  int touched(u64 address, u32 bytes, bool writes_only, bool& wrote) const;
  // An ordinary store or atomic of this launch to one of these bytes; -1 when there is none.
  int stored(int allocation, u64 address, u32 bytes) const;
  std::string place(int pc) const;  // its line, and source line where known

  std::string kernel;
  bool programmatic = false;
  std::atomic<bool> waited{false};       // a thread has executed griddepcontrol.wait
  std::atomic<bool> starts_late{false};  // a CTA lets dependents start only after it has waited
  std::atomic<bool> proxy_fenced{false};  // a thread has executed fence.proxy.async for global memory
  // Earlier launches that may not have ended when this one starts, and when its griddepcontrol.wait has returned.
  std::vector<std::shared_ptr<const LaunchRecord>> at_start, after_wait;

 private:
  struct Free {
    void operator()(u32* p) const;
  };
  using Words = std::unique_ptr<u32[], Free>;  // instruction + 1, whether an ordinary one did it, four bits, one a byte
  struct Table {
    u64 begin = 0, end = 0;
    Words reads, writes;
  };
  static Words zeroed(u64 count);
  std::vector<Table> tables_;  // by allocation of the launch's registry
  std::vector<std::pair<u32, SourceLoc>> places_;
  std::map<u32, std::string> files_;
};

// The launches of one stream.
class StreamHistory {
 public:
  explicit StreamHistory(bool unknown_before) { restart(unknown_before); }
  void restart(bool unknown_before);  // everything has ended; or something unknown may still run
  // The record of the next launch, which must be alive until `finished`.
  std::shared_ptr<LaunchRecord> begin(const Program& program, const std::map<u32, std::string>& files, const Registry& registry,
                                      bool programmatic);
  void finished(std::shared_ptr<LaunchRecord> record) { last_ = std::move(record); }

 private:
  std::shared_ptr<LaunchRecord> last_;
};

// Called for every access to global memory of a launch that has a record (`lane` -1: of all lanes that execute): notes it and faults when it is unordered with
// what an earlier launch did, or when a copy reads what this launch has stored and nothing in it has fenced the proxies.
void overlap_access(Warp& w, int allocation, u64 address, u32 bytes, Rw rw, int lane, bool by_copy = false);

}  // namespace cake::emu
