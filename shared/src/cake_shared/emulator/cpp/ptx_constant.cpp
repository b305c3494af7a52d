// Constant expressions: 64-bit integers, signed unless an operand is unsigned, with C's operators and precedence.
#include "ptx_parser.h"

namespace cake::emu {
namespace {

struct Binary {
  const char* text;
  int precedence;
};
// Longer operators first: '<' begins '<<' and '<='.
constexpr Binary kBinary[] = {{"||", 1}, {"&&", 2}, {"==", 6}, {"!=", 6}, {"<<", 8}, {">>", 8}, {"<=", 7}, {">=", 7}, {"|", 3},
                              {"^", 4},  {"&", 5},  {"<", 7},  {">", 7},  {"+", 9},  {"-", 9},  {"*", 10}, {"/", 10}, {"%", 10}};

}  // namespace

// An operator of one or two characters that stand side by side.
bool Parser::is_operator(const char* text) const {
  const Token &first = peek(), &second = peek(1);
  if (first.kind != Token::Punct || first.text[0] != text[0]) return false;
  if (!text[1]) return true;
  return second.kind == Token::Punct && second.text[0] == text[1] && second.text.data() == first.text.data() + 1;
}

bool Parser::starts_constant() const {
  size_t k = 0;
  while (peek(k).kind == Token::Punct && std::string("+-~!(").find(peek(k).text[0]) != std::string::npos) ++k;
  return peek(k).kind == Token::Number || peek(k).text == "WARP_SZ" || peek(k).text == ".s64" || peek(k).text == ".u64";
}

Parser::Constant Parser::constant_primary() {
  if (accept("+")) return constant_primary();
  if (accept("-")) {
    const Constant c = constant_primary();
    return {0 - c.bits, c.is_unsigned};
  }
  if (accept("~")) {
    const Constant c = constant_primary();
    return {~c.bits, c.is_unsigned};
  }
  if (accept("!")) return {constant_primary().bits == 0, false};
  if (accept("(")) {
    if (accept(".s64") || accept(".u64")) {
      const bool is_unsigned = tokens_[at_ - 1].text == ".u64";
      expect(")");
      return {constant_primary().bits, is_unsigned};
    }
    const Constant c = constant();
    expect(")");
    return c;
  }
  if (accept("WARP_SZ")) return {32, false};
  if (peek().kind != Token::Number) error("expected a number before '" + std::string(peek().text) + "'");
  const Token token = take();
  const Number n = parse_number(token);
  if (n.kind != Number::Integer) unsupported("floating-point constant expressions are not executed");
  return {n.bits, token.text.back() == 'U' || token.text.back() == 'u' || n.bits >> 63 != 0};
}

Parser::Constant Parser::constant_binary(int least) {
  Constant left = constant_primary();
  for (;;) {
    const Binary* found = nullptr;
    for (const auto& candidate : kBinary) {
      if (!found && is_operator(candidate.text)) found = &candidate;
    }
    if (!found || found->precedence < least) return left;
    const std::string op = found->text;
    for (size_t k = 0; k < op.size(); ++k) take();
    const Constant right = constant_binary(found->precedence + 1);
    const bool is_unsigned = left.is_unsigned || right.is_unsigned;
    const u64 a = left.bits, b = right.bits;
    const i64 x = static_cast<i64>(a), y = static_cast<i64>(b);
    const bool less = is_unsigned ? a < b : x < y, more = is_unsigned ? a > b : x > y;
    if ((op == "/" || op == "%") && b == 0) error("a division by 0 in a constant expression");
    const bool overflows = !is_unsigned && a == 1ull << 63 && y == -1;
    u64 r = 0;
    bool truth = true;
    if (op == "+") r = a + b, truth = false;
    else if (op == "-") r = a - b, truth = false;
    else if (op == "*") r = a * b, truth = false;
    else if (op == "/") r = is_unsigned ? a / b : overflows ? a : static_cast<u64>(x / y), truth = false;
    else if (op == "%") r = is_unsigned ? a % b : overflows ? 0 : static_cast<u64>(x % y), truth = false;
    else if (op == "<<") r = b > 63 ? 0 : a << b, truth = false;
    else if (op == ">>") r = left.is_unsigned ? (b > 63 ? 0 : a >> b) : static_cast<u64>(x >> std::min<u64>(b, 63)), truth = false;
    else if (op == "&") r = a & b, truth = false;
    else if (op == "^") r = a ^ b, truth = false;
    else if (op == "|") r = a | b, truth = false;
    else if (op == "<") r = less;
    else if (op == ">") r = more;
    else if (op == "<=") r = !more;
    else if (op == ">=") r = !less;
    else if (op == "==") r = a == b;
    else if (op == "!=") r = a != b;
    else if (op == "&&") r = a && b;
    else r = a || b;
    const bool shift = op == "<<" || op == ">>";
    left = {r, !truth && (shift ? left.is_unsigned : is_unsigned)};
  }
}

Parser::Constant Parser::constant() {
  const Constant c = constant_binary(1);
  if (!accept("?")) return c;
  const Constant yes = constant();
  expect(":");
  const Constant no = constant();
  return {(c.bits ? yes : no).bits, yes.is_unsigned || no.is_unsigned};
}

i64 Parser::constant_integer() { return static_cast<i64>(constant().bits); }

}  // namespace cake::emu
