"""Chat replies for tests whose environments reply with text."""

from __future__ import annotations

from typing import Any, cast

from mtpctl.environments.turns import ChatReplies

NO_CHAT = ChatReplies(cast(Any, None))
