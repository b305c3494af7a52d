// The table of instructions, read once: patterns of modifiers, rules of operands, targets.
#include "isa.h"

#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <unordered_map>

namespace cake::emu {
namespace {

std::vector<std::string> split(const std::string& text, char by) {
  std::vector<std::string> parts;
  std::string part;
  std::istringstream stream(text);
  while (std::getline(stream, part, by)) {
    if (!part.empty()) parts.push_back(part);
  }
  return parts;
}

[[noreturn]] void bad_table(const std::string& what) { throw std::logic_error("table of instructions: " + what); }

void add_words(FormRule::Slot& slot, const std::string& text) {
  for (const auto& word : split(text, '|')) {
    if (word[0] != '@') {
      slot.words.push_back(split(word, '.'));
      continue;
    }
    const WordSet* set = nullptr;
    for (std::size_t k = 0; k < kWordSetCount; ++k) {
      if (word.substr(1) == kWordSets[k].name) set = &kWordSets[k];
    }
    if (!set) bad_table("no words " + word);
    add_words(slot, set->words);
  }
}

OperandRule operand_rule(std::string t) {
  OperandRule r;
  auto front = [&](const std::string& prefix) {
    if (t.rfind(prefix, 0) != 0) return false;
    t = t.substr(prefix.size());
    return true;
  };
  auto back = [&](const std::string& suffix) {
    if (t.size() < suffix.size() || t.substr(t.size() - suffix.size()) != suffix) return false;
    t.resize(t.size() - suffix.size());
    return true;
  };
  r.optional = back("?");
  r.written = front("=");
  if (back("||p")) r.pair = OperandRule::MustPair;
  else if (back("|p")) r.pair = OperandRule::MayPair;
  r.sink = front("_");
  if (front("{}")) r.vector = OperandRule::May;
  else if (front("{")) r.vector = OperandRule::Must;
  r.wider = back("+");
  r.or_address = t.size() > 2 && back("[]");
  r.or_words = t.size() > 2 && back("{}");
  if (t.empty() || t == "*") r.shape = OperandRule::Anything;  // "=_" alone: a result that nobody gets
  else if (t == "p") r.shape = OperandRule::Predicate;
  else if (t == "[]") r.shape = OperandRule::Address;
  else if (t == "[,]") r.shape = OperandRule::Coordinates;
  else if (t == "i") r.shape = OperandRule::Constant;
  else if (t == "$") r.from = OperandRule::Last;
  else if (t == "$$") r.from = OperandRule::BeforeLast;
  else if (t == "w$") r.from = OperandRule::TwiceLast;
  else if (auto type = parse_type(t)) r.type = *type;
  else bad_table("no operand " + t);
  return r;
}

using Table = std::unordered_map<std::string, std::vector<FormRule>>;

void add_form(Table& table, const Form& form) {
  FormRule rule;
  rule.text = form;
  for (std::string word : split(form.modifiers, ' ')) {
    FormRule::Slot slot;
    if (word.back() == '?') {
      slot.optional = true;
      word.pop_back();
    }
    add_words(slot, word);
    rule.slots.push_back(std::move(slot));
  }
  for (const auto& word : split(form.operands, ' ')) {
    if (word == "hint") rule.takes_hint = true;
    else rule.operands.push_back(operand_rule(word));
  }
  table[form.base].push_back(std::move(rule));
}

Table read_table() {
  Table table;
  for (const Form& form : all_forms()) add_form(table, form);
  return table;
}

// A word of the table against a part of an opcode; '#' stands for digits.
bool same_word(const std::string& word, const std::string& part) {
  const std::size_t hash = word.find('#');
  if (hash == std::string::npos) return word == part;
  if (part.compare(0, hash, word, 0, hash) != 0) return false;
  std::size_t end = hash;
  while (end < part.size() && part[end] >= '0' && part[end] <= '9') ++end;
  return end > hash && part.substr(end) == word.substr(hash + 1);
}

// Parts of the opcode that the slot takes from `at` on; 0 when none.
std::size_t taken(const FormRule::Slot& slot, const std::vector<std::string>& parts, std::size_t at) {
  for (const auto& word : slot.words) {
    std::size_t k = 0;
    while (k < word.size() && at + k < parts.size() && same_word(word[k], parts[at + k])) ++k;
    if (k == word.size()) return k;
  }
  return 0;
}

}  // namespace

std::vector<Form> all_forms() {
  std::vector<Form> forms(kComputing, kComputing + kComputingCount);
  forms.insert(forms.end(), kMoving, kMoving + kMovingCount);
  return forms;
}

std::string modifiers_in_full(const Form& form) {
  std::string text = form.modifiers;
  for (std::size_t k = 0; k < kWordSetCount; ++k) {
    const std::string name = std::string("@") + kWordSets[k].name;
    for (std::size_t at = 0; (at = text.find(name, at)) != std::string::npos;) {
      const std::size_t end = at + name.size();
      const bool whole = end == text.size() || text[end] == ' ' || text[end] == '|' || text[end] == '?';
      if (whole) text.replace(at, name.size(), kWordSets[k].words);
      ++at;
    }
  }
  return text;
}

const std::vector<FormRule>* forms_of(const std::string& base) {
  static const Table table = read_table();
  auto it = table.find(base);
  return it == table.end() ? nullptr : &it->second;
}

bool FormRule::matches(const std::vector<std::string>& parts) const {
  std::vector<bool> used(slots.size(), false);
  std::size_t next = 0;  // mandatory slot
  auto skip = [&] {
    while (next < slots.size() && slots[next].optional) ++next;
  };
  skip();
  for (std::size_t at = 1; at < parts.size();) {
    std::size_t n = 0;
    if (next < slots.size() && (n = taken(slots[next], parts, at))) {
      ++next;
      skip();
      at += n;
      continue;
    }
    for (std::size_t k = 0; k < slots.size() && !n; ++k) {
      if (slots[k].optional && !used[k] && (n = taken(slots[k], parts, at))) used[k] = true;
    }
    if (!n) return false;
    at += n;
  }
  return next == slots.size();
}

bool FormRule::has_word(const std::string& part) const {
  for (const auto& slot : slots) {
    for (const auto& word : slot.words) {
      if (std::any_of(word.begin(), word.end(), [&](const std::string& piece) { return same_word(piece, part); })) return true;
    }
  }
  return false;
}

std::size_t FormRule::most(bool hint) const { return operands.size() + (hint && takes_hint); }

std::size_t FormRule::least(bool hint) const {
  std::size_t n = hint && takes_hint;
  for (const auto& o : operands) n += !o.optional;
  return n;
}

bool target_has(const std::string& own, const std::string& targets) {
  const std::string digits = own.size() > 3 ? own.substr(3) : "";
  const char suffix = own.empty() ? '\0' : own.back();
  const int have = std::atoi(digits.c_str());
  for (const auto& target : split(targets, ' ')) {
    const int least = std::atoi(target.c_str());
    if (target.back() == 'a') {
      if (digits == target) return true;
    } else if (target.back() == 'f') {
      if ((suffix == 'a' || suffix == 'f') && have / 10 == least / 10 && have >= least) return true;
    } else if (have >= least) {
      return true;
    }
  }
  return false;
}

std::string targets_in_words(const std::string& targets) {
  std::string text;
  for (const auto& target : split(targets, ' ')) {
    if (!text.empty()) text += " or ";
    text += "sm_" + target;
    if (target.back() == 'f') text += " and what is later in its family, with a or f";
    else if (target.back() != 'a') text += " and later";
  }
  return text;
}

bool register_fits(Type declared, Type read, bool wider) {
  const u32 have = bytes_of(declared), need = std::max(2u, bytes_of(read));
  if (have != need && !(wider && have > need)) return false;
  return is_bits(declared) || is_bits(read) || declared == read || (is_integer(read) && is_integer(declared));
}

}  // namespace cake::emu
