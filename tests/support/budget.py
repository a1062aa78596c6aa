"""What a run of tests costs, printed at its end: figures to look at, which fail nothing."""

import collections
import os

import pytest

TEST_LIMIT = 3.0  # CPU seconds of a test of `make test`
FAST = "not thorough and not soak"
LIMITS = {FAST: 7, "thorough and not soak": 20}  # CPU minutes of all these tests; lint takes one more

_begun = pytest.StashKey[float]()
_workers = []  # CPU seconds of each process that ran tests, its imports included


def cpu_seconds():
    """Of this process and of those that it has waited for."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item):
    item.stash[_begun] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.when == "teardown":
        report.user_properties.append(("cpu", cpu_seconds() - item.stash[_begun]))
    return report


def pytest_sessionfinish(session):
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cpu"] = cpu_seconds()


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    _workers.append(getattr(node, "workeroutput", {}).get("cpu", 0.0))


def pytest_terminal_summary(terminalreporter, config):
    of_tests = {
        report.nodeid: value
        for report in terminalreporter.stats.get("", ())
        for name, value in report.user_properties
        if name == "cpu"
    }
    rooms = collections.Counter()
    for test, seconds in of_tests.items():
        rooms["/".join(test.partition("::")[0].split("/")[1:-1][:2])] += seconds
    total = sum(_workers) or cpu_seconds()
    terminalreporter.section("CPU seconds")
    terminalreporter.write_line(
        "  ".join(f"{room or 'tests'} {spent:.0f}" for room, spent in rooms.most_common())
    )
    for test, seconds in sorted(of_tests.items(), key=lambda one: -one[1]):
        if seconds > TEST_LIMIT and config.option.markexpr == FAST:
            terminalreporter.write_line(f"{seconds:.1f} s, more than {TEST_LIMIT:.0f}: {test}")
    limit = LIMITS.get(config.option.markexpr)
    bound = f"; the limit is {60 * limit}" if limit else ""
    terminalreporter.write_line(f"{sum(of_tests.values()):.0f} in tests, {total:.0f} with imports{bound}")
