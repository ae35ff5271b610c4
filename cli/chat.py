"""``colibri chat``: a conversation in the terminal; attaches to the running group or starts one.

Works with a terminal and with pipes (one line = one turn). Commands like /reset are for a person at a terminal: from a pipe
a line is text, whatever it begins with. Ctrl-C stops the answer, not the program.
"""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
from typing import Any

import click

from cli.client import open_session
from cli.options import MODEL, RUN_DIR, SEED, TEMPERATURE, TOP_P, URL
from cli.prompt import clean_text
from shared.run.client import Answer, Client, ServerError
from shared.run.terminal import can_show, complain, is_terminal, say, write
from shared.steering import shown_line

HELP = """/help            this list
/reset           forget the conversation
/system [TEXT]   forget the conversation and set (or drop) the instruction before it
/seed [N]        same seed, same text; without N a new one is drawn for each answer
/temp [T]        temperature; 0 takes the likeliest token; without T the default
/stats           numbers of the last answer
/quit            leave (so does Ctrl-D)
Ctrl-C stops an answer. A line that ends with a backslash goes on."""


@dataclass(slots=True)
class Conversation:
    """Messages so far and how to go on."""

    options: dict[str, Any]
    messages: list[dict[str, str]] = field(default_factory=list)
    last: Answer | None = None

    def body(self) -> dict[str, Any]:
        return {"messages": self.messages, **{key: value for key, value in self.options.items() if value is not None}}

    def reset(self, system: str | None) -> None:
        self.messages = [{"role": "system", "content": system}] if system else []

    @property
    def system(self) -> str | None:
        return self.messages[0]["content"] if self.messages and self.messages[0]["role"] == "system" else None


@click.command("chat")
@click.option("--system", metavar="TEXT", help="Instruction put before the conversation.")
@click.option(
    "--max-tokens", type=click.IntRange(min=1), metavar="N", help="Stop each answer after N tokens at the latest."
)
@click.option("--temperature", type=TEMPERATURE, metavar="T", help="0 takes the likeliest token; default: the model's.")
@click.option("--top-p", type=TOP_P, metavar="P", help="Sample among the likeliest tokens that make up P.")
@click.option("--seed", type=SEED, metavar="N", help="Same seed, same text.")
@MODEL
@URL
@RUN_DIR
def command(
    system: str | None, max_tokens: int | None, temperature: float | None, top_p: float | None, seed: int | None,
    model: str | None, url: str | None, run_dir: str | None,
) -> int:  # fmt: skip
    """Talk to the model."""
    options = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    conversation = Conversation(options)
    conversation.reset(clean_text(system) if system else None)
    if sys.stdin is None:
        raise click.UsageError("chat reads what you say from standard input, which is closed")
    is_person = is_terminal(sys.stdin)
    has_marks = is_person and is_terminal(sys.stdout)
    with open_session(url, run_dir, model) as session:
        if has_marks:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  (line editing and history for input())
            say(f"Talking to {shown_line(_model_name(session.client))}. /help lists commands, Ctrl-D leaves.")
        return _loop(session.client, conversation, is_person, has_marks)


def _model_name(client: Client) -> str:
    status, body = client.get("/v1/models")
    models = body.get("data", []) if status == 200 and isinstance(body, dict) else []
    return str(models[0].get("id")) if models else client.url


def _loop(client: Client, conversation: Conversation, is_person: bool, has_marks: bool) -> int:
    """Reads turns until the end of input. Returns 1 when a piped conversation had an answer that failed.

    ``is_person``: the input is a terminal's; ``has_marks``: and so is the output.
    """
    mark = ("› " if can_show("› ") else "> ") if has_marks else ""
    n_failed = 0
    while True:
        try:
            line = _read_turn(mark)
        except EOFError:
            if has_marks:
                say()
            return 1 if n_failed and not is_person else 0
        except KeyboardInterrupt:
            if not is_person:
                raise
            say("\n(Ctrl-D or /quit leaves)")
            continue
        if not line.strip():
            continue
        if is_person and line.startswith("/"):
            if _obey(line, conversation):
                return 0
            continue
        n_failed += not _answer(client, conversation, line)


def _read_turn(mark: str) -> str:
    """One line, or several when they end with a backslash."""
    parts: list[str] = []
    while True:
        if mark:
            line = input(mark)
        else:
            line = sys.stdin.readline()
            if not line:
                if parts:
                    return clean_text("\n".join(parts))
                raise EOFError
            line = line.rstrip("\r\n")
        if not line.endswith("\\"):
            return clean_text("\n".join([*parts, line]))
        parts.append(line[:-1])


def _answer(client: Client, conversation: Conversation, text: str) -> bool:
    """One turn. A turn that failed leaves no trace in the conversation; one that was stopped keeps what was said."""
    conversation.messages.append({"role": "user", "content": text})
    answer = Answer()
    is_stopped = False
    try:
        stream = client.stream("/v1/chat/completions", conversation.body(), answer)
        try:
            for piece in stream:
                write(piece)
        except KeyboardInterrupt:
            is_stopped = True
        finally:
            stream.close()  # closes the connection: the server stops working for us
    except ServerError as error:
        if answer.text:
            write("\n")
        complain(f"error: {error}")
        conversation.messages.pop()
        return False
    write(" [stopped]\n" if is_stopped else "\n")
    conversation.last = answer
    if answer.text:
        conversation.messages.append({"role": "assistant", "content": answer.text})
    else:
        conversation.messages.pop()
    return True


def _obey(line: str, conversation: Conversation) -> bool:
    """A command; True = leave."""
    name, _, value = line[1:].strip().partition(" ")
    value = value.strip()
    if name in ("quit", "exit", "q"):
        return True
    if name in ("help", "?"):
        say(HELP)
    elif name == "reset":
        conversation.reset(conversation.system)
        say("(forgotten)")
    elif name == "system":
        conversation.reset(value or None)
        say("(forgotten; instruction set)" if value else "(forgotten; no instruction)")
    elif name in ("seed", "temp"):
        kinds: dict[str, tuple[str, Any]] = {"seed": ("seed", SEED), "temp": ("temperature", TEMPERATURE)}
        key, kind = kinds[name]
        try:
            conversation.options[key] = kind.convert(value, None, None) if value else None
        except click.BadParameter as error:
            complain(f"/{name}: {error.message} Nothing was changed.")
    elif name == "stats":
        say(conversation.last.summary() if conversation.last else "nothing was answered yet")
    else:
        complain(f"there is no /{name}; /help lists commands. (To send such a line, put a blank before it.)")
    return False
