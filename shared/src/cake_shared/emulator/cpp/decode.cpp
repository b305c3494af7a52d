#include "decode.h"

#include <algorithm>
#include <unordered_set>

#include "handlers.h"

namespace cake::emu {

const DecoderTable& DecoderTable::instance() {
  static const DecoderTable table = [] {
    DecoderTable t;
    for (auto add :
         {register_integer, register_bits, register_float, register_approx, register_half, register_convert,
          register_predicate, register_move, register_memory, register_atomic, register_warp, register_sync,
          register_control, register_mma, register_async, register_mbarrier, register_wgmma, register_tcgen05}) {
      add(t);
    }
    return t;
  }();
  return table;
}

// ---------------------------------------------------------------- modifiers

bool Modifiers::take(const std::string& name) {
  for (size_t k = 1; k < parts_.size(); ++k) {
    if (!used_[k] && parts_[k] == name) return used_[k] = true;
  }
  return false;
}

int Modifiers::take_one(std::initializer_list<const char*> names) {
  int index = 0;
  for (const char* name : names) {
    if (take(name)) return index;
    ++index;
  }
  return -1;
}

std::optional<Type> Modifiers::take_type() {
  for (size_t k = 1; k < parts_.size(); ++k) {
    if (used_[k]) continue;
    if (auto type = parse_type(parts_[k])) {
      used_[k] = true;
      return type;
    }
  }
  return std::nullopt;
}

void Modifiers::give_back_type(Type t) {
  for (size_t k = 1; k < parts_.size(); ++k) {
    if (used_[k] && parse_type(parts_[k]) == t) used_[k] = false;
  }
}

bool Modifiers::has(const std::string& name) const {
  return std::find(parts_.begin() + 1, parts_.end(), name) != parts_.end();
}

bool Modifiers::starts(std::initializer_list<const char*> names) {
  size_t k = 1;
  while (k < parts_.size() && used_[k]) ++k;
  const size_t from = k;
  for (const char* name : names) {
    if (k >= parts_.size() || parts_[k] != name) return false;
    ++k;
  }
  std::fill(used_.begin() + from, used_.begin() + k, true);
  return true;
}

std::string Modifiers::leftover() const {
  std::string text;
  for (size_t k = 1; k < parts_.size(); ++k) {
    if (!used_[k]) text += "." + parts_[k];
  }
  return text;
}

// ---------------------------------------------------------------- layout

void Decoder::place_shared(const Variable& v, std::unordered_map<std::string, u32>& into) {
  program_.shared_end = round_up(program_.shared_end, std::max(1u, v.align));
  into[v.name] = program_.shared_end;
  program_.shared_end += static_cast<u32>(v.bytes);
}

void Decoder::prepare(const FunctionAst& f) {
  if (std::find(stack_.begin(), stack_.end(), &f) != stack_.end()) {
    throw ParseError{"UnsupportedInstruction", f.line, "recursive call of " + f.name + ": frames are static here"};
  }
  if (layouts_.count(f.name)) return;
  if (f.broken) throw ParseError(*f.broken);
  stack_.push_back(&f);
  FunctionLayout& layout = layouts_[f.name];
  for (const auto& r : f.registers) {
    if (r.type == "pred") {
      layout.registers[r.name] = {new_predicate(), 0};
    } else {
      const u32 width = std::max(4u, type_bytes(r.type));
      const auto type = parse_type(r.type);
      if (!type) throw ParseError{"UnsupportedInstruction", f.line, "register " + r.name + " of type ." + r.type};
      const u32 slot = new_slot(width);
      layout.registers[r.name] = {slot, width, *type};
      program_.slot_names[slot] = {r.name.substr(0, r.name.find('#')), width};
    }
  }
  auto place_local = [&](const Variable& v) {
    program_.local_bytes = round_up(program_.local_bytes, std::max(1u, v.align));
    layout.locals[v.name] = program_.local_bytes;
    program_.local_bytes += static_cast<u32>(v.bytes);
  };
  for (const auto& v : f.locals) place_local(v);
  if (!f.is_kernel) {
    for (const auto& v : f.params) place_local(v);
    for (const auto& v : f.returns) place_local(v);
  }
  for (const auto& v : f.shared) place_shared(v, layout.shared);
  order_.push_back(&f);
  for (const auto& s : f.body) {
    if (s.parts.empty() || s.parts[0] != "call") continue;
    for (const auto& o : s.operands) {
      if (o.kind != Operand::Name) continue;
      auto it = functions_.find(o.name);
      if (it != functions_.end() && (it->second->has_body || it->second->broken)) prepare(*it->second);
    }
  }
  stack_.pop_back();
}

void Decoder::kernel(const FunctionAst& f) {
  program_.name = f.name;
  program_.max_threads = f.max_threads;
  program_.max_registers = f.max_registers;
  program_.min_ctas = f.min_ctas;
  std::copy(f.required_threads, f.required_threads + 3, program_.required_threads);
  std::copy(f.cluster, f.cluster + 3, program_.cluster);
  for (const auto& p : f.params) {
    program_.param_bytes = round_up(program_.param_bytes, std::max(1u, p.align));
    program_.params.push_back({p.name, p.type, program_.param_bytes, static_cast<u32>(p.bytes), p.align,
                               (p.type == "u64" || p.type == "b64") && p.bytes == 8});
    program_.param_bytes += static_cast<u32>(p.bytes);
  }
  prepare(f);
  for (const FunctionAst* each : order_) function(*each);
  for (const auto& fix : fixups_) {
    const auto& layout = layouts_.at(fix.function);
    program_.code[fix.ins].target = fix.label.empty() ? layout.entry : layout.labels.at(fix.label);
  }
  program_.shared_end = round_up(program_.shared_end, program_.dynamic_align);
  program_.local_bytes = round_up(program_.local_bytes, 16);  // every thread's local memory starts aligned
  program_.touched.resize(program_.code.size());
  note_unread();
}

void Decoder::note_unread() {
  std::unordered_set<u32> read;
  auto reads_of = [&](const Program::Touched& t) { return program_.touched_slots.begin() + t.first; };
  for (const auto& t : program_.touched) read.insert(reads_of(t), reads_of(t) + t.reads);
  for (size_t k = 0; k < program_.code.size(); ++k) {
    const auto& t = program_.touched[k];
    const auto written = reads_of(t) + t.reads;
    program_.code[k].unread = std::none_of(written, written + t.writes, [&](u32 slot) { return read.count(slot) != 0; });
  }
}

void Decoder::function(const FunctionAst& f) {
  function_ = &f;
  layout_ = &layouts_.at(f.name);
  Ins entry;
  entry.kind = Kind::Label;
  entry.line = f.line;
  layout_->entry = static_cast<i32>(program_.code.size());
  statement_ = nullptr;
  program_.code.push_back(entry);
  // Branch tables are known before the branches that use them.
  for (size_t k = 0; k + 1 < f.body.size(); ++k) {
    const Statement& next = f.body[k + 1];
    if (f.body[k].label.empty() || next.parts.empty() || next.parts[0] != ".branchtargets") continue;
    auto& list = layout_->targets[f.body[k].label];
    for (const auto& o : next.operands) list.push_back(o.name);
  }
  for (const auto& s : f.body) decode(s);
  // Falling off the end returns.
  Ins end;
  end.kind = f.is_kernel ? Kind::Exit : Kind::Return;
  end.line = f.body.empty() ? f.line : f.body.back().line;
  program_.code.push_back(end);
}

// ---------------------------------------------------------------- statements

void Decoder::emit(Ins ins) {
  ins.line = statement_->line;
  ins.loc = statement_->loc;
  auto [it, fresh] = opcode_ids_.try_emplace(statement_->opcode, static_cast<u32>(program_.opcodes.size()));
  if (fresh) program_.opcodes.push_back(statement_->opcode);
  ins.opcode = it->second;
  program_.code.push_back(ins);
  note_touched();
}

void Decoder::emit_before(Ins ins) { emit(ins); }

// What the statement has looked up so far; for an instruction emitted before its statement's own that is enough.
void Decoder::note_touched() {
  Program::Touched t;
  t.first = static_cast<u32>(program_.touched_slots.size());
  t.reads = static_cast<u16>(reads_.size());
  t.writes = static_cast<u16>(writes_.size());
  const std::string& base = statement_->parts.empty() ? statement_->label : statement_->parts[0];
  if (base == "mov") t.role = Program::Role::Copy;
  if (base == "wgmma") t.role = Program::Role::InFlight;
  program_.touched_slots.insert(program_.touched_slots.end(), reads_.begin(), reads_.end());
  program_.touched_slots.insert(program_.touched_slots.end(), writes_.begin(), writes_.end());
  program_.touched.resize(program_.code.size());
  program_.touched.back() = t;
}

void Decoder::decode(const Statement& s) {
  statement_ = &s;
  if (!s.label.empty()) {
    Ins label;
    label.kind = Kind::Label;
    label.line = s.line;
    label.loc = s.loc;
    layout_->labels[s.label] = static_cast<i32>(program_.code.size());
    program_.code.push_back(label);
    return;
  }
  if (s.parts[0] == ".branchtargets") return;
  ++program_.statements;
  check_form();
  DecodeFn fn = DecoderTable::instance().find(s.parts[0]);
  if (!fn) unsupported("unknown instruction");
  Modifiers mods(s.parts);
  mods_ = &mods;
  after_.clear();
  reads_.clear();
  writes_.clear();
  Ins ins;
  if (!s.guard.empty()) {
    Operand guard;
    guard.name = s.guard;
    const Register* r = find(guard);
    if (!r || r->width) syntax("guard " + s.guard + " is not a predicate");
    ins.guard = r->slot;
    ins.guard_mode = s.guard_negated ? 2 : 1;
  }
  fn(*this, ins);
  const std::string rest = mods.leftover();
  if (!rest.empty()) unsupported("modifier " + rest);
  if (!ins.fn && (ins.kind == Kind::Plain || ins.kind == Kind::Sync)) unsupported("this type or form");
  const size_t at = program_.code.size();
  emit(ins);
  // A decoder that named a target did so before its instruction had a place.
  if (!pending_label_.empty() || ins.kind == Kind::Call) {
    if (ins.kind == Kind::Branch) fixups_.push_back({at, function_->name, pending_label_});
    if (ins.kind == Kind::Call) fixups_.push_back({at, pending_label_, ""});
    pending_label_.clear();
  }
  if (ins.kind == Kind::Call || (ins.kind == Kind::Branch && ins.guard_mode) || ins.kind == Kind::Exit ||
      ins.kind == Kind::Return) {
    Ins label;
    label.kind = Kind::Label;
    emit(label);
  }
  for (Ins extra : after_) {
    extra.guard = ins.guard;
    extra.guard_mode = ins.guard_mode;
    emit(extra);
  }
}

void Decoder::set_branch(Ins& ins, const std::string& label) {
  ins.kind = Kind::Branch;
  pending_label_ = label;
}

void Decoder::set_indexed_branch(Ins& ins, const std::string& label) {
  auto it = layout_->targets.find(label);
  if (it == layout_->targets.end()) syntax("no .branchtargets at " + label);
  ins.kind = Kind::Indexed;
  ins.list = static_cast<u32>(program_.operands.size());
  ins.n = static_cast<u16>(it->second.size());
  for (const auto& name : it->second) {
    // One unconditional jump a target, reached by index: their places are known at once.
    (void)name;
    program_.operands.push_back(0);
  }
  // The jumps follow the indexed branch.
  for (size_t k = 0; k < it->second.size(); ++k) {
    program_.operands[ins.list + k] = static_cast<u32>(program_.code.size() + 1 + k);
    fixups_.push_back({program_.code.size() + 1 + k, function_->name, it->second[k]});
    Ins jump;
    jump.kind = Kind::Branch;
    after_.push_back(jump);
  }
}

bool Decoder::local_variable(const std::string& name, u32& offset) const {
  auto it = layout_->locals.find(name);
  if (it == layout_->locals.end()) return false;
  offset = it->second;
  return true;
}

void Decoder::call(Ins& ins) {
  const Statement& s = *statement_;
  size_t k = 0;
  const Operand* returns = nullptr;
  const Operand* arguments = nullptr;
  if (k < s.operands.size() && s.operands[k].kind == Operand::List) returns = &s.operands[k++];
  if (k >= s.operands.size() || s.operands[k].kind != Operand::Name) syntax("call names no function");
  const std::string callee = s.operands[k++].name;
  if (k < s.operands.size() && s.operands[k].kind == Operand::List) arguments = &s.operands[k++];
  auto it = functions_.find(callee);
  if (it == functions_.end()) unsupported("indirect call through " + callee);
  const FunctionAst& f = *it->second;
  auto local = [&](const Operand& o) {
    u32 offset = 0;
    if (o.kind != Operand::Name || !local_variable(o.name, offset))
      unsupported("call arguments other than .param variables");
    return offset;
  };
  const size_t given = arguments ? arguments->items.size() : 0, taken = returns ? returns->items.size() : 0;
  if (given != f.params.size() || taken > f.returns.size())
    syntax("call of " + callee + " with a wrong number of arguments");
  if (!f.has_body) {
    ins.fn = external_function(callee);
    if (!ins.fn) unsupported("call of external function " + callee);
    ins.list = static_cast<u32>(program_.operands.size());
    ins.n = static_cast<u16>(given);
    for (size_t j = 0; j < given; ++j) add_operand(local(arguments->items[j]));
    ins.d = taken ? local(returns->items[0]) : 0;
    ins.flags = taken ? 1 : 0;
    return;
  }
  const FunctionLayout& layout = layouts_.at(callee);
  auto copy = [&](u32 from, u32 to, u64 bytes) {
    Ins move;
    move.fn = h_copy_local;
    move.a = from;
    move.d = to;
    move.imm = static_cast<i64>(bytes);
    move.guard = ins.guard;
    move.guard_mode = ins.guard_mode;
    return move;
  };
  for (size_t j = 0; j < given; ++j) {
    emit_before(copy(local(arguments->items[j]), layout.locals.at(f.params[j].name), f.params[j].bytes));
  }
  for (size_t j = 0; j < taken; ++j) {
    emit_after(copy(layout.locals.at(f.returns[j].name), local(returns->items[j]), f.returns[j].bytes));
  }
  ins.kind = Kind::Call;
  pending_label_ = callee;
}

}  // namespace cake::emu
