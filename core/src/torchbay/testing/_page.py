"""Results as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from torchbay.testing._outcome import Result
from torchbay.testing._record import Record, Tested

__all__ = ["page"]

_SHOWN = {
    "passed": ("pass", "\u2713"),
    "refused": ("refused cleanly", "\u2013"),
    "known failure": ("known failure", "!"),
    "wrong": ("wrong", "\u2717"),
    "not offered": ("not offered", "\u00b7"),
}

_STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --back: #fff; --line: #d8dee4; --soft: #57606a;
  --passed: #1a7f37; --refused: #6e7781; --known: #9a6700; --wrong: #cf222e; --not: #afb8c1 }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --back: #0d1117; --line: #30363d;
  --soft: #8d96a0; --passed: #3fb950; --refused: #8d96a0; --known: #d29922; --wrong: #f85149;
  --not: #484f58 } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--text); background: var(--back);
  max-width: 70rem; margin: 2rem auto; padding: 0 1rem }
h1 { margin-bottom: 0 } h2 { margin: 2rem 0 .5rem; font-size: 1.1rem } p, td { color: var(--soft) }
table { border-collapse: collapse } th, td { padding: .2rem .8rem .2rem 0; text-align: right }
th:first-child, td:first-child { text-align: left } tr { border-bottom: 1px solid var(--line) }
ul { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem }
li { border: 1px solid var(--line); border-left: 4px solid var(--shade); border-radius: 4px;
  padding: 0 .5rem; font-size: .85rem } li b { color: var(--shade); margin-right: .3rem }
.passed { --shade: var(--passed) } .refused { --shade: var(--refused) }
.known-failure { --shade: var(--known) } .wrong { --shade: var(--wrong) }
.not-offered { --shade: var(--not) } details { margin: .3rem 0 }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .3rem 0 .3rem 1rem }
summary { cursor: pointer } summary b { color: var(--shade) }
"""


def page(records: Sequence[Record]) -> str:
    """Return the page: for each backend its counts, then every test by family."""
    title = ", ".join(record.tested.backend for record in records) or "nothing was tested"
    body = "\n".join(map(_record, records))
    return (
        f'<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width">\n'
        f"<title>torchbay conformance: {escape(title)}</title>\n<style>{_STYLE}</style>\n"
        f"{body}\n</html>\n"
    )


def _record(record: Record) -> str:
    tested = record.tested
    families = list(dict.fromkeys(result.family for result in record.results))
    parts = [
        f"<h1>{escape(f'{tested.backend} {tested.version}')}</h1>",
        f"<p>{escape(_conditions(tested))}</p>",
        _counts(record, families),
        *(_details(result) for result in record.results if _deserves_a_line(result)),
    ]
    for family in families:
        tiles = "\n".join(_tile(result) for result in record.results if result.family == family)
        parts.append(f"<h2>{escape(family)}</h2>\n<ul>\n{tiles}\n</ul>")
    return "\n".join(parts)


def _conditions(tested: Tested) -> str:
    return (
        f"on {tested.device}, plugin API {tested.api_version}, torchbay {tested.torchbay}, "
        f"torch {tested.torch}, Python {tested.python}, {tested.machine}"
    )


def _counts(record: Record, families: Iterable[str]) -> str:
    head = "".join(
        f'<th class="{_class(outcome)}">{mark} {shown}</th>'
        for outcome, (shown, mark) in _SHOWN.items()
    )
    rows = [(family, [r for r in record.results if r.family == family]) for family in families]
    lines = "\n".join(
        f"<tr><td>{escape(name)}</td>{_cells(results)}</tr>"
        for name, results in [*rows, ("all", record.results)]
    )
    return f"<table>\n<tr><th></th>{head}</tr>\n{lines}\n</table>"


def _cells(results: Sequence[Result]) -> str:
    found = [result.outcome for result in results]
    return "".join(f"<td>{found.count(outcome) or ''}</td>" for outcome in _SHOWN)  # type: ignore[arg-type]


def _deserves_a_line(result: Result) -> bool:
    return result.outcome in ("wrong", "known failure", "refused")


def _details(result: Result) -> str:
    shown, mark = _SHOWN[result.outcome]
    link = f'<a href="{escape(result.link)}">{escape(result.link)}</a>' if result.link else ""
    return (
        f'<details class="{_class(result.outcome)}"><summary><b>{mark} {shown}</b> '
        f"{escape(_label(result))}</summary>{link}<pre>{escape(result.detail)}</pre></details>"
    )


def _tile(result: Result) -> str:
    shown, mark = _SHOWN[result.outcome]
    hint = escape(f"{shown}: {result.detail}"[:300] if result.detail else shown)
    label = escape(result.case or _words(result.test))
    return f'<li class="{_class(result.outcome)}" title="{hint}"><b>{mark}</b>{label}</li>'


def _label(result: Result) -> str:
    return f"{_words(result.test)}: {result.case}" if result.case else _words(result.test)


def _words(test: str) -> str:
    return test.removeprefix("test_").replace("_", " ")


def _class(outcome: str) -> str:
    return outcome.replace(" ", "-")
