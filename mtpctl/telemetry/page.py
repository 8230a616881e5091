"""The frame of every HTML page, with its style inlined: no scripts, no further files."""

from __future__ import annotations

from html import escape
from pathlib import Path

from mtpctl.errors import UserError
from mtpctl.telemetry.run_directory import write_whole


def page(title: str, subtitle: str, body: str, footer: str) -> str:
    """A whole document. `body` is HTML, everything else is text."""
    style = Path(__file__).with_name("report.css").read_text()
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f'<meta name="color-scheme" content="light dark"><title>{escape(title)} · mtpctl</title><style>{style}</style></head><body><main>'
        f"<header><h1>{escape(title)}</h1><p>{escape(subtitle)}</p></header>{body}"
        f"<footer>mtpctl · {escape(footer)}</footer></main></body></html>\n"
    )


def write_page(target: Path, text: str) -> None:
    """Write the page whole or not at all. Raises UserError where `target` cannot be written or is no file."""
    try:
        if not target.name or (target.exists() and not target.is_file()):
            raise UserError(f"--out: cannot write {target} (no file); name another place")
        write_whole(target, text)
    except OSError as error:
        raise UserError(f"--out: cannot write {target} ({error.strerror}); name another place") from error
