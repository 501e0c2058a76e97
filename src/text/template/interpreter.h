#pragma once
// Runs a chat template's tree. Bounded: steps, depth of calls, size of what it builds.
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/template/ast.h"

namespace hearth::text::jinja {

struct Limits {
  int64_t steps = 20'000'000;         // evaluated nodes, and one for every 64 bytes that are built
  int64_t output = int64_t{1} << 26;  // bytes
  int depth = 60;                     // of macro calls and recursive loops
};

class Interpreter {
 public:
  // `now`: what strftime_now() tells, in seconds since 1970.
  Interpreter(const Body& body, const Limits& limits, int64_t now) : body_(body), limits_(limits), now_(now) {}
  ~Interpreter();
  Interpreter(const Interpreter&) = delete;
  Interpreter& operator=(const Interpreter&) = delete;

  // Throws Error with line and column, or raise_exception()'s message.
  std::string render(const Dict& variables);

  // For filters, tests and methods.
  void charge(size_t bytes);  // of something that is built
  Value call(const Value& callee, const Arguments& arguments);
  Value apply_filter(const std::string& name, const Value& input, const Arguments& arguments);
  bool apply_test(const std::string& name, const Value& input, const Arguments& arguments);
  // object.name and object[key] as Jinja2 finds them; undefined when there is none.
  Value attribute(const Value& object, const std::string& name);
  Value item(const Value& object, const Value& key);
  // The items that a loop over a value visits.
  List items(const Value& value);

 private:
  struct Scope {
    std::vector<std::pair<std::string, Value>> variables;
    std::shared_ptr<Scope> parent;
  };
  using ScopePtr = std::shared_ptr<Scope>;
  enum class Flow { on, break_, continue_ };
  struct Entered;  // a scope for a C++ scope's time

  Flow run(const Body& body);
  Flow run(const Stmt& s);
  Flow run_loop(const Stmt& s, const Value& over, int depth);
  Value loop_facts(const Stmt& s, const List& all, size_t i, int depth);
  void run_set(const Stmt& s);
  void run_with(const Stmt& s);
  void run_call(const Stmt& s);
  Value make_macro(const Stmt& s, const std::string& name);
  Value run_macro(const Stmt& s, const std::string& name, const ScopePtr& scope, const Arguments& given);
  std::string capture(const Body& body);
  void print(std::string_view text);
  void bind(const Stmt& s, const Value& value);

  Value eval(const Expr& e);
  Value eval_name(const Expr& e);
  Value eval_slice(const Expr& e);
  Value eval_call(const Expr& e);
  Value eval_unary(const Expr& e);
  Value eval_binary(const Expr& e);
  Value eval_compare(const Expr& e);
  Arguments eval_arguments(const Call& call);
  void step();
  const Value* find(const std::string& name) const;
  void set(const std::string& name, Value value);
  void add_globals();

  const Body& body_;
  Limits limits_;
  int64_t now_;
  int64_t steps_ = 0;
  int depth_ = 0;
  Position at_;
  std::string* out_ = nullptr;
  ScopePtr scope_;
  std::vector<ScopePtr> closures_;  // of macros, which hold their scope, which holds them
  std::vector<Value> namespaces_;   // which may hold themselves
};

// The named one, or null. `input` is what stands before the "|" or "is".
using Filter = Value (*)(Interpreter&, const Value& input, const Arguments&);
using Test = bool (*)(Interpreter&, const Value& input, const Arguments&);
Filter find_filter(std::string_view name);
Test find_test(std::string_view name);
// A method of strings, lists or dicts as a callable; nothing when there is none of that name.
std::optional<Value> find_method(const Value& object, std::string_view name);

// a + b and the like; `op` as it is written.
Value arithmetic(Interpreter& in, const std::string& op, const Value& a, const Value& b);
Value slice(Interpreter& in, const Value& object, const Value& from, const Value& to, const Value& step);
// Python's text % arguments.
std::string percent_format(const std::string& format, const List& arguments);

// Arguments of a filter, test or method. Throws Error when there is more than was asked for (finish()).
class ArgumentReader {
 public:
  ArgumentReader(std::string_view callee, const Arguments& a) : callee_(callee), a_(a) {}
  // The next positional argument, or the one of that name; null: it was not given.
  const Value* next(std::string_view name);
  Value next(std::string_view name, Value otherwise);
  const Value& require(std::string_view name);
  const std::string& require_string(std::string_view name);
  int64_t integer(std::string_view name, int64_t otherwise);
  void finish() const;

 private:
  std::string_view callee_;
  const Arguments& a_;
  size_t positional_ = 0, named_ = 0;
};

}  // namespace hearth::text::jinja
