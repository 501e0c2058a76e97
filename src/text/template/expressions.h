#pragma once
// Jinja2's expressions (jinja2/parser.py); precedences are Jinja2's. The grammar of statements derives from this.
#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <initializer_list>

#include "core/error.h"
#include "text/template/ast.h"

namespace hearth::text::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(std::string_view source) : tokens_(tokenize(source)) {}

 protected:
  using Kind = Token::Kind;
  static constexpr int kLongestChain = 500;
  static constexpr int kMostDepth = 100;  // of brackets and blocks inside each other

  struct Deeper {
    explicit Deeper(ExpressionParser& p) : parser(p) {
      if (++parser.depth_ > kMostDepth) fail_at(parser.now().at, "more than 100 levels inside each other");
    }
    ~Deeper() { --parser.depth_; }
    ExpressionParser& parser;
  };

  // --- tokens ---
  const Token& now() const { return tokens_[i_]; }
  const Token& ahead() const { return tokens_[std::min(i_ + 1, tokens_.size() - 1)]; }
  const Token& take() { return tokens_[now().kind == Kind::end ? i_ : i_++]; }
  bool is(Kind kind, std::string_view text) const { return now().kind == kind && now().text == text; }
  bool is_op(std::string_view text) const { return is(Kind::op, text); }
  bool is_name(std::string_view text) const { return is(Kind::name, text); }
  bool skip_op(std::string_view text) { return is_op(text) && (++i_, true); }
  bool skip_name(std::string_view text) { return is_name(text) && (++i_, true); }
  void expect_op(std::string_view text) {
    if (!skip_op(text)) expected("'" + std::string(text) + "'");
  }
  std::string expect_name() {
    if (now().kind != Kind::name) expected("a name");
    return take().text;
  }
  void expect_block_end() {
    if (now().kind != Kind::block_end) expected("'%}'");
    take();
  }
  [[noreturn]] void expected(const std::string& what) const {
    fail_at(now().at, "expected " + what + ", found '" + now().text + "'");
  }

  // --- implicit names of the macros that are being read: used before anything else has the name ---
  struct Macro {
    ImplicitNames used, hidden;
  };
  static bool* implicit(ImplicitNames& names, std::string_view name) {
    if (name == "varargs") return &names.varargs;
    if (name == "kwargs") return &names.kwargs;
    return name == "caller" ? &names.caller : nullptr;
  }
  void note_use(std::string_view name) {
    for (Macro& m : macros_) {
      if (bool* used = implicit(m.used, name); used != nullptr && !*implicit(m.hidden, name)) *used = true;
    }
  }
  void note_target(std::string_view name) {
    for (Macro& m : macros_) {
      if (bool* hidden = implicit(m.hidden, name)) *hidden = true;
    }
  }

  static ExprPtr make(Expr::Kind kind, Position at, std::string name = {}) {
    auto e = std::make_unique<Expr>();
    e->kind = kind, e->at = at, e->name = std::move(name);
    return e;
  }
  static ExprPtr constant(Position at, Value value) {
    ExprPtr e = make(Expr::Kind::constant, at);
    e->value = std::move(value);
    return e;
  }
  template <typename... Args>
  static ExprPtr node(Expr::Kind kind, Position at, std::string name, Args... args) {
    ExprPtr e = make(kind, at, std::move(name));
    (adopt(*e, std::move(args)), ...);
    return e;
  }
  // A chain like a.b.c or a + b + c is as deep as it is long, and evaluated by recursion.
  static void adopt(Expr& parent, ExprPtr child) {
    if (child) parent.depth = std::max(parent.depth, child->depth + 1);
    if (parent.depth > kLongestChain)
      fail_at(parent.at, fmt::format("more than {} operations in a row", kLongestChain));
    parent.args.push_back(std::move(child));
  }

  bool tuple_ends() const {
    return now().kind == Kind::print_end || now().kind == Kind::block_end || is_op(")") || is_name("recursive");
  }
  // One expression, or a list of several with commas.
  ExprPtr tuple(bool with_condition = true) {
    const Position at = now().at;
    ExprPtr first = with_condition ? expression() : disjunction();
    if (!is_op(",")) return first;
    ExprPtr all = node(Expr::Kind::list, at, {}, std::move(first));
    while (skip_op(",") && !tuple_ends()) adopt(*all, with_condition ? expression() : disjunction());
    return all;
  }

  ExprPtr expression() {
    const Deeper deeper(*this);
    ExprPtr e = disjunction();
    while (is_name("if")) {
      const Position at = take().at;
      ExprPtr condition = disjunction();
      ExprPtr otherwise = skip_name("else") ? expression() : nullptr;
      e = node(Expr::Kind::condition, at, {}, std::move(condition), std::move(e), std::move(otherwise));
    }
    return e;
  }
  ExprPtr disjunction() {
    ExprPtr e = conjunction();
    while (is_name("or")) {
      const Position at = take().at;
      e = node(Expr::Kind::binary, at, "or", std::move(e), conjunction());
    }
    return e;
  }
  ExprPtr conjunction() {
    ExprPtr e = negation();
    while (is_name("and")) {
      const Position at = take().at;
      e = node(Expr::Kind::binary, at, "and", std::move(e), negation());
    }
    return e;
  }
  ExprPtr negation() {
    if (!is_name("not")) return comparison();
    const Deeper deeper(*this);
    const Position at = take().at;
    return node(Expr::Kind::unary, at, "not", negation());
  }
  ExprPtr comparison() {
    static constexpr std::array<std::string_view, 6> kOps = {"==", "!=", "<", "<=", ">", ">="};
    const Position at = now().at;
    ExprPtr first = sum();
    ExprPtr all;
    while (true) {
      std::string op;
      if (now().kind == Kind::op && std::find(kOps.begin(), kOps.end(), now().text) != kOps.end()) {
        op = take().text;
      } else if (skip_name("in")) {
        op = "in";
      } else if (is_name("not") && ahead().kind == Kind::name && ahead().text == "in") {
        take(), take();
        op = "not in";
      } else {
        return all ? std::move(all) : std::move(first);
      }
      if (!all) all = node(Expr::Kind::compare, at, {}, std::move(first));
      all->ops.push_back(std::move(op));
      adopt(*all, sum());
    }
  }
  // A chain of binary operators of one precedence, from the left.
  template <typename Next>
  ExprPtr chain(std::initializer_list<std::string_view> ops, Next next) {
    ExprPtr e = next();
    while (now().kind == Kind::op && std::find(ops.begin(), ops.end(), now().text) != ops.end()) {
      const Token& op = take();
      e = node(Expr::Kind::binary, op.at, op.text, std::move(e), next());
    }
    return e;
  }
  ExprPtr sum() {
    return chain({"+", "-"}, [&] {
      return chain({"~"}, [&] {
        return chain({"*", "/", "//", "%"}, [&] { return chain({"**"}, [&] { return unary(true); }); });
      });
    });
  }
  ExprPtr unary(bool with_filter) {
    const Deeper deeper(*this);
    ExprPtr e;
    if (is_op("-") || is_op("+")) {
      const Token& op = take();
      e = node(Expr::Kind::unary, op.at, op.text, unary(false));
    } else {
      e = primary();
    }
    e = postfix(std::move(e));
    return with_filter ? filters(std::move(e), false) : std::move(e);
  }

  ExprPtr primary() {
    const Token& t = now();
    switch (t.kind) {
      case Kind::name: {
        take();
        if (t.text == "true" || t.text == "True") return constant(t.at, true);
        if (t.text == "false" || t.text == "False") return constant(t.at, false);
        if (t.text == "none" || t.text == "None") return constant(t.at, nullptr);
        note_use(t.text);
        return make(Expr::Kind::name, t.at, t.text);
      }
      case Kind::string: {
        std::string text;
        while (now().kind == Kind::string) text += take().text;
        return constant(t.at, std::move(text));
      }
      case Kind::integer:
      case Kind::real:
        take();
        return number(t);
      default:
        break;
    }
    if (skip_op("(")) {
      if (skip_op(")")) return make(Expr::Kind::list, t.at);
      ExprPtr e = tuple();
      expect_op(")");
      return e;
    }
    if (skip_op("[")) {
      ExprPtr e = make(Expr::Kind::list, t.at);
      while (!is_op("]")) {
        adopt(*e, expression());
        if (!skip_op(",")) break;
      }
      expect_op("]");
      return e;
    }
    if (skip_op("{")) {
      ExprPtr e = make(Expr::Kind::dict, t.at);
      while (!is_op("}")) {
        adopt(*e, expression());
        expect_op(":");
        adopt(*e, expression());
        if (!skip_op(",")) break;
      }
      expect_op("}");
      return e;
    }
    expected("an expression");
  }

  static ExprPtr number(const Token& t) {
    if (t.kind == Kind::real) return constant(t.at, std::strtod(t.text.c_str(), nullptr));
    int64_t value = 0;
    const auto [end, error] = std::from_chars(t.text.data(), t.text.data() + t.text.size(), value);
    if (error != std::errc() || end != t.text.data() + t.text.size())
      fail_at(t.at, "the number " + t.text + " is too large");
    return constant(t.at, value);
  }

  ExprPtr postfix(ExprPtr e) {
    while (true) {
      const Position at = now().at;
      if (skip_op(".")) {
        if (now().kind == Kind::integer) {
          e = node(Expr::Kind::item, at, {}, std::move(e), number(take()));
        } else {
          e = node(Expr::Kind::attribute, at, expect_name(), std::move(e));
        }
      } else if (skip_op("[")) {
        e = subscript(std::move(e), at);
      } else if (is_op("(")) {
        e = called(std::move(e));
      } else {
        return e;
      }
    }
  }
  ExprPtr subscript(ExprPtr e, Position at) {
    std::array<ExprPtr, 3> parts;
    size_t n = 0;
    bool slice = false;
    while (true) {
      if (!is_op(":") && !is_op("]")) parts[n] = expression();
      if (!is_op(":") || n == 2) break;
      take();
      slice = true, ++n;
    }
    if (!slice && !parts[0]) expected("an index");
    expect_op("]");
    if (!slice) return node(Expr::Kind::item, at, {}, std::move(e), std::move(parts[0]));
    return node(Expr::Kind::slice, at, {}, std::move(e), std::move(parts[0]), std::move(parts[1]), std::move(parts[2]));
  }
  ExprPtr called(ExprPtr callee) {
    const Position at = now().at;
    ExprPtr e = node(Expr::Kind::call, at, {}, std::move(callee));
    arguments(e->call);
    return e;
  }
  void arguments(Call& call) {
    expect_op("(");
    while (!is_op(")")) {
      if (skip_op("**")) {
        call.dict = expression();
      } else if (skip_op("*")) {
        call.list = expression();
      } else if (now().kind == Kind::name && ahead().kind == Kind::op && ahead().text == "=") {
        std::string name = take().text;
        take();
        call.named.emplace_back(std::move(name), expression());
      } else {
        if (!call.named.empty()) fail_at(now().at, "a positional argument behind a named one");
        call.positional.push_back(expression());
      }
      if (!skip_op(",")) break;
    }
    expect_op(")");
  }

  std::string dotted_name() {
    std::string name = expect_name();
    while (skip_op(".")) name += "." + expect_name();
    return name;
  }

  // Filters, tests and calls behind an expression. `inline_first`: a filter's name stands here without its "|".
  ExprPtr filters(ExprPtr e, bool inline_first) {
    while (true) {
      const Position at = now().at;
      if (inline_first || skip_op("|")) {
        inline_first = false;
        e = node(Expr::Kind::filter, at, dotted_name(), std::move(e));
        if (is_op("(")) arguments(e->call);
      } else if (e && skip_name("is")) {
        e = test(std::move(e), at);
      } else if (e && is_op("(")) {
        e = called(std::move(e));
      } else {
        return e;
      }
    }
  }
  ExprPtr test(ExprPtr e, Position at) {
    const bool negated = skip_name("not");
    ExprPtr result = node(Expr::Kind::test, at, dotted_name(), std::move(e));
    const bool word = now().kind == Kind::name && !is_name("else") && !is_name("or") && !is_name("and") &&
                      !is_name("is") && !is_name("if") && !is_name("not") && !is_name("in") && !is_name("recursive");
    const bool literal = now().kind == Kind::string || now().kind == Kind::integer || now().kind == Kind::real;
    if (is_op("(")) {
      arguments(result->call);
    } else if (word || literal || is_op("[") || is_op("{")) {
      result->call.positional.push_back(postfix(primary()));
    }
    return negated ? node(Expr::Kind::unary, at, "not", std::move(result)) : std::move(result);
  }

  std::vector<Token> tokens_;
  size_t i_ = 0;
  int depth_ = 0, loops_ = 0;
  std::vector<Macro> macros_;  // around what is read, the innermost last
};

}  // namespace hearth::text::jinja
