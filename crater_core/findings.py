"""What a doctor found: one line a check, with what was seen and what to do about it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from rich.console import Console
from rich.table import Table
from rich.text import Text


class Verdict(StrEnum):
    PASS = "pass"  # noqa: S105 (a verdict)
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    check: str
    verdict: Verdict
    saw: str
    fix: str = ""

    @staticmethod
    def passed(check: str, saw: str) -> Finding:
        return Finding(check, Verdict.PASS, saw)

    @staticmethod
    def warned(check: str, saw: str, fix: str) -> Finding:
        return Finding(check, Verdict.WARN, saw, fix)

    @staticmethod
    def failed(check: str, saw: str, fix: str) -> Finding:
        return Finding(check, Verdict.FAIL, saw, fix)


_SHOWN = {Verdict.PASS: ("✓ pass", "green"), Verdict.WARN: ("! warn", "yellow"), Verdict.FAIL: ("✗ fail", "bold red")}
_PIPE_WIDTH = 200


def tell(findings: Iterable[Finding], as_json: bool, subject: str) -> int:
    """Print them, as a table or as a JSON list; the exit code: 1 when one of them failed."""
    found = list(findings)
    if as_json:
        sys.stdout.write(json.dumps([asdict(finding) for finding in found], indent=2, ensure_ascii=False) + "\n")
    else:
        console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _PIPE_WIDTH)
        console.print(_table(found))
        console.print(_summary(found, subject))
    return int(any(finding.verdict is Verdict.FAIL for finding in found))


def _table(found: Sequence[Finding]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("CHECK", "", "SAW"):
        table.add_column(name, overflow="fold")
    for finding in found:
        word, style = _SHOWN[finding.verdict]
        saw = Text(finding.saw)
        if finding.fix:
            saw.append(f"\n→ {finding.fix}", style="cyan")
        table.add_row(Text(finding.check, style="bold"), Text(word, style=style), saw)
    return table


def _summary(found: Sequence[Finding], subject: str) -> Text:
    failed, warned = (sum(finding.verdict is verdict for finding in found) for verdict in (Verdict.FAIL, Verdict.WARN))
    if failed:
        return Text(f"\n{subject}: {failed} of {len(found)} checks failed, {warned} with a warning.", style="bold red")
    if warned:
        return Text(f"\n{subject} works; {warned} of {len(found)} checks have something to say.", style="yellow")
    return Text(f"\n{subject} is well: {len(found)} checks passed.", style="green")
