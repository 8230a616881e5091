"""Chat messages as tokens behind what the model wrote, which is never tokenised again.

A chat template renders whole conversations. Rendering one anew would change tokens that the model sampled: another tokenisation of the
same text, or thinking that the template takes out of earlier turns. So the template renders a conversation in which a mark stands for the
model's turn, and what comes behind the mark is appended to the tokens that are there. That is right for a template where it depends on
the new messages alone, which is checked; others are refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from mtpctl.data.tokenizers import NONE, Variables
from mtpctl.environments.environment import EnvironmentFailure, Message
from mtpctl.errors import UserError

MARK = "TheModelsOwnTurn"
CHECKED = 1000
"""Maximum number of cached checks of replies."""


class ChatText(Protocol):
    """A tokenizer with a chat template; a part of `mtpctl.data.tokenizers.Tokenizer`."""

    def encode(self, text: str, *, special: bool = False) -> list[int]: ...

    def chat_text(self, messages: Sequence[Message], *, variables: Variables = NONE) -> str:
        """A conversation in the chat template, up to the beginning of the assistant's answer. Raises UserError where it refuses."""
        ...


class ChatReplies:
    """Renders messages of an environment as what follows a turn of the model."""

    def __init__(self, text: ChatText) -> None:
        self._text = text
        self._checked: set[tuple[str, ...]] = set()

    def tokens(self, messages: Sequence[Message], end_token: int | None, variables: Variables = NONE) -> list[int]:
        """The tokens from the end of the model's turn to the beginning of its next one.

        `end_token` is the token with which the model ended its turn itself; it is not written again. None: a stop string ended it.
        `variables`: of the template.
        Raises EnvironmentFailure where the template does not take the messages, or writes more than them.
        """
        question, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": MARK}
        behind = self._behind([question, answer, *messages], variables)
        roles = (repr(sorted(variables.items())), *(str(message["role"]) for message in messages))
        if roles not in self._checked:
            earlier = [question, {"role": "assistant", "content": "2"}]
            if behind != self._behind([*earlier, question, answer, *messages], variables):
                raise EnvironmentFailure(
                    "the chat template renders the same messages otherwise after another conversation, "
                    "so they cannot be appended to what the model wrote; reply with text instead"
                )
            for number, message in enumerate(messages):
                if message.get("content") and behind == self._behind_without(messages, number, variables):
                    raise EnvironmentFailure(
                        f"the chat template leaves out messages of the role {message['role']!r}; reply in another role, or with text"
                    )
            if len(self._checked) >= CHECKED:  # Clients may send any roles and variables.
                self._checked.clear()
            self._checked.add(roles)
        ids = self._text.encode(behind)
        return ids[1:] if end_token is not None and ids[:1] == [end_token] else ids

    def _behind_without(self, messages: Sequence[Message], number: int, variables: Variables) -> str | None:
        """The rendered text without one of the messages; None if the template rejects that."""
        question, answer = {"role": "user", "content": "1"}, {"role": "assistant", "content": MARK}
        try:
            return self._behind([question, answer, *messages[:number], *messages[number + 1 :]], variables)
        except EnvironmentFailure:
            return None

    def _behind(self, conversation: Sequence[Message], variables: Variables) -> str:
        try:
            _, mark, behind = self._text.chat_text(conversation, variables=variables).partition(MARK)
        except UserError as error:
            raise EnvironmentFailure(str(error)) from error
        if not mark:
            raise EnvironmentFailure("the chat template leaves an earlier turn of the model out or changes it; reply with text instead")
        return behind
