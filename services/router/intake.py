"""From a request to a sequence: the prompt's ids, the limits, what is refused and why. No sockets, no arrays."""

from __future__ import annotations

from services.router.sequences import Sequence
from services.router.text_stream import PieceOf, TextStream
from shared.errors import ErrorCode, Refused
from shared.messages.router import Submit
from shared.model.spec import ModelSpec

MAX_WAITING = 256


class Intake:
    """Turns Submit messages into sequences. ``max_context``: tokens per sequence, prompt and answer together."""

    def __init__(self, spec: ModelSpec, piece_of: PieceOf | None, max_context: int) -> None:
        self._spec = spec
        self._piece_of = piece_of
        self._max_context = max_context
        self.is_draining = False
        """Nothing new is taken in."""

    def admit(self, msg: Submit, *, is_in_use: bool, n_waiting: int) -> None:
        """Raises Refused for a request that may not even wait. ``is_in_use``: its name. ``n_waiting``: others,
        those whose prompts are not read yet included."""
        if self.is_draining:
            raise Refused("The server is shutting down; try again later.", status=503, code=ErrorCode.SHUTTING_DOWN)
        if is_in_use:
            raise Refused(f"Request id {msg.request} is in use.", status=409, code=ErrorCode.DUPLICATE_REQUEST)
        if n_waiting >= MAX_WAITING:
            raise Refused(
                f"{MAX_WAITING} requests are waiting already; try again later.",
                status=429,
                code=ErrorCode.QUEUE_FULL,
            )
        if msg.prompt_ids is None and self._piece_of is None:
            raise Refused(
                "This model has no tokenizer; send the prompt as token ids to /v1/completions.",
                code=ErrorCode.NO_TOKENIZER,
                param="messages" if msg.messages_json is not None else "prompt",
            )

    def accept(self, msg: Submit, prompt: list[int], turn_ends: frozenset[int] = frozenset()) -> Sequence:
        """The sequence, tokens of an earlier router's answer (``resume_ids``) included. Raises Refused.

        ``turn_ends``: control tokens with which the template begins turns; one of them ends an answer of chat.
        """
        param = "messages" if msg.messages_json is not None else "prompt"
        limit, vocab = self._max_context, self._spec.vocab
        if not prompt:
            raise Refused(
                "The prompt is empty: at least one token is needed.", code=ErrorCode.EMPTY_PROMPT, param=param
            )
        if max(prompt) >= vocab:
            raise Refused(
                f"Token id {max(prompt)} is outside the vocabulary of {vocab} entries.",
                code=ErrorCode.INVALID_TOKEN,
                param=param,
            )
        if len(prompt) >= limit:
            raise Refused(
                f"The prompt has {len(prompt)} tokens; with one token to generate, at most {limit - 1} fit the context "
                f"of {limit}. Shorten the prompt or start with a larger --max-context.",
                code=ErrorCode.CONTEXT_LENGTH_EXCEEDED,
                param=param,
            )
        room = limit - len(prompt)
        ends = frozenset(self._spec.eos_ids) | (turn_ends if msg.messages_json is not None else frozenset())
        sequence = Sequence(
            request=msg.request,
            n_prompt=len(prompt),
            tokens=prompt,
            max_tokens=room if msg.max_tokens is None else min(msg.max_tokens, room),
            sampling=msg.sampling,
            text=TextStream(self._piece_of, msg.stop, is_start=msg.messages_json is not None),
            eos_ids=frozenset() if msg.ignore_eos else ends,
            n_logprobs=msg.n_logprobs,
        )
        for token in msg.resume_ids[: sequence.max_tokens]:
            sequence.append(token)  # its text was delivered with it
        return sequence
