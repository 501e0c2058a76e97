#!/usr/bin/env python3
"""Records what Python's jinja2, set as transformers sets it, makes of published chat templates and of single features.

  python3 make_vectors.py [FOLDER of *.jinja]     (jinja2 3.1.6; the templates are copied from the folder first, where one is given)

vectors.json: "conversations" by name; "cases": [template, conversation, text or null where jinja2 refuses];
"features": [source, text or null]. The clock of strftime_now() stands at `now`, UTC. README.md says where the templates come from.
"""
import datetime
import json
import pathlib
import shutil
import sys

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

HERE = pathlib.Path(__file__).parent
NOW = 1767254400  # 2026-01-01 08:00 UTC


class Generation(jinja2.ext.Extension):
    """The part of transformers' AssistantTracker that changes no text."""
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_same"), [], [], body).set_lineno(line)

    def _same(self, caller):
        return caller()


def environment():
    def refuse(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = refuse
    env.globals["strftime_now"] = lambda f: datetime.datetime.fromtimestamp(NOW, datetime.timezone.utc).strftime(f)
    return env


WEATHER = {"type": "function", "function": {
    "name": "weather", "description": "The weather \"there\" – now & later.",
    "parameters": {"type": "object", "properties": {
        "city": {"type": "string", "description": "Name of a <city>"},
        "days": {"type": "integer", "description": "How many", "enum": [1, 2, 7]},
        "metric": {"type": "boolean", "default": True}}, "required": ["city"]}}}
NOTHING = {"type": "function", "function": {"name": "nothing", "description": "Does nothing.",
                                            "parameters": {"type": "object", "properties": {}}}}
TURNS = [{"role": "user", "content": "Who are you? "}, {"role": "assistant", "content": " A hearth.\n"},
         {"role": "user", "content": "Warm\nor cold?"}]
CALLED = [{"role": "user", "content": "Weather in Zürich?"},
          {"role": "assistant", "content": "", "tool_calls": [
              {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}}]},
          {"role": "tool", "tool_call_id": "call00001", "name": "weather", "content": "{\"sky\": \"grey\"}"},
          {"role": "assistant", "content": "Grey."}, {"role": "user", "content": "Thanks!"}]
SYSTEM = [{"role": "system", "content": " Be brief.\n"}]
CONVERSATIONS = {
    "one": {"messages": TURNS[:1], "add_generation_prompt": True},
    "turns": {"messages": TURNS, "add_generation_prompt": True},
    "system": {"messages": SYSTEM + TURNS, "add_generation_prompt": True},
    "answered": {"messages": SYSTEM + TURNS[:2], "add_generation_prompt": False},
    "unicode": {"messages": [{"role": "user", "content": "  naïve 火 🔥 'a' \"b\" <think>x</think> {{ y }} {% z %}\t"}],
                "add_generation_prompt": True},
    "thought": {"messages": [TURNS[0], {"role": "assistant", "content": "<think>\nhm\n</think>\n\nA hearth.",
                                        "reasoning_content": "hm"}, TURNS[2]], "add_generation_prompt": True},
    "no_thinking": {"messages": SYSTEM + TURNS[:1], "add_generation_prompt": True, "enable_thinking": False, "thinking": False,
                    "reasoning_effort": "low"},
    "tools": {"messages": TURNS[:1], "tools": [WEATHER, NOTHING], "add_generation_prompt": True},
    "called": {"messages": SYSTEM + CALLED[:3], "tools": [WEATHER], "add_generation_prompt": True},
    "called_twice": {"messages": CALLED, "tools": [WEATHER], "add_generation_prompt": True},
    "parts": {"messages": [{"role": "user", "content": [{"type": "text", "text": "One "}, {"type": "text", "text": "two"}]}],
              "add_generation_prompt": True},
    "wrong_order": {"messages": [TURNS[1], TURNS[1]], "add_generation_prompt": True},
    "unknown_role": {"messages": [{"role": "robot", "content": "hi"}], "add_generation_prompt": True},
}

FEATURES = [line for line in (HERE / "features.txt").read_text().split("\n====\n") if line]


def render(env, source, variables):
    try:
        text = env.from_string(source).render(**variables)
        return text if isinstance(text, str) else None
    except Exception:  # whatever Python says, it is no prompt
        return None


def main():
    if len(sys.argv) > 1:
        for path in sorted(pathlib.Path(sys.argv[1]).glob("*.jinja")):
            shutil.copy(path, HERE / path.name)
    env = environment()
    cases = []
    for path in sorted(HERE.glob("*.jinja")):
        for name, conversation in CONVERSATIONS.items():
            variables = {"tools": None, "documents": None, "bos_token": "<s>", "eos_token": "</s>"} | conversation
            cases.append([path.name, name, render(env, path.read_text(), variables)])
    features = [[source, render(env, source, {"messages": SYSTEM + CALLED, "tools": [WEATHER], "name": "Grüße, Welt",
                                              "number": 7, "nothing": None})] for source in FEATURES]
    with open(HERE / "vectors.json", "w") as out:
        out.write('{"now": %d,\n"conversations": %s,\n"cases": [\n%s\n],\n"features": [\n%s\n]}\n' % (
            NOW, json.dumps(CONVERSATIONS, ensure_ascii=False),
            ",\n".join(json.dumps(c, ensure_ascii=False) for c in cases),
            ",\n".join(json.dumps(f, ensure_ascii=False) for f in features)))


if __name__ == "__main__":
    main()
