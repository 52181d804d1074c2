"""Chat templates: what a conversation becomes, and which of it is learnt."""

import json

import pytest
from folders import one_line

from qwen3next.data.chat import ChatTemplate
from qwen3next.errors import InputError

CHATML = """{%- for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
        {{- raise_exception('unknown role ' + message.role) }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4"},
]


def _template(source=CHATML, **tokens):
    return ChatTemplate(source, tokens)


def test_what_the_assistant_says_is_learnt_and_its_opening_is_read():
    assert _template().parts(TALK, ["assistant"]) == [
        ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n", False),
        ("2<|im_end|>\n", True),
        ("<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("4<|im_end|>\n", True),
    ]


def test_other_roles_can_be_learnt():
    parts = _template().parts(TALK, ["user", "system"])
    assert [text for text, learnt in parts if learnt] == [
        "<|im_start|>system\nBe brief.<|im_end|>\n",
        "<|im_start|>user\n1+1?<|im_end|>\n",
        "<|im_start|>user\n2+2?<|im_end|>\n",
    ]
    assert _template().parts(TALK, ["tool"]) == [(_template()._render(TALK), False)]


def test_the_parts_are_the_conversation():
    for roles in (["assistant"], ["user"], ["assistant", "user", "system"]):
        assert "".join(text for text, _ in _template().parts(TALK, roles)) == _template()._render(TALK)


def test_a_template_has_what_the_published_ones_count_on():
    source = """{% for m in messages %}{% if m.role == 'tool' %}{% continue %}{% endif %}
    {%- set ns = namespace(x=loop.index0) %}
{{ bos_token }}{{ m | tojson }}{% generation %}{{ ns.x }}{% endgeneration %}
{% endfor %}{{ strftime_now is defined }}{{ tools }}{{ tools_defined is defined }}"""
    rendered = _template(source, bos_token="<s>")._render([{"role": "user", "content": "é<"}, {"role": "tool"}])
    assert rendered == '<s>{"role": "user", "content": "é<"}0FalseNoneFalse'


def test_a_message_that_changes_once_others_follow_is_refused():
    """As templates do that drop what was thought in earlier turns."""
    source = "{% for m in messages %}{{ m.content if loop.last else m.content[:1] }};{% endfor %}"
    with pytest.raises(InputError, match="writes message 3 differently once others follow") as error:
        _template(source).parts([*TALK[:2], {"role": "assistant", "content": "long"}, *TALK[3:]], ["assistant"])
    one_line(error)


def test_what_a_template_refuses_is_told():
    with pytest.raises(InputError, match=r"refuses the messages \(unknown role pope\)"):
        _template().parts([{"role": "pope", "content": "x"}], ["assistant"])
    with pytest.raises(InputError, match=r"refuses the messages .*content"):
        _template().parts([{"role": "user"}], ["assistant"])
    with pytest.raises(InputError, match="refuses the messages"):  # the sandbox
        _template("{{ messages.append(1) }}").parts(TALK, ["assistant"])


def test_the_template_beside_a_tokenizer(tmp_path):
    tokenizer, settings = str(tmp_path / "tokenizer.json"), tmp_path / "tokenizer_config.json"
    with pytest.raises(InputError, match=r"no tokenizer_config\.json beside data\.tokenizer"):
        ChatTemplate.beside(tokenizer)
    with pytest.raises(InputError, match=r"no tokenizer_config\.json beside data\.tokenizer 'bytes'"):
        ChatTemplate.beside("bytes")
    for values in ({}, {"chat_template": [{"name": "tools", "template": "x"}]}, {"chat_template": ["x"]}):
        settings.write_text(json.dumps(values))
        with pytest.raises(InputError, match="has no chat_template"):
            ChatTemplate.beside(tokenizer)
    settings.write_text(json.dumps({"chat_template": "{% if %}"}))
    with pytest.raises(InputError, match=r"tokenizer_config\.json: .*not a Jinja template") as error:
        ChatTemplate.beside(tokenizer)
    one_line(error)
    named = [{"name": "tools", "template": "x"}, {"name": "default", "template": "{{ bos_token }}{{ eos_token }}"}]
    values = {
        "chat_template": named,
        "bos_token": {"content": "B", "lstrip": False},
        "eos_token": "E",
        "pad_token": None,
    }
    settings.write_text(json.dumps(values))
    assert ChatTemplate.beside(tokenizer).parts(TALK, ["tool"]) == [("BE", False)]
    (tmp_path / "chat_template.jinja").write_text("apart{{ eos_token }}")
    assert ChatTemplate.beside(tokenizer).parts(TALK, ["tool"]) == [("apartE", False)]
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(InputError, match=r"chat_template\.jinja cannot be read"):
        ChatTemplate.beside(tokenizer)
