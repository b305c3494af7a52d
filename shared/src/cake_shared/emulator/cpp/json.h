// Just enough JSON writing for results and errors.
#pragma once
#include <string>

#include "core.h"

namespace cake::emu {

class Json {
 public:
  static std::string quote(const std::string& s) {
    std::string out = "\"";
    for (char c : s) {
      if (c == '"' || c == '\\') {
        out += '\\';
        out += c;
      } else if (static_cast<u8>(c) < 0x20) {
        char buffer[8];
        std::snprintf(buffer, sizeof buffer, "\\u%04x", static_cast<u8>(c));
        out += buffer;
      } else {
        out += c;
      }
    }
    return out + '"';
  }
  Json& begin(char bracket) {
    separate();
    text_ += bracket;
    first_ = true;
    return *this;
  }
  Json& end(char bracket) {
    text_ += bracket;
    first_ = false;
    return *this;
  }
  Json& key(const std::string& name) {
    separate();
    text_ += quote(name) + ":";
    first_ = true;
    return *this;
  }
  Json& value(const std::string& s) { return raw(quote(s)); }
  Json& value(const char* s) { return raw(quote(s)); }
  Json& value(i64 v) { return raw(std::to_string(v)); }
  Json& value(u64 v) { return raw(std::to_string(v)); }
  Json& value(u32 v) { return raw(std::to_string(v)); }
  Json& value(int v) { return raw(std::to_string(v)); }
  Json& value(bool v) { return raw(v ? "true" : "false"); }
  const std::string& text() const { return text_; }

 private:
  void separate() {
    if (!first_) text_ += ',';
    first_ = false;
  }
  Json& raw(const std::string& s) {
    separate();
    text_ += s;
    return *this;
  }
  std::string text_;
  bool first_ = true;
};

}  // namespace cake::emu
