#include "text/template/interpreter.h"

#include <algorithm>
#include <array>
#include <ctime>

#include "core/error.h"

namespace hearth::text::jinja {

namespace {
constexpr size_t kMostNamespaces = 1000;
constexpr int64_t kLargest = int64_t{1} << 60;  // of range()'s bounds, so that none overflows
}  // namespace

struct Interpreter::Entered {
  explicit Entered(Interpreter& interpreter, ScopePtr parent) : in(interpreter), outer(in.scope_) {
    in.scope_ = std::make_shared<Scope>();
    in.scope_->parent = std::move(parent);
  }
  ~Entered() { in.scope_ = std::move(outer); }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  Interpreter& in;
  ScopePtr outer;
};

Interpreter::~Interpreter() {
  for (const ScopePtr& scope : closures_) scope->variables.clear();
  for (Value& space : namespaces_) space.mutable_dict().items.clear();
}

std::string Interpreter::render(const Dict& variables) {
  std::string out;
  out_ = &out;
  scope_ = std::make_shared<Scope>();
  add_globals();
  for (const auto& [name, value] : variables.items) set(name.string(), value);
  const Entered entered(*this, scope_);
  try {
    run(body_);
  } catch (const Error& e) {
    if (std::string_view(e.what()).starts_with("chat template")) throw;
    fail_at(at_, e.what());
  }
  return out;
}

void Interpreter::add_globals() {
  set("raise_exception", Callable{"raise_exception", [](Interpreter&, const Arguments& a) -> Value {
                                    ArgumentReader args("raise_exception", a);
                                    fail("the model's chat template refuses: {}", to_text(args.require("message")));
                                  }});
  set("strftime_now", Callable{"strftime_now", [](Interpreter& in, const Arguments& a) -> Value {
                                 ArgumentReader args("strftime_now", a);
                                 const std::string format = args.require_string("format");
                                 if (format.size() > 256) fail("strftime_now()'s format is too long");
                                 const std::time_t now = in.now_;
                                 std::tm local{};
                                 localtime_r(&now, &local);
                                 std::array<char, 4096> text;
                                 return std::string(text.data(),
                                                    std::strftime(text.data(), text.size(), format.c_str(), &local));
                               }});
  set("range", Callable{"range", [](Interpreter& in, const Arguments& a) -> Value {
                          ArgumentReader args("range", a);
                          if (a.positional.empty()) fail("range() needs 'stop'");
                          int64_t from = 0, to = args.integer("stop", 0);
                          if (a.positional.size() > 1) from = to, to = args.integer("stop", 0);
                          const int64_t by = args.integer("step", 1);
                          args.finish();
                          for (const int64_t bound : {from, to, by}) {
                            if (bound > kLargest || bound < -kLargest) fail("range() of {} is too large", bound);
                          }
                          if (by == 0) fail("range() needs a step that is not 0");
                          List all;
                          for (int64_t i = from; by > 0 ? i < to : i > to; i += by) {
                            if (all.size() >= 100'000) fail("range() makes at most 100000 numbers");
                            all.emplace_back(i);
                          }
                          in.charge(all.size() * sizeof(Value));
                          return all;
                        }});
  const auto make_dict = [](const char* name, bool is_namespace) {
    return Callable{name, [name, is_namespace](Interpreter& in, const Arguments& a) -> Value {
                      ArgumentReader args(name, a);
                      Dict dict;
                      if (const Value* from = args.next("")) {
                        if (!from->is_dict()) fail("{}() needs a dict or named values", name);
                        dict.items = from->dict().items;
                      }
                      for (const auto& [key, value] : a.named) dict.set(key, value);
                      dict.is_namespace = is_namespace;
                      if (!is_namespace) return dict;
                      if (in.namespaces_.size() >= kMostNamespaces) fail("more than {} namespaces", kMostNamespaces);
                      in.namespaces_.emplace_back(std::move(dict));
                      return in.namespaces_.back();
                    }};
  };
  set("namespace", make_dict("namespace", true));
  set("dict", make_dict("dict", false));
}

// --- bookkeeping ---

void Interpreter::step() {
  if (++steps_ > limits_.steps) fail("the template takes more than {} steps", limits_.steps);
}

void Interpreter::charge(size_t bytes) {
  if (bytes > static_cast<size_t>(limits_.output))
    fail("the template builds more than {} bytes at once", limits_.output);
  steps_ += static_cast<int64_t>(bytes / 64);
  step();
}

void Interpreter::print(std::string_view text) {
  charge(text.size());
  if (out_->size() + text.size() > static_cast<size_t>(limits_.output)) {
    fail("the template's text has more than {} bytes", limits_.output);
  }
  *out_ += text;
}

const Value* Interpreter::find(const std::string& name) const {
  for (const Scope* scope = scope_.get(); scope != nullptr; scope = scope->parent.get()) {
    for (const auto& [n, value] : scope->variables) {
      if (n == name) return &value;
    }
  }
  return nullptr;
}

void Interpreter::set(const std::string& name, Value value) {
  for (auto& [n, v] : scope_->variables) {
    if (n == name) {
      v = std::move(value);
      return;
    }
  }
  scope_->variables.emplace_back(name, std::move(value));
}

std::string Interpreter::capture(const Body& body) {
  std::string text;
  std::string* const outer = std::exchange(out_, &text);
  try {
    run(body);
  } catch (...) {
    out_ = outer;
    throw;
  }
  out_ = outer;
  return text;
}

// --- statements ---

Interpreter::Flow Interpreter::run(const Body& body) {
  for (const Stmt& s : body) {
    step();
    if (const Flow flow = run(s); flow != Flow::on) return flow;
  }
  return Flow::on;
}

Interpreter::Flow Interpreter::run(const Stmt& s) {
  at_ = s.at;
  switch (s.kind) {
    case Stmt::Kind::text:
      print(s.name);
      return Flow::on;
    case Stmt::Kind::print:
      print(to_text(eval(*s.exprs[0])));
      return Flow::on;
    case Stmt::Kind::if_:
      return run(s.bodies[eval(*s.exprs[0]).truth() ? 0 : 1]);
    case Stmt::Kind::for_:
      return run_loop(s, eval(*s.exprs[0]), 1);
    case Stmt::Kind::set:
    case Stmt::Kind::set_block:
      run_set(s);
      return Flow::on;
    case Stmt::Kind::macro:
      set(s.name, make_macro(s, s.name));
      return Flow::on;
    case Stmt::Kind::call:
      run_call(s);
      return Flow::on;
    case Stmt::Kind::filter: {
      // The innermost filter has no input of its own: it is the block's text.
      std::string text;
      {
        const Entered entered(*this, scope_);
        text = capture(s.bodies[0]);
      }
      std::vector<const Expr*> filters;
      for (const Expr* e = s.exprs[0].get(); e != nullptr; e = e->args[0].get()) filters.push_back(e);
      Value value = text;
      for (auto e = filters.rbegin(); e != filters.rend(); ++e) {
        value = apply_filter((*e)->name, value, eval_arguments((*e)->call));
      }
      print(to_text(value));
      return Flow::on;
    }
    case Stmt::Kind::with:
      run_with(s);
      return Flow::on;
    case Stmt::Kind::block:
      return run(s.bodies[0]);
    case Stmt::Kind::break_:
      return Flow::break_;
    case Stmt::Kind::continue_:
      return Flow::continue_;
  }
  HEARTH_CHECK(false);
}

List Interpreter::items(const Value& value) {
  if (value.is_list()) return value.list();
  if (value.is_undefined()) return {};
  List all;
  if (value.is_dict() && !value.dict().is_namespace) {
    for (const auto& [key, v] : value.dict().items) all.push_back(key);
    return all;
  }
  if (value.is_string()) {
    const Value characters = slice(*this, value, nullptr, nullptr, nullptr);
    const int64_t n = apply_filter("length", value, {}).integer();
    for (int64_t i = 0; i < n; ++i) all.push_back(item(characters, i));
    return all;
  }
  fail("a value of type '{}' has no items to go through", value.type_name());
}

void Interpreter::bind(const Stmt& s, const Value& value) {
  if (!s.unpacks) return set(s.targets[0], value);
  const List parts = items(value);
  if (parts.size() != s.targets.size()) fail("{} values for {} names", parts.size(), s.targets.size());
  for (size_t i = 0; i < parts.size(); ++i) set(s.targets[i], parts[i]);
}

Value Interpreter::loop_facts(const Stmt& s, const List& all, size_t i, int depth) {
  const auto n = static_cast<int64_t>(all.size()), at = static_cast<int64_t>(i);
  Dict loop;
  loop.is_namespace = true;  // its names are no methods of a dict
  loop.items = {{"index", at + 1},
                {"index0", at},
                {"revindex", n - at},
                {"revindex0", n - at - 1},
                {"first", at == 0},
                {"last", at == n - 1},
                {"length", n},
                {"depth", depth},
                {"depth0", depth - 1},
                {"previtem", i > 0 ? all[i - 1] : Value(Undefined{"there is no previous item"})},
                {"nextitem", i + 1 < all.size() ? all[i + 1] : Value(Undefined{"there is no next item"})}};
  loop.items.emplace_back("cycle", Callable{"cycle", [i](Interpreter&, const Arguments& a) -> Value {
                                              if (a.positional.empty()) fail("cycle() needs at least one value");
                                              return a.positional[i % a.positional.size()];
                                            }});
  if (s.recursive) {
    loop.items.emplace_back("()", Callable{"loop", [&s, depth](Interpreter& in, const Arguments& a) -> Value {
                                             ArgumentReader args("loop", a);
                                             const Value over = args.require("items");
                                             if (depth >= in.limits_.depth) fail("a loop calls itself too deep");
                                             std::string text;
                                             std::string* const outer = std::exchange(in.out_, &text);
                                             try {
                                               in.run_loop(s, over, depth + 1);
                                             } catch (...) {
                                               in.out_ = outer;
                                               throw;
                                             }
                                             in.out_ = outer;
                                             return text;
                                           }});
  }
  return loop;
}

Interpreter::Flow Interpreter::run_loop(const Stmt& s, const Value& over, int depth) {
  List all = items(over);
  charge(all.size() * sizeof(Value));
  if (s.exprs[1]) {
    List kept;
    for (const Value& value : all) {
      const Entered entered(*this, scope_);
      bind(s, value);
      if (eval(*s.exprs[1]).truth()) kept.push_back(value);
    }
    all = std::move(kept);
  }
  for (size_t i = 0; i < all.size(); ++i) {
    step();
    const Entered entered(*this, scope_);
    set("loop", loop_facts(s, all, i, depth));
    bind(s, all[i]);
    if (run(s.bodies[0]) == Flow::break_) break;
  }
  if (all.empty()) {
    const Entered entered(*this, scope_);
    return run(s.bodies[1]);
  }
  return Flow::on;
}

void Interpreter::run_set(const Stmt& s) {
  Value value;
  if (s.kind == Stmt::Kind::set) {
    value = eval(*s.exprs[0]);
  } else {
    {
      const Entered entered(*this, scope_);
      value = capture(s.bodies[0]);
    }
    std::vector<const Expr*> filters;
    for (const Expr* e = s.exprs[0].get(); e != nullptr; e = e->args[0].get()) filters.push_back(e);
    for (auto e = filters.rbegin(); e != filters.rend(); ++e) {
      value = apply_filter((*e)->name, value, eval_arguments((*e)->call));
    }
  }
  const auto assign = [&](const std::string& target, const Value& v) {
    const size_t dot = target.find('.');
    if (dot == std::string::npos) return set(target, v);
    const Value* found = find(target.substr(0, dot));
    if (found == nullptr || !found->is_dict() || !found->dict().is_namespace) {
      fail("'{}' is no namespace, so that its attributes cannot be set", target.substr(0, dot));
    }
    Value space = *found;  // shared
    space.mutable_dict().set(target.substr(dot + 1), v);
  };
  if (!s.unpacks) return assign(s.targets[0], value);
  const List parts = items(value);
  if (parts.size() != s.targets.size()) fail("{} values for {} names", parts.size(), s.targets.size());
  for (size_t i = 0; i < parts.size(); ++i) assign(s.targets[i], parts[i]);
}

void Interpreter::run_with(const Stmt& s) {
  List values;
  for (const ExprPtr& e : s.exprs) values.push_back(eval(*e));
  const Entered entered(*this, scope_);
  for (size_t i = 0; i < values.size(); ++i) set(s.targets[i], values[i]);
  run(s.bodies[0]);
}

// {% call f(x) %}…{% endcall %}: f with `caller`, which makes the block's text.
void Interpreter::run_call(const Stmt& s) {
  const Expr& e = *s.exprs[0];
  Arguments arguments = eval_arguments(e.call);
  arguments.named.emplace_back("caller", make_macro(s, "caller"));
  print(to_text(call(eval(*e.args[0]), arguments)));
}

Value Interpreter::make_macro(const Stmt& s, const std::string& name) {
  closures_.push_back(scope_);
  return Callable{name, [&s, name, scope = scope_](Interpreter& in, const Arguments& given) {
                    return in.run_macro(s, name, scope, given);
                  }};
}

Value Interpreter::run_macro(const Stmt& s, const std::string& name, const ScopePtr& scope, const Arguments& given) {
  struct Depth {
    int& depth;
    ~Depth() { --depth; }
  } const depth{depth_};
  if (++depth_ > limits_.depth) fail("macros call each other more than {} levels deep", limits_.depth);
  const Entered entered(*this, scope);
  const size_t n_parameters = s.parameters.size(), n_given = given.positional.size();
  if (n_given > n_parameters && !s.implicit.varargs) {
    fail("macro '{}' takes {} arguments, and {} were given", name, n_parameters, n_given);
  }
  auto named = given.named;
  const auto take = [&](const std::string& key) -> std::optional<Value> {
    const auto found = std::find_if(named.begin(), named.end(), [&](const auto& n) { return n.first == key; });
    if (found == named.end()) return std::nullopt;
    Value value = std::move(found->second);
    named.erase(found);
    return value;
  };
  std::vector<std::optional<Value>> values(n_parameters);
  bool has_caller = false;  // as a parameter
  for (size_t i = 0; i < n_parameters; ++i) {
    values[i] = i < n_given ? std::optional(given.positional[i]) : take(s.parameters[i].first);
    has_caller = has_caller || s.parameters[i].first == "caller";
  }
  if (s.implicit.caller && !has_caller) set("caller", take("caller").value_or(Undefined{"No caller defined"}));
  if (s.implicit.kwargs) {
    Dict rest;
    for (const auto& [key, value] : named) rest.set(key, value);
    set("kwargs", std::move(rest));
  } else if (!named.empty()) {
    const std::string& key = named[0].first;
    const bool twice =
        std::any_of(s.parameters.begin(), s.parameters.end(), [&](const auto& p) { return p.first == key; });
    if (twice) fail("macro '{}' was given '{}' twice", name, key);
    if (key == "caller") fail("macro '{}' does not use the caller that a call block gives it", name);
    fail("macro '{}' has no parameter '{}'", name, key);
  }
  if (s.implicit.varargs) {
    const size_t first = std::min(n_given, n_parameters);
    set("varargs", List(given.positional.begin() + static_cast<std::ptrdiff_t>(first), given.positional.end()));
  }
  for (size_t i = 0; i < n_parameters; ++i) {
    if (values[i]) set(s.parameters[i].first, *std::move(values[i]));
  }
  for (size_t i = std::min(n_given, n_parameters); i < n_parameters; ++i) {
    if (values[i]) continue;
    const auto& [key, otherwise] = s.parameters[i];
    set(key, otherwise ? eval(*otherwise) : Value(Undefined{"parameter '" + key + "' was not provided"}));
  }
  return capture(s.bodies[0]);
}

}  // namespace hearth::text::jinja
