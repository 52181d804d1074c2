"""Conversations as text, by the chat template that a tokenizer comes with."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

from qwen3next.errors import InputError, require
from qwen3next.structure import read_json

SETTINGS, TEMPLATE = "tokenizer_config.json", "chat_template.jinja"
Message = dict[str, Any]


def _refuse(message: str) -> NoReturn:
    """What templates call `raise_exception`."""
    raise jinja2.TemplateError(message)


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """As Hugging Face's templates mean it: Jinja's own filter escapes HTML."""
    return json.dumps(value, **{"ensure_ascii": False, "indent": indent, **options})


class _Generation(jinja2.ext.Extension):
    """`{% generation %}`, by which some templates mark a reply: what stands in it is text like any other."""

    tags = {"generation"}  # noqa: RUF012 # jinja2's way

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A Jinja template of messages, run in a sandbox with what Hugging Face's templates count on.

    There is no `strftime_now`: text that changes overnight is another text. Templates then write a date of their own.
    """

    def __init__(self, source: str, tokens: dict[str, str]):
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template is not a Jinja template ({error})") from error
        self._tokens = tokens

    @classmethod
    def beside(cls, tokenizer: str) -> "ChatTemplate":
        """The template of the `tokenizer_config.json`, or the `chat_template.jinja`, in a `tokenizer.json`'s folder."""
        folder = Path(tokenizer).parent
        here = tokenizer != "bytes" and (folder / SETTINGS).is_file()
        require(
            here,
            f"data.messages_field needs a chat template; there is no {SETTINGS} beside data.tokenizer {tokenizer!r}",
        )
        settings, separate = read_json(folder / SETTINGS), folder / TEMPLATE
        try:
            template: Any = separate.read_text("utf-8") if separate.is_file() else settings.get("chat_template")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{separate} cannot be read ({error})") from error
        if isinstance(template, list):  # several by name
            named = [entry for entry in template if isinstance(entry, dict) and entry.get("name") == "default"]
            template = named[0].get("template") if named else None
        require(isinstance(template, str), f"{folder / SETTINGS} has no chat_template, which data.messages_field needs")
        tokens = {}
        for name, value in settings.items():
            value = value.get("content") if isinstance(value, dict) else value
            if name.endswith("_token") and isinstance(value, str):
                tokens[name] = value
        try:
            return cls(str(template), tokens)
        except InputError as error:
            raise InputError(f"{folder / SETTINGS}: {error}") from error

    def _render(self, messages: Sequence[Message], tools: Any = None, reply: bool = False) -> str:
        given = {"messages": list(messages), "tools": tools, "documents": None, "add_generation_prompt": reply}
        try:
            return self._template.render(**self._tokens, **given)
        except Exception as error:  # whatever the template's author left out
            raise InputError(f"the chat template refuses the messages ({error})") from error

    def parts(
        self, messages: Sequence[Message], learnt_roles: Sequence[str], tools: Any = None
    ) -> list[tuple[str, bool]]:
        """The conversation in pieces, each with whether it is learnt: what a message of `learnt_roles` adds.

        What the template opens a reply with is read, not learnt, as a model that is asked for one finds it there.
        Raises `InputError` if a learnt message changes what stands before it, so that its own part cannot be told.
        """
        whole, done, parts = self._render(messages, tools), 0, []
        for at, message in enumerate(messages):
            if message["role"] not in learnt_roles:
                continue
            opened, closed = (self._render(messages[:end], tools, reply=end == at) for end in (at, at + 1))
            if not closed.startswith(opened):  # what opens a reply does not open this role's message
                opened = self._render(messages[:at], tools)
            same = whole.startswith(closed) and closed.startswith(opened) and len(opened) >= done
            require(same, f"the chat template writes message {at + 1} differently once others follow; drop that")
            parts += [(whole[done : len(opened)], False), (whole[len(opened) : len(closed)], True)]
            done = len(closed)
        parts.append((whole[done:], False))
        return [(text, learnt) for text, learnt in parts if text]
