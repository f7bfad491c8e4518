"""Chat templates of the kinds that models have, for the room's tests."""

from __future__ import annotations

# Qwen3's kind: thoughts of earlier turns are left out, arguments as text or as an object, results as a user's turn.
QWEN = """{%- macro turn(role, text) %}{{ '<|im_start|>' + role + '\\n' + text + '<|im_end|>\\n' }}{% endmacro %}
{%- if tools %}{{ turn('system', (tools | tojson)) }}{% endif %}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
{%- set content = m.content if m.content is string else '' %}
{%- if m.role == 'assistant' %}
  {%- set text = namespace(all=content) %}
  {%- if m.reasoning_content and loop.index0 > ns.last %}
    {%- set text.all = '<think>\\n' + m.reasoning_content + '\\n</think>\\n\\n' + content %}
  {%- endif %}
  {%- for call in m.tool_calls or [] %}
    {%- set f = call.function or call %}
    {%- set arguments = f.arguments if f.arguments is string else f.arguments | tojson %}
    {%- set text.all = text.all + '<tool_call>' + f.name + ' ' + arguments + '</tool_call>' %}
  {%- endfor %}
{{- turn('assistant', text.all) }}
{%- elif m.role == 'tool' %}
{{- turn('user', '<tool_response>' + content + '</tool_response>') }}
{%- else %}
{{- turn(m.role, content) }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"""

# GLM's kind: arguments must be an object.
GLM = QWEN.replace(
    "{%- set arguments = f.arguments if f.arguments is string else f.arguments | tojson %}",
    "{%- set a = namespace(all='') %}"
    "{%- for k, v in f.arguments.items() %}{% set a.all = a.all + k + '=' + v | string %}{% endfor %}"
    "{%- set arguments = a.all %}",
)
# Llama's kind: whatever the arguments are, they are written as JSON.
LLAMA = QWEN.replace("f.arguments if f.arguments is string else f.arguments | tojson", "f.arguments | tojson")

DATED = "{{ 'Today is ' + strftime_now('%d %B %Y') + '\\n' }}" + QWEN

PLAIN = """{% for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
