// Expressions.
#include <algorithm>

#include "core/error.h"
#include "text/template/interpreter.h"

namespace hearth::text::jinja {

Value Interpreter::eval(const Expr& e) {
  step();
  const Position outer = std::exchange(at_, e.at);
  const auto done = [&](Value value) {
    at_ = outer;  // not when an error leaves: its position stays
    return value;
  };
  switch (e.kind) {
    case Expr::Kind::constant:
      return done(e.value);
    case Expr::Kind::name:
      return done(eval_name(e));
    case Expr::Kind::list: {
      List items;
      for (const ExprPtr& arg : e.args) items.push_back(eval(*arg));
      return done(std::move(items));
    }
    case Expr::Kind::dict: {
      Dict dict;
      for (size_t i = 0; i < e.args.size(); i += 2) {
        const Value key = eval(*e.args[i]);
        if (key.is_list() || key.is_dict()) fail("a dict's key is of type '{}'", key.type_name());
        dict.set(key, eval(*e.args[i + 1]));
      }
      return done(std::move(dict));
    }
    case Expr::Kind::attribute:
      return done(attribute(eval(*e.args[0]), e.name));
    case Expr::Kind::item: {
      const Value object = eval(*e.args[0]);
      return done(item(object, eval(*e.args[1])));
    }
    case Expr::Kind::slice:
      return done(eval_slice(e));
    case Expr::Kind::call:
      return done(eval_call(e));
    case Expr::Kind::filter: {
      const Value input = eval(*e.args[0]);
      return done(apply_filter(e.name, input, eval_arguments(e.call)));
    }
    case Expr::Kind::test: {
      const Value input = eval(*e.args[0]);
      return done(apply_test(e.name, input, eval_arguments(e.call)));
    }
    case Expr::Kind::unary:
      return done(eval_unary(e));
    case Expr::Kind::binary:
      return done(eval_binary(e));
    case Expr::Kind::compare:
      return done(eval_compare(e));
    case Expr::Kind::condition:
      if (eval(*e.args[0]).truth()) return done(eval(*e.args[1]));
      if (e.args[2]) return done(eval(*e.args[2]));
      return done(Undefined{"the condition is false, and there is no 'else'"});
  }
  HEARTH_CHECK(false);
}

Value Interpreter::eval_name(const Expr& e) {
  if (const Value* value = find(e.name)) return *value;
  return Undefined{"'" + e.name + "' is undefined"};
}

Value Interpreter::eval_slice(const Expr& e) {
  const Value object = eval(*e.args[0]);
  const auto part = [&](size_t i) { return e.args[i] ? eval(*e.args[i]) : Value(); };
  const Value from = part(1), to = part(2);
  return slice(*this, object, from, to, part(3));
}

Arguments Interpreter::eval_arguments(const Call& c) {
  Arguments a;
  for (const ExprPtr& e : c.positional) a.positional.push_back(eval(*e));
  if (c.list) {
    for (Value& value : items(eval(*c.list))) a.positional.push_back(std::move(value));
  }
  for (const auto& [name, e] : c.named) a.named.emplace_back(name, eval(*e));
  if (c.dict) {
    const Value dict = eval(*c.dict);
    if (!dict.is_dict()) fail("'**' needs a dict, found '{}'", dict.type_name());
    for (const auto& [key, value] : dict.dict().items) a.named.emplace_back(to_text(key), value);
  }
  return a;
}

Value Interpreter::eval_call(const Expr& e) {
  const Value callee = eval(*e.args[0]);
  const Arguments arguments = eval_arguments(e.call);
  return call(callee, arguments);
}

Value Interpreter::call(const Value& callee, const Arguments& arguments) {
  if (callee.is_callable()) return callee.callable().call(*this, arguments);
  if (callee.is_dict()) {
    const Value* f = callee.dict().find("()");
    if (f != nullptr && f->is_callable()) return f->callable().call(*this, arguments);
  }
  if (callee.is_undefined()) fail("{}", callee.undefined().what);
  fail("a value of type '{}' cannot be called", callee.type_name());
}

Value Interpreter::apply_filter(const std::string& name, const Value& input, const Arguments& arguments) {
  const Filter filter = find_filter(name);
  if (filter == nullptr) fail("there is no filter named '{}'", name);
  return filter(*this, input, arguments);
}

bool Interpreter::apply_test(const std::string& name, const Value& input, const Arguments& arguments) {
  const Test test = find_test(name);
  if (test == nullptr) fail("there is no test named '{}'", name);
  return test(*this, input, arguments);
}

Value Interpreter::attribute(const Value& object, const std::string& name) {
  if (object.is_undefined()) fail("{}", object.undefined().what);
  const bool space = object.is_dict() && object.dict().is_namespace;
  if (!space) {
    if (std::optional<Value> method = find_method(object, name)) return *std::move(method);
  }
  if (object.is_dict()) {
    if (const Value* value = object.dict().find(name)) return *value;
  }
  return Undefined{fmt::format("'{}' has no attribute '{}'", object.type_name(), name)};
}

Value Interpreter::item(const Value& object, const Value& key) {
  if (object.is_undefined()) fail("{}", object.undefined().what);
  if (object.is_dict()) {
    if (const Value* value = object.dict().at(key)) return *value;
  }
  if (key.is_string()) return attribute(object, key.string());
  if (key.is_int() && (object.is_list() || object.is_string())) {
    const auto n = object.is_list() ? std::ssize(object.list()) : apply_filter("length", object, {}).integer();
    const int64_t i = key.integer() < 0 ? key.integer() + n : key.integer();
    if (i >= 0 && i < n) {
      if (object.is_list()) return object.list()[static_cast<size_t>(i)];
      return slice(*this, object, i, i + 1, nullptr);
    }
  }
  return Undefined{fmt::format("'{}' has no item {}", object.type_name(), repr(key))};
}

Value Interpreter::eval_unary(const Expr& e) {
  const Value value = eval(*e.args[0]);
  if (e.name == "not") return !value.truth();
  if (value.is_undefined()) fail("{}", value.undefined().what);
  if (!value.is_number()) fail("'{}' of a value of type '{}'", e.name, value.type_name());
  return arithmetic(*this, e.name, 0, value);
}

Value Interpreter::eval_binary(const Expr& e) {
  Value left = eval(*e.args[0]);
  if (e.name == "and") return left.truth() ? eval(*e.args[1]) : left;
  if (e.name == "or") return left.truth() ? left : eval(*e.args[1]);
  const Value right = eval(*e.args[1]);
  return arithmetic(*this, e.name, left, right);
}

Value Interpreter::eval_compare(const Expr& e) {
  Value left = eval(*e.args[0]);
  for (size_t i = 0; i < e.ops.size(); ++i) {
    Value right = eval(*e.args[i + 1]);
    const std::string& op = e.ops[i];
    bool holds = false;
    if (op == "==") {
      holds = equal(left, right);
    } else if (op == "!=") {
      holds = !equal(left, right);
    } else if (op == "in") {
      holds = contains(right, left);
    } else if (op == "not in") {
      holds = !contains(right, left);
    } else {
      const int order = compare(left, right);
      holds = op == "<" ? order < 0 : op == "<=" ? order <= 0 : op == ">" ? order > 0 : order >= 0;
    }
    if (!holds) return false;
    left = std::move(right);
  }
  return true;
}

}  // namespace hearth::text::jinja
