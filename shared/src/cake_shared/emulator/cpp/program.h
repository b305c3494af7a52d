// A kernel with the device functions that it reaches, decoded to an array of instructions over one register file.
#pragma once
#include <string>
#include <unordered_map>
#include <vector>

#include "ptx_ast.h"

namespace cake::emu {

struct Warp;
struct Ins;
using Handler = void (*)(Warp&, const Ins&);

enum class Kind : u8 {
  Plain,  // the handler does everything for the lanes of Warp::mask
  Sync,   // may have to wait: for lanes of the warp (Ins::sync), or the handler sets Warp::signal
  Label,  // start of a basic block: parts of a diverged warp may meet here
  Branch,
  Indexed,  // brx.idx
  Call,
  Return,  // of a device function; of the kernel it is an exit
  Exit
};

// Which lanes must arrive together: those of a register, all that are alive, or all 32, none of which may have exited.
enum class Sync : u8 { None, Mask, All, Whole };

constexpr u32 kWarpBarrier = 1u << 31;  // Ins::flags of bar.warp.sync, which also meets other such instructions

struct Ins {
  Handler fn = nullptr;
  // Byte offsets of register slots (see Program), or indices of predicates, as the handler takes them.
  u32 d = 0, a = 0, b = 0, c = 0, e = 0;
  u32 list = 0;  // first of `n` entries in Program::operands
  u16 n = 0;
  Kind kind = Kind::Plain;
  Sync sync = Sync::None;
  u8 guard_mode = 0;  // 0 none, 1 where the predicate is true, 2 where it is false
  Space space = Space::Generic;
  u8 width = 0;  // bytes of an element
  bool unread = false;  // of an atomic: nothing in the program reads its result, as of red
  u32 flags = 0;
  u32 guard = 0;
  u32 sync_mask = 0;  // register slot of the member mask
  i32 target = -1;
  i64 imm = 0;
  u32 line = 0;
  SourceLoc loc;
  u32 opcode = 0;  // index in Program::opcodes
};

enum class Special : u8 {
  Tid,
  Ntid,
  Ctaid,
  Nctaid,
  ClusterCtaid,
  ClusterNctaid,
  Clusterid,
  Nclusterid,  // aux: axis
  ClusterRank,
  ClusterSize,
  Lane,
  WarpId,
  WarpCount,
  SmId,
  SmCount,
  GridId,
  ExplicitCluster,
  LaneMaskEq,
  LaneMaskLt,
  LaneMaskLe,
  LaneMaskGt,
  LaneMaskGe,
  DynamicShared,
  TotalShared,
  SharedSymbol,   // aux: offset in the CTA's shared memory
  DynamicSymbol,  // aux: offset in the dynamic shared memory
  ParamAddress    // aux: offset in the kernel's parameters
};

struct Param {
  std::string name, type;
  u32 offset, bytes, align;
  bool is_pointer_sized;
};

// Register slots: 32 lanes side by side, 4 bytes a lane up to 32 bits, 8 bytes for 64; 128-bit registers are two 64-bit
// slots. Constants live in slots too, filled once.
struct Program {
  std::string name;
  std::vector<Ins> code;
  u32 statements = 0;  // instructions of the text
  std::vector<u32> operands;
  std::vector<std::string> opcodes;
  std::vector<std::vector<i32>> branch_tables;
  u32 register_bytes = 0, predicates = 1;  // predicate 0 is the sink of "_"
  struct Constant {
    u32 slot, width;
    u64 value;
  };
  struct SpecialSlot {
    u32 slot, width;
    Special id;
    u32 aux;
  };
  std::vector<Constant> constants;
  std::vector<SpecialSlot> specials;
  std::vector<Param> params;
  u32 param_bytes = 0;
  u32 shared_end = kSharedBase;  // first byte after static shared memory: dynamic shared memory starts here
  u32 dynamic_align = 16;
  u32 local_bytes = 0;
  u32 max_threads = 0, max_registers = 0, min_ctas = 1;
  bool moves_registers = false;  // by setmaxnreg
  u32 required_threads[3] = {0, 0, 0};
  u32 cluster[3] = {0, 0, 0};
  u32 carry_predicate = 0;    // the carry flag of add.cc and its kin; 0 when there is none
  bool communicates = false;  // through global memory with other CTAs: all run on one seeded schedule
  // What each instruction reads and writes, for results in flight: `reads` then `writes` entries of touched_slots.
  enum class Role : u8 { Plain, Copy, InFlight };  // Copy: mov, packing too; InFlight: checks its registers itself
  struct Touched {
    u32 first = 0;
    u16 reads = 0, writes = 0;
    Role role = Role::Plain;
  };
  std::vector<Touched> touched;
  std::vector<u32> touched_slots;
  struct SlotName {
    std::string name;
    u32 width;
  };
  std::unordered_map<u32, SlotName> slot_names;  // of declared registers, for traces
  u32 shared_granule = 4;  // smallest access to shared memory in bytes, for the race detector
  // Which asynchronous operations read shared memory: the race detector keeps a column a warp for each.
  bool bulk_reads = false, matrix_reads = false, barrier_reads = false;
  bool loads_in_bulk = false;  // from global memory, by copies
};

}  // namespace cake::emu
