"""What an answer looks like (``ChatShape``, ``CompletionShape``): a whole body, or the chunks of a stream. Pure.

No sockets, no clock of its own. Runs in the gateway.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import UNSET, Struct, UnsetType

from services.gateway.bodies import Wanted
from shared.messages.gateway import FinishReason, RequestAccepted, RequestDone, TokenLogprob, TokenOut


class Usage(Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


def usage_of(done: RequestDone) -> Usage:
    return Usage(done.n_prompt, done.n_generated, done.n_prompt + done.n_generated)


class TopLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]


class ChatLogprob(Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(Struct):
    content: list[ChatLogprob]
    refusal: None = None


class CompletionLogprobs(Struct):
    text_offset: list[int] = msgspec.field(default_factory=list)
    token_logprobs: list[float] = msgspec.field(default_factory=list)
    tokens: list[str] = msgspec.field(default_factory=list)
    top_logprobs: list[dict[str, float]] = msgspec.field(default_factory=list)


class Delta(Struct, omit_defaults=True):
    role: str | None = None
    content: str | None = None


class ChatChunkChoice(Struct):
    delta: Delta
    index: int = 0
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET


class ChatMessage(Struct):
    content: str
    role: str = "assistant"
    refusal: None = None


class ChatChoice(Struct):
    message: ChatMessage
    finish_reason: str
    index: int = 0
    logprobs: ChatLogprobs | None = None
    token_ids: list[int] | UnsetType = UNSET


class CompletionChoice(Struct):
    text: str
    index: int = 0
    logprobs: CompletionLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class Answer(Struct):
    """A whole answer or one chunk of a stream, of either route. ``seed``, ``sampling``, ``max_tokens``
    (what this answer is made with) and ``drafts`` are our own."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Any]
    usage: Usage | UnsetType | None = UNSET
    seed: int | UnsetType = UNSET
    sampling: dict[str, float] | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET
    drafts: dict[str, int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


def token_text(piece: bytes, token: int) -> str:
    """The text of one token for a human; parts of a character show as replacement characters."""
    return piece.decode("utf-8", "replace") if piece else f"token_id:{token}"


def token_key(piece: bytes, token: int) -> str:
    """The text of one token as a dictionary key: distinct tokens must stay distinct."""
    if not piece:
        return f"token_id:{token}"
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class Shape:
    """Form of one answer. ``first``, ``delta``, ``last``, ``usage`` give the chunks of a stream in order; ``add`` and
    ``whole`` collect the same for one body."""

    kind: str

    def __init__(self, wanted: Wanted, model: str, created: int) -> None:
        self.wanted = wanted
        self.model = model
        self.created = created
        self._accepted: RequestAccepted | None = None
        self._texts: list[str] = []
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    # stream

    def first(self, accepted: RequestAccepted) -> bytes:
        raise NotImplementedError

    def delta(self, out: TokenOut) -> bytes | None:
        """One chunk, or None when nothing of ``out`` is visible yet."""
        choice = self._piece(out.text, out.tokens, out.logprobs, None)
        if not (out.text or choice.logprobs or (self.wanted.return_token_ids and out.tokens)):
            return None
        return self._encode([choice])

    def last(self, done: RequestDone) -> bytes:
        chunk = self._answer([self._piece(done.text, (), (), finish_reason(done))])
        chunk.drafts = _drafts(done)
        return msgspec.json.encode(chunk)

    def usage(self, done: RequestDone) -> bytes:
        chunk = self._answer([])
        chunk.usage = usage_of(done)
        return msgspec.json.encode(chunk)

    def _piece(
        self, text: str, tokens: Iterable[int], logprobs: tuple[TokenLogprob, ...], finish: str | None
    ) -> ChatChunkChoice | CompletionChoice:
        raise NotImplementedError

    # whole

    def accept(self, accepted: RequestAccepted) -> None:
        self._accepted = accepted

    def add(self, out: TokenOut) -> None:
        self._texts.append(out.text)
        self._tokens.extend(out.tokens)
        self._logprobs.extend(out.logprobs)

    def whole(self, done: RequestDone) -> bytes:
        raise NotImplementedError

    # both

    def _answer(self, choices: list[Any], kind: str | None = None) -> Answer:
        answer = Answer(self.wanted.submit.request, kind or self.kind, self.created, self.model, choices)
        if self.wanted.stream and self.wanted.include_usage:
            answer.usage = None
        return answer

    def _encode(self, choices: list[Any]) -> bytes:
        return msgspec.json.encode(self._answer(choices))

    def _facts(self, answer: Answer, accepted: RequestAccepted) -> None:
        sampling = self.wanted.submit.sampling
        answer.seed = sampling.seed
        answer.sampling = {name: value for name, value in msgspec.structs.asdict(sampling).items() if name != "seed"}
        answer.max_tokens = accepted.max_tokens

    def _prompt_ids(self, accepted: RequestAccepted) -> list[int] | UnsetType:
        if not self.wanted.return_token_ids:
            return UNSET
        return list(accepted.prompt_ids or self.wanted.submit.prompt_ids or ())

    def _ids(self, tokens: Iterable[int]) -> list[int] | UnsetType:
        return list(tokens) if self.wanted.return_token_ids else UNSET


def finish_reason(done: RequestDone) -> str:
    return (FinishReason.LENGTH if done.reason == FinishReason.LENGTH else FinishReason.STOP).value


def _drafts(done: RequestDone) -> dict[str, int] | UnsetType:
    return {"proposed": done.n_draft, "accepted": done.n_accepted} if done.n_draft else UNSET


class ChatShape(Shape):
    kind = "chat.completion.chunk"

    def first(self, accepted: RequestAccepted) -> bytes:
        chunk = self._answer([ChatChunkChoice(Delta(role="assistant", content=""))])
        self._facts(chunk, accepted)
        chunk.prompt_token_ids = self._prompt_ids(accepted)
        return msgspec.json.encode(chunk)

    def _piece(
        self, text: str, tokens: Iterable[int], logprobs: tuple[TokenLogprob, ...], finish: str | None
    ) -> ChatChunkChoice:
        delta = Delta(content=text) if text or finish is None else Delta()
        return ChatChunkChoice(delta, 0, self._chat_logprobs(logprobs) if logprobs else None, finish, self._ids(tokens))

    def _chat_logprobs(self, rows: Iterable[TokenLogprob]) -> ChatLogprobs | None:
        if self.wanted.submit.n_logprobs is None:
            return None
        return ChatLogprobs(
            [
                ChatLogprob(
                    token_text(row.piece, row.token),
                    row.logprob,
                    list(row.piece),
                    [TopLogprob(token_text(piece, token), value, list(piece)) for token, value, piece in row.top],
                )
                for row in rows
            ]
        )

    def whole(self, done: RequestDone) -> bytes:
        assert self._accepted is not None
        text = "".join(self._texts) + done.text
        choice = ChatChoice(
            ChatMessage(text), finish_reason(done), 0, self._chat_logprobs(self._logprobs), self._ids(self._tokens)
        )
        answer = self._answer([choice], "chat.completion")
        answer.usage = usage_of(done)
        answer.drafts = _drafts(done)
        self._facts(answer, self._accepted)
        answer.prompt_token_ids = self._prompt_ids(self._accepted)
        return msgspec.json.encode(answer)


class CompletionShape(Shape):
    kind = "text_completion"

    def __init__(self, wanted: Wanted, model: str, created: int) -> None:
        super().__init__(wanted, model, created)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._n_decoded = 0
        self._n_chars = 0
        """Of the answer's text so far."""
        self._held: deque[tuple[int, TokenLogprob]] = deque()
        """With their places in the text that the tokens spell."""

    def first(self, accepted: RequestAccepted) -> bytes:
        choice = CompletionChoice("", token_ids=self._ids(()), prompt_token_ids=self._prompt_ids(accepted))
        chunk = self._answer([choice])
        self._facts(chunk, accepted)
        return msgspec.json.encode(chunk)

    def _piece(
        self, text: str, tokens: Iterable[int], logprobs: tuple[TokenLogprob, ...], finish: str | None
    ) -> CompletionChoice:
        rows = self._completion_logprobs(text, logprobs, is_last=finish is not None)
        return CompletionChoice(text, 0, rows, finish, self._ids(tokens))

    def _completion_logprobs(
        self, text: str, rows: Iterable[TokenLogprob], *, is_last: bool
    ) -> CompletionLogprobs | None:
        """Those of tokens whose place in the text is certain: one that lies in text held back may come to be behind its end."""
        if self.wanted.submit.n_logprobs is None:
            return None
        self._n_chars += len(text)
        for row in rows:
            # A character that is not complete has begun already.
            self._held.append((self._n_decoded + bool(self._decoder.getstate()[0]), row))
            self._n_decoded += len(self._decoder.decode(row.piece))
        out = CompletionLogprobs()
        while self._held and (is_last or self._held[0][0] <= self._n_chars):
            offset, row = self._held.popleft()
            out.text_offset.append(min(offset, self._n_chars))
            out.token_logprobs.append(row.logprob)
            out.tokens.append(token_key(row.piece, row.token))
            out.top_logprobs.append({token_key(piece, token): value for token, value, piece in row.top})
        return out if out.tokens else None

    def whole(self, done: RequestDone) -> bytes:
        assert self._accepted is not None
        text = "".join(self._texts) + done.text
        choice = CompletionChoice(
            text,
            0,
            self._completion_logprobs(text, self._logprobs, is_last=True),
            finish_reason(done),
            self._ids(self._tokens),
            self._prompt_ids(self._accepted),
        )
        answer = self._answer([choice])
        answer.usage = usage_of(done)
        answer.drafts = _drafts(done)
        self._facts(answer, self._accepted)
        return msgspec.json.encode(answer)


def shape_of(wanted: Wanted, model: str, created: int) -> Shape:
    return (ChatShape if wanted.is_chat else CompletionShape)(wanted, model, created)
