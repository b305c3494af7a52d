// Function bodies: scopes, register declarations, labels and instructions.
#include <algorithm>

#include "ptx_parser.h"

namespace cake::emu {

void Parser::body(FunctionAst& f) {
  branches_.clear();
  scopes_.clear();
  next_scope_ = 0;
  next_unique_ = 0;
  block(f);
  resolve_labels(f);
}

void Parser::block(FunctionAst& f) {
  expect("{");
  scopes_.push_back({next_scope_++, {}});
  while (!accept("}")) {
    if (peek().kind == Token::End) error("function " + f.name + " is not closed");
    if (is("{")) {
      block(f);
    } else if (accept(";")) {
    } else if (peek().kind == Token::Word && peek().text[0] == '.') {
      body_directive(f);
    } else if (peek().kind == Token::Word && peek(1).text == ":" && peek(1).kind == Token::Punct) {
      Statement s;
      s.line = peek().line;
      s.loc = loc_;
      s.label = expect_word() + "@" + std::to_string(scopes_.back().id);
      expect(":");
      f.body.push_back(std::move(s));
    } else {
      instruction(f);
    }
  }
  scopes_.pop_back();
}

void Parser::body_directive(FunctionAst& f) {
  if (accept(".reg")) {
    registers(f);
  } else if (accept(".loc")) {
    loc_directive();
  } else if (accept(".file")) {
    file_directive();
  } else if (is(".pragma")) {
    skip_statement();
  } else if (is(".local") || is(".param") || is(".shared")) {
    const std::string word = expect_word();
    const Space space = word == ".shared" ? Space::Shared : word == ".local" ? Space::Local : Space::Param;
    Variable v = variable(space, false, false);
    v.name = declare(f, v.name);
    (space == Space::Shared ? f.shared : f.locals).push_back(std::move(v));
  } else if (is(".branchtargets")) {
    Statement s;
    s.line = peek().line;
    s.opcode = expect_word();
    s.parts = {s.opcode};
    do {
      Operand target;
      target.name = expect_word();
      s.operands.push_back(std::move(target));
    } while (accept(","));
    expect(";");
    std::vector<int> chain;
    for (const auto& scope : scopes_) chain.push_back(scope.id);
    for (size_t k = 0; k < s.operands.size(); ++k) branches_.push_back({f.body.size(), k, chain});
    f.body.push_back(std::move(s));
  } else if (is(".callprototype")) {
    skip_statement();
  } else if (is(".section")) {
    take();
    expect_word();
    skip_block();
  } else {
    error("unknown directive '" + std::string(peek().text) + "' in " + f.name);
  }
}

void Parser::loc_directive() {
  loc_.file = static_cast<u32>(expect_integer());
  loc_.line = static_cast<u32>(expect_integer());
  expect_integer();
  if (!accept(",")) return;
  // function_name label[+offset], inlined_at file line column
  expect_word();
  expect_word();
  if (accept("+")) expect_integer();
  expect(",");
  expect_word();
  for (int k = 0; k < 3; ++k) expect_integer();
}

std::string Parser::declare(FunctionAst& f, const std::string& name) {
  (void)f;
  // Function-level names stay readable; names of inner blocks get a suffix, so that they are unique.
  if (scopes_.back().names.count(name)) error(name + " is declared twice");
  std::string unique = scopes_.size() == 1 ? name : name + "#" + std::to_string(next_unique_++);
  scopes_.back().names[name] = unique;
  return unique;
}

void Parser::registers(FunctionAst& f) {
  std::string type = expect_word();
  if (type == ".v2" || type == ".v4") unsupported("vector registers are not executed");
  type = type.substr(1);
  if (!type_bytes(type)) error("unknown register type " + type);
  do {
    const std::string base = expect_word();
    if (accept("<")) {
      constexpr i64 kMost = 1 << 20;
      const i64 count = expect_integer();
      if (count < 0 || count > kMost) error(std::to_string(count) + " registers " + base + ", 0 to " + std::to_string(kMost) + " are taken");
      expect(">");
      for (i64 k = 0; k < count; ++k) f.registers.push_back({declare(f, base + std::to_string(k)), type});
    } else {
      f.registers.push_back({declare(f, base), type});
    }
  } while (accept(","));
  expect(";");
}

std::string Parser::resolve(const std::string& name) const {
  for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
    auto it = scope->names.find(name);
    if (it != scope->names.end()) return it->second;
  }
  return name;
}

Operand Parser::bracketed(const char* close, Operand::Kind kind) {
  Operand o;
  o.kind = kind;
  while (!accept(close)) {
    o.items.push_back(operand());
    if (!is(close)) expect(",");
  }
  return o;
}

Operand Parser::operand_primary() {
  if (accept("{")) return bracketed("}", Operand::Vector);
  if (in_call_ && accept("(")) return bracketed(")", Operand::List);
  if (accept("[")) {
    Operand o = bracketed("]", Operand::Address);
    if (o.items.empty()) error("empty address");
    o.offset = o.items[0].offset;
    return o;
  }
  Operand o;
  if (starts_constant()) {
    const bool negative = is("-");
    const Token& number = peek(negative);
    const Number n = number.kind == Token::Number ? parse_number(number) : Number{Number::Integer, 0};
    if (n.kind == Number::Integer) {
      o.kind = Operand::Integer;
      o.bits = constant().bits;
      return o;
    }
    for (int k = 0; k < 1 + negative; ++k) take();
    o.kind = n.kind == Number::Float32 ? Operand::Float32 : Operand::Float64;
    o.bits = negative ? n.bits ^ (o.kind == Operand::Float32 ? 1ull << 31 : 1ull << 63) : n.bits;
    return o;
  }
  o.negated = accept("!");
  if (is("-") || is("+") || is("~")) error("a register cannot be negated in an operand");
  o.name = resolve(expect_word());
  return o;
}

Operand Parser::operand() {
  Operand o = operand_primary();
  if (o.kind == Operand::Name) {
    constexpr int kProduct = 10;  // precedence of what is added or taken away
    while (is("+") || is("-")) {
      const bool minus = take().text == "-";
      const u64 value = constant_binary(kProduct).bits;
      o.offset = static_cast<i64>(static_cast<u64>(o.offset) + (minus ? 0 - value : value));
    }
  }
  if (accept("|")) {
    Operand pair;
    pair.kind = Operand::Pair;
    pair.items.push_back(std::move(o));
    pair.items.push_back(operand_primary());
    return pair;
  }
  return o;
}

void Parser::instruction(FunctionAst& f) {
  Statement s;
  s.loc = loc_;
  if (accept("@")) {
    s.guard_negated = accept("!");
    s.guard = resolve(expect_word());
  }
  s.line = peek().line;
  s.opcode = expect_word();
  for (size_t from = 0; from <= s.opcode.size();) {
    size_t dot = s.opcode.find('.', from);
    if (dot == std::string::npos) dot = s.opcode.size();
    if (dot > from) s.parts.push_back(s.opcode.substr(from, dot - from));
    from = dot + 1;
  }
  in_call_ = s.parts[0] == "call";
  if (!is(";")) {
    do {
      s.operands.push_back(operand());
    } while (accept(","));
  }
  in_call_ = false;
  expect(";");
  // The last operand of a branch is a label or the label of a table.
  if ((s.parts[0] == "bra" || s.parts[0] == "brx") && !s.operands.empty()) {
    if (s.operands.back().kind != Operand::Name) {
      throw ParseError{"PtxSyntaxError", s.line, s.opcode + " takes a label", s.loc.file, s.loc.line};
    }
    std::vector<int> chain;
    for (const auto& scope : scopes_) chain.push_back(scope.id);
    branches_.push_back({f.body.size(), s.operands.size() - 1, chain});
  }
  f.body.push_back(std::move(s));
}

void Parser::resolve_labels(FunctionAst& f) {
  std::unordered_map<std::string, bool> labels;
  for (const auto& s : f.body) {
    if (s.label.empty()) continue;
    if (labels.count(s.label)) {
      throw ParseError{"PtxSyntaxError", s.line,
                       "label " + s.label.substr(0, s.label.rfind('@')) + " is declared twice"};
    }
    labels[s.label] = true;
  }
  for (const auto& use : branches_) {
    Operand& target = f.body[use.statement].operands.at(use.operand);
    bool found = false;
    for (auto scope = use.scopes.rbegin(); scope != use.scopes.rend() && !found; ++scope) {
      const std::string name = target.name + "@" + std::to_string(*scope);
      if (labels.count(name)) {
        target.name = name;
        found = true;
      }
    }
    if (!found) throw ParseError{"PtxSyntaxError", f.body[use.statement].line, "unknown label " + target.name};
  }
}

}  // namespace cake::emu
