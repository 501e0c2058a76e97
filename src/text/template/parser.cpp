// Jinja2's statements, as far as chat templates use them.
#include <algorithm>
#include <utility>

#include "text/template/expressions.h"

namespace hearth::text::jinja {
namespace {

class Parser : ExpressionParser {
 public:
  using ExpressionParser::ExpressionParser;

  Body run() {
    Body body = statements({});
    if (now().kind != Kind::end) fail_at(now().at, "'" + now().text + "' ends nothing here");
    return body;
  }

 private:
  // Up to a tag {% NAME of `ends`, whose name is left to the caller; or to the end.
  Body statements(std::initializer_list<std::string_view> ends) {
    const Deeper deeper(*this);
    Body body;
    while (now().kind != Kind::end) {
      const Position at = now().at;
      if (now().kind == Kind::text) {
        body.push_back(statement_of(Stmt::Kind::text, at, take().text));
      } else if (now().kind == Kind::print_begin) {
        take();
        body.push_back(statement_of(Stmt::Kind::print, at));
        body.back().exprs.push_back(tuple());
        if (now().kind != Kind::print_end) expected("'}}'");
        take();
      } else {
        take();
        if (now().kind != Kind::name) expected("a tag's name");
        if (std::find(ends.begin(), ends.end(), now().text) != ends.end()) return body;
        body.push_back(statement(at));
      }
    }
    if (ends.size() > 0) fail_at(now().at, "'{% " + std::string(*(ends.end() - 1)) + " %}' is missing");
    return body;
  }
  // The same, and takes the end's tag.
  Body block_until(std::string_view end) {
    expect_block_end();
    Body body = statements({end});
    take();
    expect_block_end();
    return body;
  }

  static Stmt statement_of(Stmt::Kind kind, Position at, std::string name = {}) {
    Stmt s;
    s.kind = kind, s.at = at, s.name = std::move(name);
    return s;
  }

  Stmt statement(Position at) {
    const std::string tag = take().text;
    if (tag == "if") return if_statement(at);
    if (tag == "for") return for_statement(at);
    if (tag == "set") return set_statement(at);
    if (tag == "macro") return macro_statement(at);
    if (tag == "call") return call_statement(at);
    if (tag == "filter") {
      Stmt s = statement_of(Stmt::Kind::filter, at);
      s.exprs.push_back(filters(nullptr, true));
      s.bodies.push_back(block_until("endfilter"));
      return s;
    }
    if (tag == "with") return with_statement(at);
    if (tag == "generation") {  // transformers' mark of what the assistant said
      Stmt s = statement_of(Stmt::Kind::block, at);
      s.bodies.push_back(block_until("endgeneration"));
      return s;
    }
    if (tag == "break" || tag == "continue") {
      if (loops_ == 0) fail_at(at, "'" + tag + "' stands in no loop");
      expect_block_end();
      return statement_of(tag == "break" ? Stmt::Kind::break_ : Stmt::Kind::continue_, at);
    }
    fail_at(at, "the tag '" + tag + "' is not one that chat templates have");
  }

  Stmt if_statement(Position at) {
    Stmt s = statement_of(Stmt::Kind::if_, at);
    s.exprs.push_back(tuple(false));
    expect_block_end();
    s.bodies.push_back(statements({"elif", "else", "endif"}));
    s.bodies.emplace_back();
    const Position next = now().at;
    const std::string tag = take().text;
    if (tag == "elif") {
      const Deeper deeper(*this);
      s.bodies[1].push_back(if_statement(next));  // takes the endif
      return s;
    }
    if (tag == "else") {
      expect_block_end();
      s.bodies[1] = statements({"endif"});
      take();
    }
    expect_block_end();
    return s;
  }

  Stmt for_statement(Position at) {
    Stmt s = statement_of(Stmt::Kind::for_, at);
    targets(s);
    if (!skip_name("in")) expected("'in'");
    s.exprs.push_back(tuple(false));
    s.exprs.push_back(skip_name("if") ? expression() : nullptr);
    s.recursive = skip_name("recursive");
    expect_block_end();
    ++loops_;
    s.bodies.push_back(statements({"else", "endfor"}));
    --loops_;
    s.bodies.emplace_back();
    if (take().text == "else") {
      expect_block_end();
      s.bodies[1] = statements({"endfor"});
      take();
    }
    expect_block_end();
    return s;
  }

  // name, name.attribute, or several with commas, also in brackets.
  void targets(Stmt& s) {
    const bool bracket = skip_op("(");
    do {
      if (!s.targets.empty() && (is_op(")") || is_name("in") || is_op("="))) break;
      std::string name = expect_name();
      if (s.kind == Stmt::Kind::set && skip_op(".")) {
        name += "." + expect_name();
      } else {
        note_target(name);
      }
      s.targets.push_back(std::move(name));
      s.unpacks = s.unpacks || is_op(",");
    } while (skip_op(","));
    if (bracket) expect_op(")");
  }

  Stmt set_statement(Position at) {
    Stmt s = statement_of(Stmt::Kind::set, at);
    targets(s);
    if (skip_op("=")) {
      s.exprs.push_back(tuple());
      expect_block_end();
      return s;
    }
    if (s.unpacks) expected("'='");
    s.kind = Stmt::Kind::set_block;
    s.exprs.push_back(is_op("|") ? filters(nullptr, false) : nullptr);
    s.bodies.push_back(block_until("endset"));
    return s;
  }

  void parameters(Stmt& s) {
    expect_op("(");
    while (!is_op(")")) {
      std::string name = expect_name();
      note_target(name);
      s.parameters.emplace_back(std::move(name), skip_op("=") ? expression() : nullptr);
      if (!skip_op(",")) break;
    }
    expect_op(")");
  }

  Stmt macro_statement(Position at) {
    Stmt s = statement_of(Stmt::Kind::macro, at, expect_name());
    macros_.emplace_back();
    parameters(s);
    s.bodies.push_back(outside_loops("endmacro"));
    s.implicit = end_of_macro();
    return s;
  }
  Stmt call_statement(Position at) {
    Stmt s = statement_of(Stmt::Kind::call, at);
    macros_.emplace_back();
    if (is_op("(")) parameters(s);
    const Macro block = std::move(macros_.back());
    macros_.pop_back();
    s.exprs.push_back(expression());  // what is called is no part of the block
    if (s.exprs[0]->kind != Expr::Kind::call) fail_at(at, "expected a call behind 'call'");
    macros_.push_back(block);
    s.bodies.push_back(outside_loops("endcall"));
    s.implicit = end_of_macro();
    return s;
  }
  ImplicitNames end_of_macro() {
    const ImplicitNames used = macros_.back().used;
    macros_.pop_back();
    return used;
  }
  Body outside_loops(std::string_view end) {
    const int loops = std::exchange(loops_, 0);
    Body body = block_until(end);
    loops_ = loops;
    return body;
  }

  Stmt with_statement(Position at) {
    Stmt s = statement_of(Stmt::Kind::with, at);
    while (now().kind != Kind::block_end) {
      s.targets.push_back(expect_name());
      note_target(s.targets.back());
      expect_op("=");
      s.exprs.push_back(expression());
      if (!skip_op(",")) break;
    }
    s.bodies.push_back(block_until("endwith"));
    return s;
  }
};

}  // namespace

Body parse(std::string_view source) {
  return Parser(source).run();
}

}  // namespace hearth::text::jinja
