// A loaded module: parsed text, the memory of its variables, decoded kernels.
#pragma once
#include <map>
#include <memory>

#include "decode.h"
#include "machine.h"

namespace cake::emu {

class Module {
 public:
  Module(const std::string& text, const std::string& target);
  const std::map<std::string, std::unique_ptr<Program>>& programs() const { return programs_; }
  // Why a kernel cannot be executed; null for one that can.
  const ParseError* broken(const std::string& kernel) const {
    auto it = broken_.find(kernel);
    return it == broken_.end() ? nullptr : &it->second;
  }
  const ModuleAst& ast() const { return ast_; }
  const std::string& target() const { return target_; }
  const std::vector<std::string>& lines() const { return lines_; }
  // Variables of the module as allocations of a launch.
  void add_variables(Registry& registry) const;
  u64 variable_address(const Variable& v) const;

 private:
  void place_variables();
  void check_target() const;

  ModuleAst ast_;
  std::string target_;
  std::vector<std::string> lines_;
  SymbolTable symbols_;
  std::unordered_map<std::string, const FunctionAst*> functions_;
  std::vector<std::vector<u8>> storage_;
  std::map<std::string, std::unique_ptr<Program>> programs_;
  std::map<std::string, ParseError> broken_;
};

}  // namespace cake::emu
