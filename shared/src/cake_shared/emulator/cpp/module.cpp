#include "module.h"

#include <sstream>

namespace cake::emu {

Module::Module(const std::string& text, const std::string& target) : ast_(parse_ptx(text)), target_(target) {
  check_target();
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines_.push_back(line);
  place_variables();
  for (const auto& f : ast_.functions) functions_[f.name] = &f;
  for (const auto& f : ast_.functions) {
    if (!f.is_kernel || !(f.has_body || f.broken)) continue;
    auto program = std::make_unique<Program>();
    // What one kernel asks for does not stop the others: its own launches are refused.
    try {
      Decoder(*program, symbols_, functions_, ast_.target).kernel(f);
    } catch (const ParseError& e) {
      broken_[f.name] = e;
    }
    programs_[f.name] = std::move(program);
  }
}

void Module::check_target() const {
  // Text for sm_90 runs on everything newer; text with an a or f runs on its own architecture (family) only.
  auto number = [](const std::string& s) { return s.size() > 3 ? std::atoi(s.c_str() + 3) : 0; };
  const std::string& own = ast_.target;
  const bool specific = !own.empty() && own.back() == 'a', family = !own.empty() && own.back() == 'f';
  const bool ok = specific ? own == target_
                  : family ? number(own) / 10 == number(target_) / 10 && number(own) <= number(target_)
                           : number(own) <= number(target_);
  if (!ok) throw ParseError{"PtxSyntaxError", ast_.target_line, "the text is for " + own + ", the target is " + target_};
}

void Module::place_variables() {
  storage_.reserve(ast_.variables.size());
  for (const auto& v : ast_.variables) {
    if (v.space == Space::Shared) {
      symbols_[v.name] = {&v, 0};
      continue;
    }
    if (v.is_extern)
      throw ParseError{"UnsupportedInstruction", v.line, "variable " + v.name + " is defined in another module"};
    storage_.emplace_back(v.bytes + v.align + 16, 0);
    const u64 align = std::max<u64>(16, v.align);
    const u64 address = (reinterpret_cast<u64>(storage_.back().data()) + align - 1) / align * align;
    if (address + v.bytes > reinterpret_cast<u64>(storage_.back().data()) + storage_.back().size()) {
      storage_.back().resize(v.bytes + 2 * align);
      symbols_[v.name] = {&v, (reinterpret_cast<u64>(storage_.back().data()) + align - 1) / align * align};
    } else {
      symbols_[v.name] = {&v, address};
    }
    if (!v.data.empty()) std::memcpy(reinterpret_cast<void*>(symbols_[v.name].address), v.data.data(), v.data.size());
  }
  for (const auto& v : ast_.variables) {
    for (const auto& r : v.relocations) {
      auto it = symbols_.find(r.symbol);
      if (it == symbols_.end() || it->second.variable->space == Space::Shared) {
        throw ParseError{"UnsupportedInstruction", v.line,
                         "address of " + r.symbol + " in the initialiser of " + v.name};
      }
      const u64 value = it->second.address + static_cast<u64>(r.addend);
      std::memcpy(reinterpret_cast<u8*>(symbols_[v.name].address) + r.offset, &value, 8);
    }
  }
}

u64 Module::variable_address(const Variable& v) const { return symbols_.at(v.name).address; }

void Module::add_variables(Registry& registry) const {
  for (const auto& v : ast_.variables) {
    if (v.space == Space::Shared) continue;
    const u64 address = symbols_.at(v.name).address;
    registry.add({address, address + v.bytes, v.space == Space::Const, nullptr, "variable " + v.name, Allocation::Owner::Module});
  }
}

}  // namespace cake::emu
