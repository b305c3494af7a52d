// Recursive-descent parser of a PTX module. Declarations are in ptx_parser.cpp, function bodies in ptx_body.cpp.
#pragma once
#include <unordered_map>

#include "ptx_ast.h"
#include "ptx_lexer.h"

namespace cake::emu {

class Parser {
 public:
  explicit Parser(const std::string& text) : tokens_(tokenize(text)) {}
  ModuleAst run();

 private:
  struct Scope {
    int id;
    std::unordered_map<std::string, std::string> names;
  };
  struct BranchUse {
    size_t statement, operand;
    std::vector<int> scopes;
  };

  // tokens
  const Token& peek(size_t ahead = 0) const { return tokens_[std::min(at_ + ahead, tokens_.size() - 1)]; }
  Token take() { return tokens_[at_ + 1 < tokens_.size() ? at_++ : at_]; }
  bool is(const char* text) const { return peek().text == text && peek().kind != Token::String; }
  bool accept(const char* text);
  void expect(const char* text);
  std::string expect_word();
  i64 expect_integer();
  [[noreturn]] void error(const std::string& message) const;
  [[noreturn]] void unsupported(const std::string& message) const;
  void skip_block();
  void skip_statement();

  // constant expressions (ptx_constant.cpp)
  struct Constant {
    u64 bits;
    bool is_unsigned;
  };
  bool is_operator(const char* text) const;
  bool starts_constant() const;
  Constant constant_primary();
  Constant constant_binary(int least);
  Constant constant();
  i64 constant_integer();

  // declarations
  Variable variable(Space space, bool is_extern, bool in_list);
  void define(Variable v);
  void initializer(Variable& v, u32 element_bytes, u64& offset);
  std::vector<Variable> parameter_list();
  void function(bool is_kernel);
  void performance_directives(FunctionAst& f);
  void file_directive();

  // bodies
  void body(FunctionAst& f);
  void block(FunctionAst& f);
  void body_directive(FunctionAst& f);
  void registers(FunctionAst& f);
  void loc_directive();
  void instruction(FunctionAst& f);
  Operand operand();
  Operand operand_primary();
  Operand bracketed(const char* close, Operand::Kind kind);
  std::string resolve(const std::string& name) const;
  std::string declare(FunctionAst& f, const std::string& name);
  void resolve_labels(FunctionAst& f);

  std::vector<Token> tokens_;
  size_t at_ = 0;
  ModuleAst module_;
  std::vector<Scope> scopes_;
  int next_scope_ = 0;
  int next_unique_ = 0;
  SourceLoc loc_;
  bool in_call_ = false;  // parentheses hold lists of arguments
  std::vector<BranchUse> branches_;
};

}  // namespace cake::emu
