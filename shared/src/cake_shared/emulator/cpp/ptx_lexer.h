// Splits PTX text into tokens; comments are dropped and lines counted.
#pragma once
#include <string>
#include <string_view>
#include <vector>

#include "core.h"

namespace cake::emu {

struct Token {
  enum Kind : u8 { Word, Number, String, Punct, End };
  Kind kind = End;
  u32 line = 0;
  std::string_view text;
};

std::vector<Token> tokenize(const std::string& text);

// Value of a PTX number. `kind` tells integers from 0f/0d floats and decimal floats (taken as double).
struct Number {
  enum Kind : u8 { Integer, Float32, Float64 };
  Kind kind;
  u64 bits;
};
Number parse_number(const Token& token);

}  // namespace cake::emu
