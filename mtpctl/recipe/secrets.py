"""Rejects recognizable secrets in a recipe, because a recipe is printed and written into the run directory.

A value of `reward.args`, `rollout.agent_args` and `rollout.environment_args` may be `env:NAME`: the environment variable is read when the
function is loaded (`mtpctl.user_code.from_environment`), so the recipe contains only its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

_KEY = re.compile(
    r"(?:(?:^|hf_|hub_|auth_|access_|api_|bearer_|refresh_|session_)token|secret|password|passwd|passphrase|(?:api|private|access|secret)_?key"
    r"|credentials?|authorization)$",
    re.IGNORECASE,
)
_VALUE = re.compile(
    r"^(?:(?:Bearer|Basic)\s+\S+|(?:sk|pk|rk)-[A-Za-z0-9_-]{20,}|(?:hf|ghp|gho|ghs|github_pat|glpat|xox[abprs])[-_][A-Za-z0-9_-]{16,}|AKIA[A-Z0-9]{16})$"
)
_IN_URL = re.compile(
    r"(?<=://)[^/\s:@]*:[^/\s@]+(?=@)|(?<=://)[^/\s:@]{20,}(?=@)"
    r"|(?<=[?&])((?:api_?key|(?:access_|auth_)?token|key|secret|password|sig(?:nature)?)=)[^&#\s'\"]+",
    re.IGNORECASE,
)
_SET = re.compile(r"(?P<key>[\w.]+)(?P<sign>\s*\+?[=:]\s*)(?P<value>\S.*)", re.DOTALL)
_FREE = re.compile(
    r"(?P<read>(?:evaluation\.sets\.[^.]+\.)?reward\.args|rollout\.(?:agent|environment|environment_eval)_args)\.(?P<key>.+)"
    r"|(?:rollout\.engine_args|model\.config)\.(?P<other>.+)"
)
"""Mappings with arbitrary keys; `read`: those in which `env:NAME` is replaced."""
_HINT = "secrets do not belong in a recipe, which is written into the run directory"


def secrets_in(tree: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """The paths of secrets in a recipe, each with an error that does not contain the secret."""
    for path, text in _texts(tree, ()):
        if text.startswith("env:"):
            continue
        free = _FREE.fullmatch(".".join(path))
        below = (free["key"] or free["other"]).split(".") if free else []
        secret = any(map(_KEY.search, below)) or (free is not None and _VALUE.match(text) is not None)
        hint = "write env:NAME, and export NAME" if free and free["read"] else "use the environment"
        if secret:
            yield path, f"{'.'.join(path)}: {_HINT}; {hint}"
        elif _IN_URL.search(text):
            yield path, f"{'.'.join(path)}: contains a password or key; {_HINT}; {hint}"


def masked(text: str) -> str:
    """The text with masked passwords in URLs and masked values of secret keys (`KEY=VALUE`)."""
    text = _IN_URL.sub(lambda match: f"{match[1] or ''}***", text)
    match = _SET.match(text)
    if match is not None and _KEY.search(match["key"].rpartition(".")[2]) and not match["value"].startswith("env:"):
        return f"{match['key']}{match['sign']}***"
    return text


def _texts(value: object, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, (*path, str(key)))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _texts(item, (*path, str(number)))
