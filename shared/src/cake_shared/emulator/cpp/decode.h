// From parsed statements to instructions. Each exec_*.cpp registers how it decodes its opcodes.
#pragma once
#include <initializer_list>
#include <unordered_map>

#include "isa.h"
#include "program.h"
#include "types.h"

namespace cake::emu {

class Decoder;
using DecodeFn = void (*)(Decoder&, Ins&);

class DecoderTable {
 public:
  static const DecoderTable& instance();
  void add(const char* base, DecodeFn fn) { table_[base] = fn; }
  DecodeFn find(const std::string& base) const {
    auto it = table_.find(base);
    return it == table_.end() ? nullptr : it->second;
  }

 private:
  std::unordered_map<std::string, DecodeFn> table_;
};

// One registration function a family; decode.cpp lists them.
void register_integer(DecoderTable&);
void register_bits(DecoderTable&);
void register_float(DecoderTable&);
void register_approx(DecoderTable&);
void register_half(DecoderTable&);
void register_convert(DecoderTable&);
void register_predicate(DecoderTable&);
void register_move(DecoderTable&);
void register_memory(DecoderTable&);
void register_atomic(DecoderTable&);
void register_warp(DecoderTable&);
void register_sync(DecoderTable&);
void register_control(DecoderTable&);
void register_mma(DecoderTable&);
void register_async(DecoderTable&);
void register_mbarrier(DecoderTable&);
void register_wgmma(DecoderTable&);
void register_tcgen05(DecoderTable&);

struct Symbol {
  const Variable* variable;
  u64 address;  // of global and const variables
};
using SymbolTable = std::unordered_map<std::string, Symbol>;

// The modifiers of the opcode being decoded. A decoder takes each one it understands; what is left over is an error.
class Modifiers {
 public:
  explicit Modifiers(const std::vector<std::string>& parts) : parts_(parts), used_(parts.size(), false) {
    used_[0] = true;
  }
  bool take(const std::string& name);
  // The first of `names` present; -1 when none is.
  int take_one(std::initializer_list<const char*> names);
  std::optional<Type> take_type();  // the first type not yet taken
  void give_back_type(Type t);      // for a decoder that hands the opcode on to another
  bool has(const std::string& name) const;
  bool starts(std::initializer_list<const char*> names);  // takes them when the opcode continues with exactly these
  std::string leftover() const;

 private:
  const std::vector<std::string>& parts_;
  std::vector<bool> used_;
};

class Decoder {
 public:
  // `target` is that of the text: what it does not have is refused.
  Decoder(Program& program, const SymbolTable& symbols,
          const std::unordered_map<std::string, const FunctionAst*>& functions, const std::string& target)
      : program_(program), symbols_(symbols), functions_(functions), target_(target) {}
  void kernel(const FunctionAst& f);

  // For decode functions.
  const Statement& statement() const { return *statement_; }
  size_t count() const { return statement_->operands.size(); }
  const Operand& op(size_t k) const;
  Modifiers& mods() { return *mods_; }
  Program& program() { return program_; }
  [[noreturn]] void unsupported(const std::string& why) const;
  [[noreturn]] void syntax(const std::string& why) const;

  u32 source(const Operand& o, u32 width);  // slot of a register, immediate, special register or symbol
  u32 source(size_t k, u32 width) { return source(op(k), width); }
  u32 source(const Operand& o, Type t);  // as above; immediates are converted to the type
  u32 source(size_t k, Type t) { return source(op(k), t); }
  u32 dest(const Operand& o, u32 width, bool sign_extend = false);  // "_" gives a scratch slot
  u32 dest(size_t k, u32 width, bool sign_extend = false) { return dest(op(k), width, sign_extend); }
  u32 predicate(const Operand& o);  // source; a negated or constant one is put into a temporary
  u32 predicate(size_t k) { return predicate(op(k)); }
  u32 predicate_dest(const Operand& o);
  u32 register_width(const Operand& o) const;  // declared bytes of a register's slot; 0 if it is none
  bool is_predicate(const Operand& o) const;
  bool is_sink(const Operand& o) const { return o.kind == Operand::Name && o.name == "_"; }
  i64 constant(const Operand& o) const;                           // an operand that must be an integer constant
  u32 list(const Operand& o, u32 width, bool is_dest, Ins& ins);  // vector operand -> Program::operands
  // Sets ins.a (base), ins.imm (offset), ins.space and the width of the base for address operand k.
  void address(size_t k, Space space, Ins& ins) { address(op(k), space, ins.a, ins.imm, ins); }
  void address(const Operand& o, Space space, u32& base, i64& offset, Ins& ins);
  bool names_parameter(const Operand& address) const;  // its base is a kernel parameter's name, no register
  Space take_space(Space otherwise);
  void add_operand(u32 value) { program_.operands.push_back(value); }

  u32 new_slot(u32 width);
  u32 new_predicate() { return program_.predicates++; }
  u32 constant_slot(u64 value, u32 width);
  void emit_before(Ins ins);
  void emit_after(Ins ins) { after_.push_back(ins); }
  bool local_variable(const std::string& name, u32& offset) const;
  void call(Ins& ins);
  void set_branch(Ins& ins, const std::string& label);
  void set_indexed_branch(Ins& ins, const std::string& label);
  bool in_kernel() const { return function_->is_kernel; }
  void note_shared_access(u32 bytes) { program_.shared_granule = std::min(program_.shared_granule, bytes); }

 private:
  struct Register {
    u32 slot;
    u32 width;               // of the slot; 0: predicate
    Type type = Type::Pred;  // as declared
  };
  using Misfit = std::optional<std::string>;
  struct FunctionLayout {
    std::unordered_map<std::string, Register> registers;
    std::unordered_map<std::string, u32> locals;  // offset in thread-local memory
    std::unordered_map<std::string, u32> shared;
    std::unordered_map<std::string, i32> labels;
    std::unordered_map<std::string, std::vector<std::string>> targets;
    i32 entry = -1;
  };
  void prepare(const FunctionAst& f);  // slots of a function and, first, of those it calls
  void function(const FunctionAst& f);
  void decode(const Statement& s);
  void place_shared(const Variable& v, std::unordered_map<std::string, u32>& into);
  void emit(Ins ins);
  // decode_check.cpp
  void check_form() const;
  void check_clusters() const;
  std::string first_misfit(const FormRule& form, const std::vector<Type>& types, bool hint) const;
  std::string bad_modifier(const std::vector<FormRule>& forms) const;
  Misfit misfit(const Operand& o, const OperandRule& rule, Type t) const;
  Misfit misfit_value(const Operand& o, Type t, bool written, bool sink, bool wider) const;
  Misfit misfit_predicate(const Operand& o, const OperandRule& rule) const;
  std::string shown_with_type(const Operand& o) const;

  void note_touched();
  void note_unread();
  const Register* find(const Operand& o) const;
  u32 special(const std::string& name, u32 width);
  u32 special_slot(Special id, u32 aux, u32 width);

  Program& program_;
  const SymbolTable& symbols_;
  const std::unordered_map<std::string, const FunctionAst*>& functions_;
  const std::string& target_;
  std::unordered_map<std::string, FunctionLayout> layouts_;
  std::vector<const FunctionAst*> order_, stack_;
  std::unordered_map<std::string, u32> kernel_shared_;
  std::unordered_map<std::string, u32> opcode_ids_;
  std::unordered_map<std::string, u32> constant_ids_, special_ids_;
  struct Fixup {
    size_t ins;
    std::string function, label;
  };
  std::vector<Fixup> fixups_;
  const FunctionAst* function_ = nullptr;
  FunctionLayout* layout_ = nullptr;
  const Statement* statement_ = nullptr;
  Modifiers* mods_ = nullptr;
  std::vector<Ins> after_;
  std::vector<u32> reads_, writes_;  // slots of declared registers that the current statement touches
  std::string pending_label_;
};

// The handler Op<T>::run for the lane type that matches `t`; null when none of Ts does.
template <class T>
constexpr bool lane_type_is(Type t) {
  if constexpr (std::is_same_v<T, u8>) return t == Type::U8 || t == Type::B8;
  if constexpr (std::is_same_v<T, u16>) return t == Type::U16 || t == Type::B16;
  if constexpr (std::is_same_v<T, u32>) return t == Type::U32 || t == Type::B32;
  if constexpr (std::is_same_v<T, u64>) return t == Type::U64 || t == Type::B64;
  if constexpr (std::is_same_v<T, i8>) return t == Type::S8;
  if constexpr (std::is_same_v<T, i16>) return t == Type::S16;
  if constexpr (std::is_same_v<T, i32>) return t == Type::S32;
  if constexpr (std::is_same_v<T, i64>) return t == Type::S64;
  if constexpr (std::is_same_v<T, float>) return t == Type::F32;
  if constexpr (std::is_same_v<T, double>) return t == Type::F64;
  if constexpr (std::is_same_v<T, Half>) return t == Type::F16;
  if constexpr (std::is_same_v<T, BFloat>) return t == Type::BF16;
  return false;
}

template <template <class> class Op, class... Ts>
Handler pick(Type t) {
  Handler h = nullptr;
  ((lane_type_is<Ts>(t) ? (h = Op<Ts>::run, 0) : 0), ...);
  return h;
}

}  // namespace cake::emu
