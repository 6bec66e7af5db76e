"""Which parser a chat template asks for, by what the template writes around calls; vLLM's parsers of these names."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from jinja2 import Environment

from prime_rl.checks.chat_templates import parser_of_template
from prime_rl.inference.embedded.engine.text import TOOL_PARSERS

# How each family writes calls, in a short template of our own. `EACH` begins the loop over them.
FORMS = {
    "minimax_m2": '<minimax:tool_call>EACH<invoke name="{{ c.name }}">{% for k, v in c.arguments.items() %}'
    '<parameter name="{{ k }}">{{ v }}</parameter>{% endfor %}</invoke>\nEND</minimax:tool_call>',
    "kimi_k2": "<|tool_calls_section_begin|>EACH<|tool_call_begin|>functions.{{ c.name }}:{{ loop.index0 }}"
    "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>END<|tool_calls_section_end|>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>EACH<｜tool▁call▁begin｜>function<｜tool▁sep｜>{{ c.name }}\n```json\n"
    "{{ c.arguments | tojson }}\n```<｜tool▁call▁end｜>END<｜tool▁calls▁end｜>",
    "deepseek_v31": "<｜tool▁calls▁begin｜>EACH<｜tool▁call▁begin｜>{{ c.name }}<｜tool▁sep｜>"
    "{{ c.arguments | tojson }}<｜tool▁call▁end｜>END<｜tool▁calls▁end｜>",
    "glm45": "EACH<tool_call>{{ c.name }}\n{% for k, v in c.arguments.items() %}<arg_key>{{ k }}</arg_key>\n"
    "<arg_value>{{ v }}</arg_value>\n{% endfor %}</tool_call>END",
    "qwen3_coder": "EACH<tool_call>\n<function={{ c.name }}>\n{% for k, v in c.arguments.items() %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>END",
    "hermes": 'EACH<tool_call>\n{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}\n</tool_call>END',
    "mistral": '[TOOL_CALLS][EACH{"name": "{{ c.name }}", "arguments": {{ c.arguments | tojson }}}'
    "{{ ', ' if not loop.last }}END]",
    "llama3_json": '<|python_tag|>EACH{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{{ '; ' if not loop.last }}END",
}
CALLS = [{"name": "weather", "arguments": {"city": "Bonn"}}, {"name": "clock", "arguments": {"zone": "CET"}}]
SCRIPT = """
import json, sys
from vllm.tool_parsers import ToolParserManager

class Tokens:
    def get_vocab(self):
        names = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
        return {f"<｜tool▁{name}｜>": index for index, name in enumerate(names)}

names, deepseek = json.load(sys.stdin)
for name in names:
    ToolParserManager.get_tool_parser(name)  # raises for an unknown one
found = {}
for name, text in deepseek.items():
    read = ToolParserManager.get_tool_parser(name)(Tokens()).extract_tool_calls(text, None)
    calls = [{"name": c.function.name, "arguments": json.loads(c.function.arguments)} for c in read.tool_calls]
    found[name] = [read.content, calls]
print(json.dumps(found))
"""


def template(name: str) -> str:
    form = FORMS[name].replace("EACH", "{% for c in calls %}").replace("END", "{% endfor %}")
    return "{% if tools %}{{ tools | tojson }}{% endif %}" + form


def written(name: str, text: str = "") -> str:
    return text + Environment().from_string(template(name)).render(calls=CALLS)


@pytest.mark.parametrize("name", FORMS)
def test_a_template_that_writes_a_familys_calls_gets_its_parser(name: str) -> None:
    assert parser_of_template(template(name)) == name
    assert parser_of_template(FORMS[name].replace("tool", "t00l").replace("TOOL", "T00L")) is None


@pytest.mark.parametrize("name", sorted(FORMS.keys() & TOOL_PARSERS.keys()))
def test_the_embedded_engine_reads_back_what_the_template_writes(name: str) -> None:
    calls = TOOL_PARSERS[name].parse(written(name, "Let me see. ")).calls
    assert [{"name": call.name, "arguments": json.loads(call.arguments)} for call in calls] == CALLS


@pytest.mark.vllm
def test_vllm_has_every_parser_and_reads_both_deepseek_forms() -> None:
    python = os.environ.get("PRIME_RL_VLLM_PYTHON")
    if not python:
        pytest.skip("needs vLLM: name an interpreter that has it in PRIME_RL_VLLM_PYTHON")
    deepseek = {name: written(name, "Let me see. ") for name in ("deepseek_v3", "deepseek_v31")}
    given = json.dumps([list(FORMS), deepseek])
    done = subprocess.run([python, "-c", SCRIPT], input=given, stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert found == {name: ["Let me see. ", CALLS] for name in deepseek}
