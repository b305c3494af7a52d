// The parsed form of a PTX module: declarations, and functions as flat lists of statements.
#pragma once
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core.h"

namespace cake::emu {

// A register name is resolved while parsing, because blocks open scopes: `name` is then unique in its function.
struct Operand {
  enum Kind : u8 { Name, Integer, Float32, Float64, Vector, Address, Pair, List };
  Kind kind = Name;
  bool negated = false;        // !p
  std::string name;            // Name
  u64 bits = 0;                // Integer (two's complement), Float32, Float64 (IEEE bits)
  i64 offset = 0;              // Address: constant added to the base; Name: symbol+offset
  std::vector<Operand> items;  // Vector, List: elements; Pair: two; Address: base, then further parts
};

struct SourceLoc {
  u32 file = 0, line = 0;
};

struct Statement {
  u32 line = 0;
  SourceLoc loc;
  std::string label;  // a label when not empty; nothing else is set then
  std::string guard;  // predicate's name, empty when unguarded
  bool guard_negated = false;
  std::vector<std::string> parts;  // opcode split at dots
  std::string opcode;              // as written
  std::vector<Operand> operands;
};

struct Variable {
  std::string name;
  Space space = Space::Global;
  std::string type;  // .b8 .u32 ... without the dot
  u32 align = 1;
  u64 bytes = 0;  // 0 for an unsized extern array
  bool is_extern = false;
  std::vector<u8> data;  // initial bytes; may be shorter than `bytes`
  struct Relocation {
    u64 offset;
    std::string symbol;
    i64 addend;
  };
  std::vector<Relocation> relocations;
  u32 line = 0;
};

struct RegisterDecl {
  std::string name;  // unique in its function
  std::string type;
};

struct FunctionAst {
  std::string name;
  bool is_kernel = false;
  bool has_body = false;
  std::vector<Variable> returns, params;
  std::vector<RegisterDecl> registers;
  std::vector<Variable> locals;  // .local and call .param variables, names unique in the function
  std::vector<Variable> shared;  // .shared declared inside of the body
  std::vector<Statement> body;
  u32 max_threads = 0, max_registers = 0, min_ctas = 1;
  u32 required_threads[3] = {0, 0, 0};
  u32 cluster[3] = {0, 0, 0};
  u32 line = 0;
  std::shared_ptr<ParseError> broken;  // why its body could not be read
};

struct ModuleAst {
  std::string version, target;
  u32 target_line = 1;
  std::map<u32, std::string> files;
  std::vector<Variable> variables;  // .global .const .shared at module level
  std::vector<FunctionAst> functions;
};

ModuleAst parse_ptx(const std::string& text);
u32 type_bytes(const std::string& type);  // of a fundamental type; 0 when unknown

}  // namespace cake::emu
