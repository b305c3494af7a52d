// Which forms of an instruction there are, on which architectures, and what their operands are. The table is isa_table.cpp.
#pragma once
#include <cstddef>
#include <string>
#include <vector>

#include "types.h"

namespace cake::emu {

struct Form {
  const char* base;
  const char* modifiers;
  const char* operands;
  const char* targets;
};
struct WordSet {
  const char* name;
  const char* words;
};
extern const Form kComputing[], kMoving[];
extern const WordSet kWordSets[];
extern const std::size_t kComputingCount, kMovingCount, kWordSetCount;

struct OperandRule {
  enum Shape : u8 { Value, Predicate, Address, Coordinates, Constant, Anything };
  enum TypeFrom : u8 { Fixed, Last, BeforeLast, TwiceLast };
  enum Vector : u8 { Never, May, Must };
  enum Pair : u8 { Single, MayPair, MustPair };
  Shape shape = Value;
  TypeFrom from = Fixed;
  Type type = Type::B32;
  Vector vector = Never;
  Pair pair = Single;
  bool written = false, sink = false, wider = false, optional = false;
  bool or_address = false, or_words = false;  // an operand of a product that may lie elsewhere
};

struct FormRule {
  struct Slot {
    std::vector<std::vector<std::string>> words;  // each is one or more parts of an opcode
    bool optional = false;
  };
  Form text;
  std::vector<Slot> slots;
  std::vector<OperandRule> operands;
  bool takes_hint = false;  // a cache policy as last operand, with L2::cache_hint
  bool matches(const std::vector<std::string>& parts) const;
  bool has_word(const std::string& part) const;
  // Number of operands of an opcode in this form.
  std::size_t least(bool hint) const, most(bool hint) const;
};

// All forms of an instruction; null for one that is not known.
const std::vector<FormRule>* forms_of(const std::string& base);
// The table itself, and a form's modifiers with its sets of words written out.
std::vector<Form> all_forms();
std::string modifiers_in_full(const Form& form);
// In words: "sm_100 and later", "sm_90a".
std::string targets_in_words(const std::string& targets);
// True for text of `own` where something for one of `targets` is there.
bool target_has(const std::string& own, const std::string& targets);
// True where a register of type `declared` may stand for an operand of type `read`; `wider`: a wider register too.
bool register_fits(Type declared, Type read, bool wider);

}  // namespace cake::emu
