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

void Parser::unsupported(const std::string& message) const {
  throw ParseError{"UnsupportedInstruction", peek().line, message, loc_.file, loc_.line};
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
      const Token version = take();
      module_.version = std::string(version.text);
      if (version.kind != Token::Number) error("no version: " + module_.version);
    } else if (accept(".target")) {
      module_.target_line = peek().line;
      module_.target = expect_word();
      while (accept(",")) expect_word();
    } else if (accept(".address_size")) {
      if (expect_integer() != 64) unsupported("only 64-bit addresses are executed");
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
      define(variable(space, is_extern, false));
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
  if (module_.version.empty()) error("the text has no .version");
  if (module_.target.rfind("sm_", 0) != 0) error(module_.target.empty() ? "the text has no .target" : "no target: " + module_.target);
  return std::move(module_);
}

// An extern declaration and a definition may stand side by side.
void Parser::define(Variable v) {
  for (auto& known : module_.variables) {
    if (known.name != v.name) continue;
    if (known.is_extern == v.is_extern && !v.is_extern) error("variable " + v.name + " is declared twice");
    if (!v.is_extern) known = std::move(v);
    return;
  }
  module_.variables.push_back(std::move(v));
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
      const i64 align = expect_integer();
      if (align < 1 || align > 1 << 16 || (align & (align - 1))) error("alignment " + std::to_string(align) + " is no power of two up to 65536");
      v.align = static_cast<u32>(align);
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
      const u64 most = (space == Space::Global ? 1ull << 32 : kSharedWindow) / v.bytes;
      if (static_cast<u64>(count) > most) error("array " + v.name + " of " + std::to_string(count) + " elements");
      v.bytes *= static_cast<u64>(count);
    }
    expect("]");
  }
  if (in_list) return v;
  if (accept("=")) {
    if (space != Space::Global && space != Space::Const) error("variable " + v.name + " of this state space takes no initialiser");
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
      if (is("(")) unsupported("masked addresses in initialisers are not executed");
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
    if (accept(".reg")) unsupported("register parameters are not executed");
    expect(".param");
    list.push_back(variable(Space::Param, false, true));
    for (size_t k = 0; k + 1 < list.size(); ++k) {
      if (list[k].name == list.back().name) error("parameter " + list[k].name + " is declared twice");
    }
    if (!is(")")) expect(",");
  }
  return list;
}

void Parser::performance_directives(FunctionAst& f) {
  auto dims = [&](u32* out) {
    out[0] = out[1] = out[2] = 1;
    int k = 0;
    do {
      const i64 size = expect_integer();
      if (size < 1 || size > 0x7fffffff) error("a size of " + std::to_string(size));
      out[k] = static_cast<u32>(size);
    } while (++k < 3 && accept(","));
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
      if (f.has_body && known.has_body) throw ParseError{"PtxSyntaxError", f.line, "function " + f.name + " is defined twice"};
      if (f.has_body) known = std::move(f);
      return;
    }
  }
  module_.functions.push_back(std::move(f));
}

}  // namespace cake::emu
