// A statement against the table of instructions: is there such a form, on the text's target, with such operands?
#include <algorithm>

#include "decode.h"

namespace cake::emu {
namespace {

// The types among the modifiers, in order.
std::vector<Type> types_of(const std::vector<std::string>& parts) {
  std::vector<Type> types;
  for (size_t k = 1; k < parts.size(); ++k) {
    if (auto t = parse_type(parts[k])) types.push_back(*t);
  }
  return types;
}

Type twice(Type t) {
  switch (t) {
    case Type::U16: return Type::U32;
    case Type::S16: return Type::S32;
    case Type::U32: return Type::U64;
    default: return Type::S64;
  }
}

Type type_of(const OperandRule& rule, const std::vector<Type>& types) {
  if (rule.from == OperandRule::Fixed || types.empty()) return rule.type;
  if (rule.from == OperandRule::BeforeLast && types.size() > 1) return types[types.size() - 2];
  return rule.from == OperandRule::TwiceLast ? twice(types.back()) : types.back();
}

std::string shown(const Operand& o) {
  switch (o.kind) {
    case Operand::Name: return (o.negated ? "!" : "") + o.name.substr(0, o.name.find('#'));
    case Operand::Integer: return "the integer " + std::to_string(static_cast<i64>(o.bits));
    case Operand::Float32: return "a constant of .f32";
    case Operand::Float64: return "a constant of .f64";
    case Operand::Vector: return "a vector of " + std::to_string(o.items.size());
    case Operand::Address: return "an address";
    case Operand::Pair: return "a pair";
    case Operand::List: return "a list";
  }
  return "";
}

std::string expected(const OperandRule& rule, Type t) {
  const bool predicate = rule.shape == OperandRule::Predicate || t == Type::Pred;
  switch (rule.shape) {
    case OperandRule::Address: return "an address in brackets";
    case OperandRule::Coordinates: return "[map, {coordinates}]";
    case OperandRule::Constant: return "an integer constant";
    case OperandRule::Anything: return rule.sink ? "_" : "a vector in braces";
    default: break;
  }
  std::string what = rule.written ? "a predicate" : "a predicate or an integer constant";
  if (!predicate) {
    const bool vector = rule.vector == OperandRule::Must;
    what = rule.or_address ? "an address or " : rule.or_words ? "a vector of .b32 or " : "";
    what += std::string(vector ? "a vector of ." : rule.written ? "a register of ." : "a value of .") + type_name(t);
  }
  if (rule.pair == OperandRule::MustPair) what += " and a predicate as d|p";
  return what;
}

}  // namespace

// Why an operand does not fit, "" where that needs no words; nullopt where it does.
Decoder::Misfit Decoder::misfit_value(const Operand& o, Type t, bool written, bool sink, bool wider) const {
  const Misfit fits = std::nullopt, wrong = "";
  if (o.kind == Operand::Integer || o.kind == Operand::Float32 || o.kind == Operand::Float64) {
    if (written) return wrong;
    if (o.kind == Operand::Integer) return is_float(t) || is_integer_pair(t) ? wrong : fits;
    if (t == Type::F32 || t == Type::F64) return fits;
    return is_bits(t) && bytes_of(t) == (o.kind == Operand::Float32 ? 4u : 8u) ? fits : wrong;
  }
  if (o.kind != Operand::Name || o.negated) return wrong;
  if (const Register* r = find(o)) {
    if (o.offset) return "a register plus a constant stands in addresses only";
    return r->width && register_fits(r->type, t, wider) ? fits : wrong;
  }
  if (is_sink(o)) return written && sink ? fits : "this result cannot be thrown away";
  if (written) return wrong;
  if (o.name[0] == '%') {
    const std::string& base = statement_->parts[0];
    if (base != "mov" && base != "cvt") return "no register of that name; special registers are read by mov and cvt";
    const bool of_dimension = o.name.find('.') != std::string::npos;  // may also be read as 16 bits, as it once was
    const u32 bytes = o.name == "%clock64" || o.name == "%globaltimer" ? 8 : 4;
    return bytes_of(t) == bytes || (of_dimension && bytes_of(t) == 2) ? fits : wrong;
  }
  // Addresses of variables, parameters and functions; the decoder knows which there are.
  return !is_float(t) && (bytes_of(t) == 4 || bytes_of(t) == 8) ? fits : wrong;
}

Decoder::Misfit Decoder::misfit_predicate(const Operand& o, const OperandRule& rule) const {
  const Misfit fits = std::nullopt, wrong = "";
  auto result = [&](const Operand& p) { return is_sink(p) || (is_predicate(p) && !p.negated && !p.offset); };
  if (o.kind == Operand::Pair) {
    return rule.pair != OperandRule::Single && result(o.items[0]) && result(o.items[1]) ? fits : wrong;
  }
  if (rule.pair == OperandRule::MustPair) return wrong;
  if (rule.written) return result(o) ? fits : wrong;
  if (o.kind == Operand::Integer) return fits;
  return is_predicate(o) && !o.offset ? fits : wrong;
}

Decoder::Misfit Decoder::misfit(const Operand& o, const OperandRule& rule, Type t) const {
  const Misfit fits = std::nullopt, wrong = "";
  switch (rule.shape) {
    case OperandRule::Anything:
      if (rule.sink) return is_sink(o) ? fits : "there is no result, _ stands for it";
      return rule.vector == OperandRule::Must && o.kind != Operand::Vector ? wrong : fits;
    case OperandRule::Constant: return o.kind == Operand::Integer ? fits : wrong;
    case OperandRule::Coordinates: return o.kind == Operand::Address && o.items.size() == 2 ? fits : wrong;
    case OperandRule::Address: {
      if (o.kind != Operand::Address || o.items.size() != 1) return wrong;
      const Operand& b = o.items[0];
      if (b.kind == Operand::Integer) return fits;
      if (b.kind != Operand::Name || b.negated) return wrong;
      const Register* r = find(b);
      return !r || (r->width && bytes_of(r->type) >= 4 && !is_float(r->type)) ? fits : shown_with_type(b) + " holds no address";
    }
    case OperandRule::Predicate: return misfit_predicate(o, rule);
    case OperandRule::Value: break;
  }
  if (t == Type::Pred) return misfit_predicate(o, rule);
  if (rule.or_address && o.kind == Operand::Address) return misfit(o, {.shape = OperandRule::Address}, t);
  if (rule.or_words && o.kind == Operand::Vector) return misfit(o, {.type = Type::B32, .vector = OperandRule::Must}, Type::B32);
  if ((rule.or_address || rule.or_words) && (o.kind == Operand::Float32 || o.kind == Operand::Float64)) return wrong;
  if (o.kind == Operand::Pair) {
    const OperandRule second{.shape = OperandRule::Predicate, .written = true};
    if (rule.pair == OperandRule::Single || misfit_predicate(o.items[1], second)) return wrong;
    return misfit_value(o.items[0], t, rule.written, rule.sink, rule.wider);
  }
  if (rule.pair == OperandRule::MustPair) return wrong;
  if (o.kind == Operand::Vector) {
    if (rule.vector == OperandRule::Never) return wrong;
    for (const auto& item : o.items) {
      if (auto why = misfit_value(item, t, rule.written, true, rule.wider)) {
        return "its element " + shown_with_type(item) + (why->empty() ? "" : ": " + *why);
      }
    }
    return fits;
  }
  if (rule.vector == OperandRule::Must && !(rule.sink && is_sink(o))) return wrong;
  return misfit_value(o, t, rule.written, rule.sink, rule.wider);
}

std::string Decoder::shown_with_type(const Operand& o) const {
  const Register* r = find(o);
  return !r ? shown(o) : shown(o) + " (." + (r->width ? type_name(r->type) : "pred") + ")";
}

// What is wrong with the operands for a form that takes so many; "" when nothing is.
std::string Decoder::first_misfit(const FormRule& form, const std::vector<Type>& types, bool hint) const {
  const auto& operands = statement_->operands;
  const size_t own = operands.size() - (hint && form.takes_hint);
  for (size_t k = 0; k < operands.size(); ++k) {
    const OperandRule policy{.type = Type::B64};
    const OperandRule& rule = k < own ? form.operands[k] : policy;
    const Type t = type_of(rule, types);
    if (auto why = misfit(operands[k], rule, t)) {
      return "operand " + std::to_string(k + 1) + " is " + shown_with_type(operands[k]) + ", " + expected(rule, t) + " is taken" +
             (why->empty() ? "" : " (" + *why + ")");
    }
  }
  return "";
}

// The first part of the opcode that no form has.
std::string Decoder::bad_modifier(const std::vector<FormRule>& forms) const {
  const auto& parts = statement_->parts;
  for (size_t k = 1; k < parts.size(); ++k) {
    auto has = [&](const FormRule& form) { return form.has_word(parts[k]); };
    if (std::none_of(forms.begin(), forms.end(), has)) return "modifier ." + parts[k];
  }
  return "these modifiers do not go together, or one is missing";
}

// Shared memory of clusters and their scope came with sm_90, whatever the rest of the instruction needs.
void Decoder::check_clusters() const {
  if (target_has(target_, "90")) return;
  for (const auto& part : statement_->parts) {
    const bool cluster = part == "cluster" || (part.size() > 9 && part.compare(part.size() - 9, 9, "::cluster") == 0);
    if (cluster) unsupported("." + part + " exists on sm_90 and later, the target is " + target_);
  }
}

void Decoder::check_form() const {
  const Statement& s = *statement_;
  const std::vector<FormRule>* forms = forms_of(s.parts[0]);
  if (!forms) unsupported("unknown instruction");
  std::vector<const FormRule*> fitting;
  for (const auto& form : *forms) {
    if (form.matches(s.parts)) fitting.push_back(&form);
  }
  if (fitting.empty()) unsupported(bad_modifier(*forms));
  // A form that the target does not have is named as such before its operands are looked at.
  std::vector<const FormRule*> here;
  for (const FormRule* form : fitting) {
    if (target_has(target_, form->text.targets)) here.push_back(form);
  }
  const bool hint = std::find(s.parts.begin(), s.parts.end(), "L2::cache_hint") != s.parts.end();
  const std::vector<Type> types = types_of(s.parts);
  auto takes_so_many = [&](const FormRule* f) { return s.operands.size() >= f->least(hint) && s.operands.size() <= f->most(hint); };
  std::string wrong;
  for (const FormRule* form : here) {
    if (!takes_so_many(form)) continue;
    const std::string why = first_misfit(*form, types, hint);
    if (why.empty()) return check_clusters();
    if (wrong.empty()) wrong = why;
  }
  for (const FormRule* form : fitting) {
    const bool elsewhere = std::find(here.begin(), here.end(), form) == here.end();
    if (!elsewhere || (!here.empty() && (!takes_so_many(form) || !first_misfit(*form, types, hint).empty()))) continue;
    unsupported("exists on " + targets_in_words(form->text.targets) + ", the target is " + target_);
  }
  if (!wrong.empty()) syntax(wrong);
  size_t least = ~size_t{0}, most = 0;
  for (const FormRule* form : here) {
    least = std::min(least, form->least(hint));
    most = std::max(most, form->most(hint));
  }
  const std::string range = least == most ? std::to_string(least) : std::to_string(least) + " to " + std::to_string(most);
  syntax("takes " + range + (most == 1 ? " operand" : " operands") + ", got " + std::to_string(s.operands.size()));
}

}  // namespace cake::emu
