// Operands of a statement -> register slots, predicates, addresses.
#include <algorithm>

#include "decode.h"
#include "handlers.h"

namespace cake::emu {

void Decoder::unsupported(const std::string& why) const {
  const SourceLoc& at = statement_->loc;
  throw ParseError{"UnsupportedInstruction", statement_->line, statement_->opcode + ": " + why, at.file, at.line};
}

void Decoder::syntax(const std::string& why) const {
  const SourceLoc& at = statement_->loc;
  throw ParseError{"PtxSyntaxError", statement_->line, statement_->opcode + ": " + why, at.file, at.line};
}

const Operand& Decoder::op(size_t k) const {
  if (k >= statement_->operands.size()) syntax("operand " + std::to_string(k + 1) + " is missing");
  return statement_->operands[k];
}

u32 Decoder::new_slot(u32 width) {
  const u32 slot = program_.register_bytes;
  program_.register_bytes += std::max(4u, width) * kLanes;
  return slot;
}

u32 Decoder::constant_slot(u64 value, u32 width) {
  width = std::max(4u, width);
  if (width == 4) value = static_cast<u32>(value);
  auto [it, fresh] = constant_ids_.try_emplace(std::to_string(width) + ":" + std::to_string(value), 0);
  if (fresh) {
    it->second = new_slot(width);
    program_.constants.push_back({it->second, width, value});
  }
  return it->second;
}

const Decoder::Register* Decoder::find(const Operand& o) const {
  if (o.kind != Operand::Name) return nullptr;
  auto it = layout_->registers.find(o.name);
  return it == layout_->registers.end() ? nullptr : &it->second;
}

u32 Decoder::register_width(const Operand& o) const {
  const Register* r = find(o);
  return r ? r->width : 0;
}

bool Decoder::is_predicate(const Operand& o) const {
  const Register* r = find(o);
  return r && r->width == 0;
}

u32 Decoder::source(const Operand& o, Type t) {
  if (o.kind == Operand::Float64 && bytes_of(t) == 4) {
    return constant_slot(std::bit_cast<u32>(static_cast<float>(std::bit_cast<double>(o.bits))), 4);
  }
  if (o.kind == Operand::Float32 && t == Type::F64) {
    return constant_slot(std::bit_cast<u64>(static_cast<double>(std::bit_cast<float>(static_cast<u32>(o.bits)))), 8);
  }
  if (o.kind == Operand::Integer && t == Type::F32) syntax("an integer constant where a float is read");
  return source(o, bytes_of(t));
}

u32 Decoder::source(const Operand& o, u32 width) {
  width = std::max(4u, width);
  if (o.kind == Operand::Integer || o.kind == Operand::Float32 || o.kind == Operand::Float64) {
    return constant_slot(o.bits, width);
  }
  if (o.kind != Operand::Name) syntax("a register or a constant is expected");
  if (const Register* r = find(o)) {
    if (r->width == 0) syntax("predicate " + o.name + " where a register is read");
    reads_.push_back(r->slot);
    if (r->width == width) return r->slot;
    if (r->width == 8 && width == 4) {
      Ins narrow;
      narrow.fn = h_narrow;
      narrow.a = r->slot;
      narrow.d = new_slot(4);
      emit_before(narrow);
      return narrow.d;
    }
    syntax("register " + o.name + " has " + std::to_string(r->width) + " bytes, " + std::to_string(width) +
           " are read");
  }
  if (o.name[0] == '%') return special(o.name, width);
  if (o.name == "WARP_SZ") return constant_slot(32, width);
  u32 offset = 0;
  if (local_variable(o.name, offset)) return constant_slot(offset + o.offset, width);
  auto shared = layout_->shared.find(o.name);
  if (shared != layout_->shared.end()) {
    return special_slot(Special::SharedSymbol, static_cast<u32>(shared->second + o.offset), width);
  }
  if (function_->is_kernel) {
    for (const auto& p : program_.params) {
      if (p.name == o.name) return special_slot(Special::ParamAddress, static_cast<u32>(p.offset + o.offset), width);
    }
  }
  auto symbol = symbols_.find(o.name);
  if (symbol != symbols_.end()) {
    const Variable& v = *symbol->second.variable;
    if (v.space != Space::Shared) return constant_slot(symbol->second.address + o.offset, width);
    if (v.is_extern) {
      program_.dynamic_align = std::max(program_.dynamic_align, v.align);
      return special_slot(Special::DynamicSymbol, static_cast<u32>(o.offset), width);
    }
    // Shared variables of the module take room in the kernels that use them only.
    if (!kernel_shared_.count(v.name)) place_shared(v, kernel_shared_);
    return special_slot(Special::SharedSymbol, static_cast<u32>(kernel_shared_.at(v.name) + o.offset), width);
  }
  if (functions_.count(o.name)) unsupported("address of function " + o.name);
  syntax("unknown name " + o.name);
}

u32 Decoder::dest(const Operand& o, u32 width, bool sign_extend) {
  width = std::max(4u, width);
  if (is_sink(o)) return new_slot(width);
  const Register* r = find(o);
  if (!r || r->width == 0) syntax("the destination is not a register");
  writes_.push_back(r->slot);
  if (r->width == width) return r->slot;
  if (r->width == 8 && width == 4) {
    Ins widen;
    widen.fn = sign_extend ? h_widen_signed : h_widen_unsigned;
    widen.a = new_slot(4);
    widen.d = r->slot;
    emit_after(widen);
    return widen.a;
  }
  syntax("register " + o.name + " has " + std::to_string(r->width) + " bytes, " + std::to_string(width) +
         " are written");
}

u32 Decoder::predicate(const Operand& o) {
  if (o.kind == Operand::Integer) {
    Ins set;
    set.fn = h_set_predicate;
    set.imm = o.bits != 0;
    set.d = new_predicate();
    emit_before(set);
    return set.d;
  }
  const Register* r = find(o);
  if (!r || r->width) syntax("a predicate is expected");
  if (!o.negated) return r->slot;
  Ins invert;
  invert.fn = h_not_predicate;
  invert.a = r->slot;
  invert.d = new_predicate();
  emit_before(invert);
  return invert.d;
}

u32 Decoder::predicate_dest(const Operand& o) {
  if (is_sink(o)) return 0;
  const Register* r = find(o);
  if (!r || r->width) syntax("the destination is not a predicate");
  return r->slot;
}

i64 Decoder::constant(const Operand& o) const {
  if (o.kind != Operand::Integer) syntax("an integer constant is expected");
  return static_cast<i64>(o.bits);
}

u32 Decoder::list(const Operand& o, u32 width, bool is_dest, Ins& ins) {
  // Slots first: looking them up may itself append to the operands.
  std::vector<u32> slots;
  if (o.kind == Operand::Vector) {
    for (const auto& item : o.items) slots.push_back(is_dest ? dest(item, width) : source(item, width));
  } else {
    slots.push_back(is_dest ? dest(o, width) : source(o, width));
  }
  ins.list = static_cast<u32>(program_.operands.size());
  ins.n = static_cast<u16>(slots.size());
  for (u32 slot : slots) add_operand(slot);
  return ins.list;
}

bool Decoder::names_parameter(const Operand& address) const {
  return address.items[0].kind == Operand::Name && !find(address.items[0]);
}

Space Decoder::take_space(Space otherwise) {
  Modifiers& m = mods();
  if (m.take("global")) return Space::Global;
  if (m.take("shared::cta") || m.take("shared")) return Space::Shared;
  if (m.take("shared::cluster")) return Space::Cluster;
  if (m.take("local")) return Space::Local;
  if (m.take("param") || m.take("param::entry") || m.take("param::func")) return Space::Param;
  if (m.take("const")) return Space::Const;
  return otherwise;
}

void Decoder::address(const Operand& o, Space space, u32& base, i64& offset, Ins& ins) {
  if (o.kind != Operand::Address) syntax("an address in brackets is expected");
  const Operand& b = o.items[0];
  ins.space = space;
  offset = b.offset;
  if (b.kind == Operand::Name && !find(b)) {
    u32 local = 0;
    if (local_variable(b.name, local)) {
      // .local and call .param variables both live in thread-local memory.
      ins.space = Space::Local;
      offset += local;
      base = constant_slot(0, 8);
      return;
    }
    if (space == Space::Param) {
      for (const auto& p : program_.params) {
        if (p.name == b.name && function_->is_kernel) {
          offset += p.offset;
          base = 0;
          return;
        }
      }
      syntax("unknown parameter " + b.name);
    }
    Operand symbol = b;
    symbol.offset = 0;
    base = source(symbol, space == Space::Shared || space == Space::Cluster ? 4u : 8u);
    return;
  }
  if (b.kind == Operand::Integer) {
    offset = 0;
    base = constant_slot(b.bits, space == Space::Shared || space == Space::Cluster ? 4u : 8u);
    return;
  }
  if (space == Space::Shared || space == Space::Cluster) {
    base = source(b, 4u);
  } else if (register_width(b) == 4) {
    if (space != Space::Local && space != Space::Param) syntax("a 32-bit register cannot address this space");
    Ins widen;
    widen.fn = h_widen_unsigned;
    widen.a = source(b, 4u);
    widen.d = new_slot(8);
    emit_before(widen);
    base = widen.d;
  } else {
    base = source(b, 8u);
  }
}

u32 Decoder::special_slot(Special id, u32 aux, u32 width) {
  width = std::max(4u, width);
  const std::string key =
      std::to_string(static_cast<int>(id)) + ":" + std::to_string(aux) + ":" + std::to_string(width);
  auto [it, fresh] = special_ids_.try_emplace(key, 0);
  if (fresh) {
    it->second = new_slot(width);
    program_.specials.push_back({it->second, width, id, aux});
  }
  return it->second;
}

u32 Decoder::special(const std::string& name, u32 width) {
  if (name == "%clock" || name == "%clock_hi" || name == "%clock64" || name == "%globaltimer" ||
      name == "%globaltimer_lo") {
    Ins clock;
    clock.fn = h_clock;
    clock.width = static_cast<u8>(width);
    clock.d = new_slot(width);
    emit_before(clock);
    return clock.d;
  }
  static const std::unordered_map<std::string, Special> scalars = {{"%laneid", Special::Lane},
                                                                   {"%warpid", Special::WarpId},
                                                                   {"%nwarpid", Special::WarpCount},
                                                                   {"%smid", Special::SmId},
                                                                   {"%nsmid", Special::SmCount},
                                                                   {"%gridid", Special::GridId},
                                                                   {"%cluster_ctarank", Special::ClusterRank},
                                                                   {"%cluster_nctarank", Special::ClusterSize},
                                                                   {"%is_explicit_cluster", Special::ExplicitCluster},
                                                                   {"%lanemask_eq", Special::LaneMaskEq},
                                                                   {"%lanemask_lt", Special::LaneMaskLt},
                                                                   {"%lanemask_le", Special::LaneMaskLe},
                                                                   {"%lanemask_gt", Special::LaneMaskGt},
                                                                   {"%lanemask_ge", Special::LaneMaskGe},
                                                                   {"%dynamic_smem_size", Special::DynamicShared},
                                                                   {"%total_smem_size", Special::TotalShared}};
  static const std::unordered_map<std::string, Special> vectors = {{"%tid", Special::Tid},
                                                                   {"%ntid", Special::Ntid},
                                                                   {"%ctaid", Special::Ctaid},
                                                                   {"%nctaid", Special::Nctaid},
                                                                   {"%cluster_ctaid", Special::ClusterCtaid},
                                                                   {"%cluster_nctaid", Special::ClusterNctaid},
                                                                   {"%clusterid", Special::Clusterid},
                                                                   {"%nclusterid", Special::Nclusterid}};
  auto scalar = scalars.find(name);
  if (scalar != scalars.end()) return special_slot(scalar->second, 0, width);
  const size_t dot = name.rfind('.');
  if (dot != std::string::npos && dot + 2 == name.size() && name[dot + 1] >= 'w' && name[dot + 1] <= 'z') {
    auto vector = vectors.find(name.substr(0, dot));
    if (vector != vectors.end()) {
      const u32 axis = name[dot + 1] == 'w' ? 3 : static_cast<u32>(name[dot + 1] - 'x');
      return axis == 3 ? constant_slot(0, width) : special_slot(vector->second, axis, width);
    }
  }
  unsupported("special register or unknown register " + name);
}

}  // namespace cake::emu
