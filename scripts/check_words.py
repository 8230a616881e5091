#!/usr/bin/env python3
"""Count words of the style guide's list that readers stumble over (CONTRIBUTING.md). `--check` fails if a banned one occurs.

python scripts/check_words.py [--check] [PATH ...]
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

NAMES = "found|made|given|asked|seen|told|held|kept"
BANNED = {
    "beside": r"\bbesides?\b",
    "anew, once more": r"\b(anew|once more)\b",
    "told, tell": r"\b(?<!\.)(told|tells?|telling)\b",  # not a file's tell()
    "mend": r"\bmend(s|ed|ing)?\b",
    "nobody, somebody": r"\b(no|some|any)body\b",
    "found, made, … as a name": rf"\b({NAMES})\b(: [\w\[\], |.]+)? (:)?= |\bfor ({NAMES}) in\b|\bas ({NAMES}):$",
    "of its own": r"\bof (its|their|his|one's) own\b",
    "no more than, at most that": r"\b(no more than|at most that)\b",
    "in the same breath, on its way": r"\b(in the same breath|on (its|their|the) way)\b",
    "hand over, take in": r"\b(hand(s|ed|ing)? over|tak(e|es|ing) in|took in)\b",
}
COUNTED = {
    "says": r"\bsays?\b",
    "what is, those that": r"\b(what (is|are|has|have|was)|those (that|who|which))\b",
    "where, as a condition": r"\b(None|False|True|Error|Failure|Missing|empty) where\b|\bwhere (it|there|that|this|none|no|nothing) ",
    "so does, nor": r"\b(so do|so does|nor)\b",
    "no reason to": r"\bno reason to\b",
    "place": r"\bplaces?\b",
    "is to, are to": r"\b(is|are) to [a-z]+\b",
    "rest": r"\brests\b",
}
SUFFIXES = (".py", ".md", ".yaml", ".toml")
# The generated page of metrics and this list itself quote words; license and lock texts are not ours.
EXEMPT = ("scripts/check_words.py",)


def text_files(paths: list[str]) -> list[Path]:
    """Tracked text files under `paths`, all of them by default."""
    listing = subprocess.run(["git", "ls-files", "--", *paths], capture_output=True, text=True, check=True).stdout
    return [Path(name) for name in listing.splitlines() if name.endswith(SUFFIXES) and name not in EXEMPT]


def main(arguments: list[str]) -> int:
    """Print the counts, or with `--check` each line with a banned word. Returns 1 if there is one."""
    check = "--check" in arguments
    counts: Counter[str] = Counter()
    for file in text_files([each for each in arguments if each != "--check"]):
        if not file.is_file():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for name, pattern in (BANNED if check else BANNED | COUNTED).items():
                if matches := len(re.findall(pattern, line, re.IGNORECASE)):
                    counts[name] += matches
                    if check:
                        print(f"{file}:{number}: {name}: {line.strip()}")
    if not check:
        for name in BANNED | COUNTED:
            print(f"{counts[name]:6}  {name}")
    return 1 if check and counts else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
