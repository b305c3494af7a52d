#include "ptx_parser.h"

#include <algorithm>

namespace cake::emu {

std::string hex(u64 value) {
  char buffer[24];
  std::snprintf(buffer, sizeof buffer, "0x%llx", static_cast<unsigned long long>(value));
  return buffer;
}

u32 type_bytes(const std::string& type) {
  static const std::unordered_map<std::string, u32> sizes = {
      {"b8", 1},     {"u8", 1},   {"s8", 1},     {"b16", 2},     {"u16", 2},       {"s16", 2},
      {"f16", 2},    {"bf16", 2}, {"b32", 4},    {"u32", 4},     {"s32", 4},       {"f32", 4},
      {"b64", 8},    {"u64", 8},  {"s64", 8},    {"f64", 8},     {"b128", 16},     {"f16x2", 4},
      {"bf16x2", 4}, {"pred", 1}, {"texref", 8}, {"surfref", 8}, {"samplerref", 8}};
  auto it = sizes.find(type);
  return it == sizes.end() ? 0 : it->second;
}

ModuleAst parse_ptx(const std::string& text) { return Parser(text).run(); }

bool Parser::accept(const char* text) {
  if (!is(text)) return false;
  ++at_;
  return true;
}

void Parser::expect(const char* text) {
  if (!accept(text)) error(std::string("expected '") + text + "' before '" + std::string(peek().text) + "'");
}

std::string Parser::expect_word() {
  if (peek().kind != Token::Word) error("expected a name before '" + std::string(peek().text) + "'");
  return std::string(take().text);
}

i64 Parser::expect_integer() {
  const bool negative = accept("-");
  if (peek().kind != Token::Number) error("expected a number before '" + std::string(peek().text) + "'");
  const Number n = parse_number(take());
  return negative ? -static_cast<i64>(n.bits) : static_cast<i64>(n.bits);
}

void Parser::error(const std::string& message) const {
  throw ParseError{"PtxSyntaxError", peek().line, message, loc_.file, loc_.line};
}

void Parser::skip_block() {
  expect("{");
  for (int depth = 1; depth > 0;) {
    if (peek().kind == Token::End) error("unclosed block");
    const Token t = take();
    if (t.kind != Token::String) depth += t.text == "{" ? 1 : t.text == "}" ? -1 : 0;
  }
}

void Parser::skip_statement() {
  while (!is(";")) {
    if (peek().kind == Token::End) error("statement without ';'");
    take();
  }
  take();
}

ModuleAst Parser::run() {
  bool is_extern = false;
  while (peek().kind != Token::End) {
    if (accept(".version")) {
      module_.version = std::string(take().text);
    } else if (accept(".target")) {
      module_.target_line = peek().line;
      module_.target = expect_word();
      while (accept(",")) expect_word();
    } else if (accept(".address_size")) {
      if (expect_integer() != 64) error("only 64-bit addresses are executed");
    } else if (accept(".visible") || accept(".weak") || accept(".common")) {
    } else if (accept(".extern")) {
      is_extern = true;
    } else if (accept(".entry")) {
      function(true);
      is_extern = false;
    } else if (accept(".func")) {
      function(false);
      is_extern = false;
    } else if (is(".global") || is(".const") || is(".shared")) {
      const std::string word = expect_word();
      const Space space = word == ".global" ? Space::Global : word == ".const" ? Space::Const : Space::Shared;
      module_.variables.push_back(variable(space, is_extern, false));
      is_extern = false;
    } else if (accept(".file")) {
      file_directive();
    } else if (accept(".section")) {
      expect_word();
      skip_block();
    } else if (is(".pragma") || is(".alias")) {
      skip_statement();
    } else if (!accept(";")) {
      error("unknown module-level directive '" + std::string(peek().text) + "'");
    }
  }
  return std::move(module_);
}

void Parser::file_directive() {
  const u32 index = static_cast<u32>(expect_integer());
  if (peek().kind != Token::String) error("expected a file name");
  module_.files[index] = std::string(take().text);
  while (accept(",")) expect_integer();
}

// After the space word: [.align N] [.attribute(...)] [.v2|.v4] .type [.ptr ...] name[dims] [= init];
Variable Parser::variable(Space space, bool is_extern, bool in_list) {
  Variable v;
  v.space = space;
  v.is_extern = is_extern;
  v.line = peek().line;
  u32 vector = 1;
  bool aligned = false;
  for (;;) {
    const std::string word = expect_word();
    if (word == ".align") {
      v.align = static_cast<u32>(expect_integer());
      aligned = true;
    } else if (word == ".attribute") {
      while (!accept(")")) take();
    } else if (word == ".v2" || word == ".v4") {
      vector = word == ".v2" ? 2 : 4;
    } else if (word == ".ptr") {
      // Alignment of what the pointer points at, not of the parameter.
      while (is(".global") || is(".shared") || is(".const") || is(".local") || is(".param") || is(".align")) {
        if (accept(".align")) expect_integer();
        else take();
      }
    } else if (word[0] == '.') {
      v.type = word.substr(1);
      if (!type_bytes(v.type)) error("unknown type " + word);
    } else {
      v.name = word;
      break;
    }
  }
  const u32 element = type_bytes(v.type);
  if (!element) error("variable " + v.name + " has no type");
  v.bytes = static_cast<u64>(element) * vector;
  if (!aligned) v.align = element * vector;
  while (accept("[")) {
    if (is("]")) {
      v.bytes = 0;
    } else {
      const i64 count = constant_integer();
      if (count < 1) error("array " + v.name + " of " + std::to_string(count) + " elements");
      v.bytes *= static_cast<u64>(count);
    }
    expect("]");
  }
  if (in_list) return v;
  if (accept("=")) {
    u64 offset = 0;
    initializer(v, element, offset);
    if (v.bytes == 0) v.bytes = v.data.size();
    if (v.data.size() > v.bytes) error("initialiser of " + v.name + " is longer than the variable");
  }
  expect(";");
  return v;
}

void Parser::initializer(Variable& v, u32 element_bytes, u64& offset) {
  if (accept("{")) {
    while (!accept("}")) {
      initializer(v, element_bytes, offset);
      if (!is("}")) expect(",");
    }
    return;
  }
  u64 bits = 0;
  if (peek().kind == Token::Word) {
    std::string name = expect_word();
    if (name == "generic") {
      expect("(");
      name = expect_word();
      expect(")");
    }
    i64 addend = 0;
    if (accept("+")) addend = expect_integer();
    if (element_bytes != 8) error("an address needs an 8-byte element");
    v.relocations.push_back({offset, name, addend});
  } else {
    if (!starts_constant()) error("initialiser of " + v.name + " is not a number");
    const bool negative = is("-");
    const Token& number = peek(negative);
    const Number n = number.kind == Token::Number ? parse_number(number) : Number{Number::Integer, 0};
    if (n.kind == Number::Integer) {
      bits = constant().bits;
      if (is("(")) error("masked addresses in initialisers are not executed");
    } else {
      for (int k = 0; k < 1 + negative; ++k) take();
      bits = n.bits;
      if (n.kind == Number::Float64 && element_bytes == 4) {
        bits = std::bit_cast<u32>(static_cast<float>(std::bit_cast<double>(n.bits)));
      }
      if (negative) bits ^= 1ull << (element_bytes * 8 - 1);
    }
  }
  v.data.resize(offset + element_bytes);
  std::memcpy(v.data.data() + offset, &bits, std::min<u32>(element_bytes, 8));
  offset += element_bytes;
}

std::vector<Variable> Parser::parameter_list() {
  std::vector<Variable> list;
  expect("(");
  while (!accept(")")) {
    if (accept(".reg")) error("register parameters are not executed");
    expect(".param");
    list.push_back(variable(Space::Param, false, true));
    if (!is(")")) expect(",");
  }
  return list;
}

void Parser::performance_directives(FunctionAst& f) {
  auto dims = [&](u32* out) {
    out[0] = static_cast<u32>(expect_integer());
    out[1] = out[2] = 1;
    for (int k = 1; k < 3 && accept(","); ++k) out[k] = static_cast<u32>(expect_integer());
  };
  for (;;) {
    u32 d[3];
    if (accept(".maxntid")) {
      dims(d);
      f.max_threads = d[0] * d[1] * d[2];
    } else if (accept(".reqntid")) {
      dims(f.required_threads);
    } else if (accept(".reqnctapercluster")) {
      dims(f.cluster);
    } else if (accept(".maxnreg")) {
      f.max_registers = static_cast<u32>(expect_integer());
    } else if (accept(".minnctapersm")) {
      f.min_ctas = static_cast<u32>(std::max<i64>(1, expect_integer()));
    } else if (accept(".maxnctapersm") || accept(".maxclusterrank")) {
      expect_integer();
    } else if (accept(".explicitcluster") || accept(".noreturn") || accept(".blocksareclusters")) {
    } else if (is(".pragma")) {
      skip_statement();
    } else if (accept(".abi_preserve") || accept(".abi_preserve_control")) {
      expect_integer();
    } else {
      return;
    }
  }
}

void Parser::function(bool is_kernel) {
  FunctionAst f;
  f.is_kernel = is_kernel;
  f.line = peek().line;
  if (accept(".attribute")) {
    while (!accept(")")) take();
  }
  if (is("(")) f.returns = parameter_list();
  f.name = expect_word();
  if (is("(")) f.params = parameter_list();
  performance_directives(f);
  if (!accept(";")) {
    f.has_body = true;
    loc_ = {};
    const size_t start = at_;
    // A body that cannot be read stops the kernels that reach it, not the module.
    try {
      body(f);
    } catch (const ParseError& e) {
      f.broken = std::make_shared<ParseError>(e);
      at_ = start;
      skip_block();
    }
    loc_ = {};
    in_call_ = false;
  }
  // A prototype may come before the definition.
  for (auto& known : module_.functions) {
    if (known.name == f.name) {
      if (f.has_body) known = std::move(f);
      return;
    }
  }
  module_.functions.push_back(std::move(f));
}

}  // namespace cake::emu
