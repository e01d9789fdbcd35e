"""The table of frameworks, printed at the end; ``--write`` puts it into docs/integrations.md."""

from pathlib import Path

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "integrations.md"
BEGIN, END = "<!-- begin: frameworks -->", "<!-- end: frameworks -->"
COLUMNS = ("lines", "steps", "norm error", "bits", "resumed", "stops", "false issues", "noise")


def pytest_addoption(parser):
    parser.addoption("--write", action="store_true", help="write the table of frameworks into docs/integrations.md")


def pytest_terminal_summary(terminalreporter, config):
    """Print what the tests noted of each framework; what a failed test did not come to is missing."""
    rows = {}
    for kind in ("passed", "failed"):
        for report in terminalreporter.stats.get(kind, ()):
            told = dict(report.user_properties)
            if "framework" in told:
                rows.setdefault(told.pop("framework"), {}).update(told)
    if not rows:
        return
    lines = [f"| framework | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    for name, told in sorted(rows.items()):
        lines.append(f"| {name} | {' | '.join(str(told.get(column, 'failed')) for column in COLUMNS)} |")
    terminalreporter.section("frameworks")
    for line in lines:
        terminalreporter.line(line)
    if config.getoption("--write"):
        text = DOCUMENT.read_text()
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        DOCUMENT.write_text("\n".join([before, *lines, after]))
