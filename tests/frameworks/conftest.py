"""The table of frameworks, printed at the end."""


def pytest_terminal_summary(terminalreporter):
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    lines = [line for report in reports for key, line in report.user_properties if key == "framework"]
    if lines:
        terminalreporter.section("frameworks")
        terminalreporter.line(f"{'framework':<20}{'steps':>6}{'norm error':>12}{'bits':>7}")
        for line in lines:
            terminalreporter.line(line)
