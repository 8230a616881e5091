"""The samples section of the report, with filters by step, kind and reward but without scripts.

The filters are `<select>` elements. A CSS rule for each option hides the other samples, so the page works from a file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from mtpctl.telemetry.sample_log import SampleRow, shortened

MAX_SAMPLES = 320
MAX_CHARACTERS = 4000
MAX_BANDS = 5
ENDING = 90
"""Number of last characters of the prompt that a collapsed sample shows."""
KINDS = {"update": "trained on", "eval": "held-out", "dropped": "dropped"}


def samples_section(rows: Sequence[SampleRow]) -> str:
    """The section as HTML; empty without samples. Of many steps, evenly spaced ones are shown."""
    shown = of_spaced_steps(rows, MAX_SAMPLES)
    if not shown:
        return ""
    steps = list(dict.fromkeys(row["step"] for row in shown))
    bands = reward_bands([row["reward"] for row in shown if row["reward"] is not None])
    kinds = [kind for kind in KINDS if any(row["kind"] == kind for row in shown)]
    filters = (
        _select("step", "Step", [(str(step), str(step)) for step in reversed(steps)])
        + _select("kind", "Kind", [(kind, KINDS[kind]) for kind in kinds])
        + _select("band", "Reward", [(str(index), label) for index, (_, label) in enumerate(bands)])
    )
    count = f", {len(shown)} of {len(rows)} samples of the run" if len(shown) < len(rows) else f", {len(shown)} samples"
    newest_first = sorted(shown, key=lambda row: -row["step"])
    return (
        f'<section class="card samples" id="samples"><h2>Samples{count}</h2>'
        f"<style>{_rules('step', map(str, steps))}{_rules('kind', kinds)}{_rules('band', (str(i) for i in range(len(bands))))}</style>"
        f'<div class="filters">{filters}</div><div class="list">{"".join(_article(row, bands) for row in newest_first)}</div></section>'
    )


def of_spaced_steps(rows: Sequence[SampleRow], limit: int) -> list[SampleRow]:
    """About `limit` rows: all rows of evenly spaced steps."""
    steps = sorted({row["step"] for row in rows})
    count = max(2, limit * len(steps) // max(len(rows), 1))
    if len(rows) <= limit or len(steps) <= count:
        return list(rows)
    chosen = {steps[round(i * (len(steps) - 1) / (count - 1))] for i in range(count)}
    return [row for row in rows if row["step"] in chosen]


def reward_bands(rewards: Sequence[float]) -> list[tuple[float, str]]:
    """Reward bands as (upper end, label), lowest first: single values if there are few, else quantiles."""
    values = sorted(set(rewards))
    if len(values) <= MAX_BANDS:
        return [(value, f"{value:g}") for value in values]
    ordered = sorted(rewards)
    ends = sorted({ordered[round((i + 1) * (len(ordered) - 1) / MAX_BANDS)] for i in range(MAX_BANDS)})
    begins = [values[0], *(min(value for value in values if value > end) for end in ends[:-1])]
    return [(end, f"{begin:.3g} to {end:.3g}" if begin < end else f"{end:.3g}") for begin, end in zip(begins, ends, strict=True)]


def _select(name: str, label: str, options: Sequence[tuple[str, str]]) -> str:
    rows = "".join(f'<option value="{escape(value)}">{escape(text)}</option>' for value, text in options)
    return f'<label>{label} <select class="{name}"><option value="">all</option>{rows}</select></label>'


def _rules(name: str, values: Iterable[str]) -> str:
    return "".join(
        f'.samples:has(select.{name} option[value="{value}"]:checked) .sample:not([data-{name}="{value}"]){{display:none}}'
        for value in values
    )


def _article(row: SampleRow, bands: Sequence[tuple[float, str]]) -> str:
    reward = row["reward"]
    band = "" if reward is None else str(next((i for i, (end, _) in enumerate(bands) if reward <= end), len(bands) - 1))
    titles = {"model": "", "environment": ' title="the environment, {} tokens"'}
    parts = "".join(
        f'<span class="{part["by"]}"{titles[part["by"]].format(part["tokens"])}>{_text(part["text"])}</span>' for part in row["parts"]
    )
    head = " · ".join(escape(fact) for fact in facts(row))
    answer = f'<p class="asked">expected <b>{_text(row["answer"])}</b></p>' if row["answer"] else ""
    note = f'<p class="asked">{escape(row["note"])}</p>' if row["note"] else ""
    value = "–" if reward is None else f"{reward:.3g}"
    return (
        f'<details class="sample" data-step="{row["step"]}" data-kind="{row["kind"]}" data-band="{band}"><summary><b>{value}</b> {head}'
        f"<em>{escape(ending(row['prompt']))}</em></summary>"
        f'<div class="prompt">{_text(row["prompt"])}</div><div class="response">{parts}</div>{answer}{note}</details>'
    )


def ending(text: str) -> str:
    """The last words of a prompt in one line, because a prompt usually ends with its question."""
    line = " ".join(text.split())
    return line if len(line) <= ENDING else "… " + line[-ENDING:].partition(" ")[2]


def _text(text: str) -> str:
    return escape(shortened(text, MAX_CHARACTERS), quote=False)


def facts(row: SampleRow) -> list[str]:
    """The sample's origin, reward parts, length, end, weight versions and drafts, in a few words each."""
    origins = {"update": f"update {row['step']}", "eval": f"held-out {row['set']}".strip() + f" at {row['step']}"}
    parts = [origins.get(row["kind"], f"dropped before update {row['step']}")]
    parts += [f"{name} {value:.3g}" for name, value in row["reward_parts"].items()]
    if row["environment_reward"] is not None:
        parts.append(f"environment reward {row['environment_reward']:.3g}")
    turns = sum(part["by"] == "environment" for part in row["parts"])
    parts.append(f"{row['tokens']} tokens" + (f" and {turns} environment turn(s)" if turns else ""))
    if row["finish_reason"]:
        parts.append(f"ended by {row['finish_reason']}")
    versions = list(dict.fromkeys(version for _, _, version in row["versions"]))
    if versions:
        parts.append(f"version {versions[0]}" if len(versions) == 1 else f"versions {versions[0]} to {versions[-1]}")
    drafts = row["drafts"]
    if drafts["drafted"]:
        parts.append(f"{drafts['accepted']} of {drafts['drafted']} drafts accepted")
    return parts
