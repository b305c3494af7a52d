#include "ptx_lexer.h"

#include <cctype>
#include <cerrno>
#include <cstdlib>

namespace cake::emu {
namespace {

bool starts_word(char c) { return std::isalpha(static_cast<u8>(c)) || c == '_' || c == '$' || c == '%' || c == '.'; }
bool in_word(char c) { return std::isalnum(static_cast<u8>(c)) || c == '_' || c == '$' || c == '%' || c == '.'; }

}  // namespace

std::vector<Token> tokenize(const std::string& text) {
  std::vector<Token> tokens;
  tokens.reserve(text.size() / 4);
  u32 line = 1;
  size_t at = 0;
  const size_t end = text.size();
  auto emit = [&](Token::Kind kind, size_t from, size_t to) {
    tokens.push_back({kind, line, std::string_view(text).substr(from, to - from)});
  };
  while (at < end) {
    const char c = text[at];
    const char next = at + 1 < end ? text[at + 1] : '\0';
    if (c == '\n') {
      ++line;
      ++at;
    } else if (std::isspace(static_cast<u8>(c)) || c == '\0') {
      ++at;
    } else if (c == '/' && next == '/') {
      while (at < end && text[at] != '\n') ++at;
    } else if (c == '/' && next == '*') {
      const u32 begins = line;
      at += 2;
      while (at + 1 < end && !(text[at] == '*' && text[at + 1] == '/')) line += text[at++] == '\n';
      if (at + 1 >= end) throw ParseError{"PtxSyntaxError", begins, "a comment without an end"};
      at += 2;
    } else if (c == '"') {
      size_t to = at + 1;
      while (to < end && text[to] != '"') to += text[to] == '\\' ? 2 : 1;
      emit(Token::String, at + 1, to);
      at = to + 1;
    } else if (std::isdigit(static_cast<u8>(c))) {
      size_t to = at + 1;
      while (to < end && (std::isalnum(static_cast<u8>(text[to])) || text[to] == '.' ||
                          ((text[to] == '+' || text[to] == '-') && (text[to - 1] == 'e' || text[to - 1] == 'E') &&
                           text[at + 1] != 'x' && text[at + 1] != 'X' && text[at + 1] != 'f' && text[at + 1] != 'd')))
        ++to;
      emit(Token::Number, at, to);
      at = to;
    } else if (starts_word(c) && !(c == '%' && !in_word(next))) {  // a lone % is an operator
      size_t to = at + 1;
      // "::" belongs to modifiers such as shared::cta; a single ':' ends a label.
      while (to < end && (in_word(text[to]) || (text[to] == ':' && to + 1 < end && text[to + 1] == ':'))) {
        to += text[to] == ':' ? 2 : 1;
      }
      emit(Token::Word, at, to);
      at = to;
    } else {
      emit(Token::Punct, at, at + 1);
      ++at;
    }
  }
  tokens.push_back({Token::End, line, {}});
  return tokens;
}

Number parse_number(const Token& token) {
  std::string s(token.text);
  auto bad = [&]() -> Number { throw ParseError{"PtxSyntaxError", token.line, "not a number: " + s}; };
  char* stop = nullptr;
  if (s.size() == 10 && s[0] == '0' && (s[1] == 'f' || s[1] == 'F')) {
    const u64 bits = std::strtoull(s.c_str() + 2, &stop, 16);
    return *stop ? bad() : Number{Number::Float32, bits};
  }
  if (s.size() == 18 && s[0] == '0' && (s[1] == 'd' || s[1] == 'D')) {
    const u64 bits = std::strtoull(s.c_str() + 2, &stop, 16);
    return *stop ? bad() : Number{Number::Float64, bits};
  }
  const bool is_hex = s.size() > 1 && s[0] == '0' && (s[1] == 'x' || s[1] == 'X');
  if (!is_hex && s.find_first_of(".eE") != std::string::npos) {
    const double value = std::strtod(s.c_str(), &stop);
    return *stop ? bad() : Number{Number::Float64, std::bit_cast<u64>(value)};
  }
  if (s.back() == 'U' || s.back() == 'u') s.pop_back();
  u64 bits;
  errno = 0;
  if (s.size() > 2 && s[0] == '0' && (s[1] == 'b' || s[1] == 'B')) {
    bits = std::strtoull(s.c_str() + 2, &stop, 2);
  } else {
    bits = std::strtoull(s.c_str(), &stop, 0);
  }
  if (errno == ERANGE) throw ParseError{"PtxSyntaxError", token.line, "a number of more than 64 bits: " + s};
  return *stop ? bad() : Number{Number::Integer, bits};
}

}  // namespace cake::emu
