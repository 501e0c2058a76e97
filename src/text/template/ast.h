#pragma once
// A template as a tree.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "text/template/lexer.h"
#include "text/template/value.h"

namespace hearth::text::jinja {

struct Expr;
using ExprPtr = std::unique_ptr<Expr>;

struct Call {
  std::vector<ExprPtr> positional;
  std::vector<std::pair<std::string, ExprPtr>> named;
  ExprPtr list, dict;  // *list, **dict
};

struct Expr {
  enum class Kind {
    constant,   // value
    name,       // name
    list,       // args
    dict,       // args: key, value, key, value, …
    attribute,  // args[0].name
    item,       // args[0][args[1]]
    slice,      // args[0][args[1]:args[2]:args[3]], each of the last three may be null
    call,       // args[0](call)
    filter,     // args[0] | name(call)
    test,       // args[0] is name(call)
    unary,      // name: "-", "+", "not"
    binary,     // name: the operator, also "and", "or", "~"
    compare,    // args[0] ops[0] args[1] ops[1] args[2] …
    condition,  // args[1] if args[0] else args[2], which may be null
  };
  Kind kind;
  Position at;
  std::string name;
  Value value;
  std::vector<ExprPtr> args;
  std::vector<std::string> ops;
  Call call;
  int depth = 1;  // of expressions inside each other
};

// Names that a macro may use without a parameter of that name; one that it does not use it does not take, as in Jinja2.
struct ImplicitNames {
  bool varargs = false, kwargs = false, caller = false;
};

struct Stmt;
using Body = std::vector<Stmt>;

struct Stmt {
  enum class Kind { text, print, if_, for_, set, set_block, macro, call, filter, with, block, break_, continue_ };
  Kind kind;
  Position at;
  std::string name;                  // text; set_block, macro: the name
  std::vector<std::string> targets;  // for_, set: names; of set also "ns.name"
  bool unpacks = false;              // more than one target
  std::vector<ExprPtr> exprs;        // print, set, if_, for_: [0]; for_ also [1], its `if`; with: values
  std::vector<std::pair<std::string, ExprPtr>> parameters;  // macro, call
  std::vector<Body> bodies;                                 // if_: then, else; for_: body, else; others: [0]
  bool recursive = false;
  ImplicitNames implicit;  // macro, call: those that the body uses
};

// Throws Error with line and column.
Body parse(std::string_view source);

}  // namespace hearth::text::jinja
