"""`report_tests.py REPORT RUNNER ARGUMENT…`: run the tests of a repository, and report each in JUnit's format.

`unittest SCRIPT …` runs a script that uses unittest's text runner, such as Django's `runtests.py`; `sympy FILE …` runs
SymPy's own runner. A unittest test is reported under both of its names, `test_a (module.Case)` and its description,
because SWE-bench's lists have either of them. `summary SCRIPT …` runs a shell script and reads the summary that it
prints as `pytest -rA` does. R2E-Gym defines its results by that: some of its scripts do not use pytest.
"""
# ruff: noqa: UP031 (the oldest images of SWE-bench have Python 3.5)

import importlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
import unittest
from typing import Any
from xml.sax.saxutils import quoteattr

# The characters that XML cannot have, as agent_runtime/grading/junit.py looks for them.
UNREPORTABLE = re.compile("[^\t\n\r\x20-\x7e\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")

PASSED, FAILED = set(), set()  # type: set[str], set[str]
REPORTED = {}  # type: dict[str, None]


def report(names: "list[Any]", passed: "Any") -> None:
    """Record a result; None for a skipped test. A test that failed once has failed. Several tests may have one name: it is
    skipped only if none of them passed.
    """
    for name in filter(None, names):
        REPORTED[name] = None
        if passed is not None:
            (PASSED if passed else FAILED).add(name)


def write(path: str) -> None:
    """Write the report, replacing an existing file."""
    lines = []
    for name in REPORTED:
        # As pytest does in its own report.
        readable = UNREPORTABLE.sub(lambda found: "#x%02X" % ord(found.group()), name)
        lines.append(
            "<testcase name=%s>%s</testcase>"
            % (quoteattr(readable), "<failure/>" * (name in FAILED or name not in PASSED))
        )
    with open(path + ".part", "w", encoding="utf-8") as file:
        file.write("<testsuite>%s</testsuite>" % "".join(lines))
    os.replace(path + ".part", path)


def names_of(test: Any) -> "list[Any]":
    """Return the names of a test in the log of unittest's text runner."""
    return [str(test), test.shortDescription() if hasattr(test, "shortDescription") else None]


def reporting(owner: Any, name: str, passed: Any, names: Any) -> None:
    """Make a method of a runner also report the test for which it is called; `names` returns the test's names."""
    original = getattr(owner, name)

    def noted(self: Any, *arguments: Any, **options: Any) -> Any:
        report(names(*arguments), passed)
        return original(self, *arguments, **options)

    setattr(owner, name, noted)


class Recording(unittest.TextTestResult):
    """unittest's own result, which also records each test. Skipped tests and expected failures do not count as passed."""

    def addSubTest(self, test: Any, subtest: Any, err: Any) -> None:
        super().addSubTest(test, subtest, err)
        if err is not None:
            report(names_of(test), False)


for method in ("addFailure", "addError", "addExpectedFailure", "addUnexpectedSuccess"):
    reporting(Recording, method, False, lambda test, *_: names_of(test))
reporting(Recording, "addSkip", None, lambda test, *_: names_of(test))
reporting(Recording, "addSuccess", True, lambda test: names_of(test))


def run_unittest(arguments: "list[str]") -> None:
    """Run a script whose tests use unittest's text runner."""
    setattr(unittest.TextTestRunner, "resultclass", Recording)  # noqa: B010 its stub has a function there
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    runpy.run_path(arguments[0], run_name="__main__")


def run_sympy(arguments: "list[str]") -> None:
    """Run SymPy's runner in this process. It would start another process if the hash seed were not set."""
    sys.path[0] = os.getcwd()
    try:
        runtests = importlib.import_module("sympy.testing.runtests")  # type: Any
    except ImportError:
        runtests = importlib.import_module("sympy.utilities.runtests")
    reporter = runtests.PyTestReporter
    current = [""]

    entering = reporter.entering_test

    def enter(self: Any, test: Any) -> Any:
        current[0] = test.__name__
        return entering(self, test)

    reporter.entering_test = enter
    results = dict.fromkeys(("test_fail", "test_exception", "test_xfail", "test_xpass", "test_timeout"), False)
    for name, passed in dict(results, test_skip=None).items():
        if hasattr(reporter, name):
            reporting(reporter, name, passed, lambda *_: current)
    reporting(reporter, "test_pass", True, lambda *_: current)
    runtests.test(*arguments, verbose=True, colors=False)


def run_summary(arguments: "list[str]") -> None:
    """Run a shell script, and report the tests of its summary without their files: `test` or `Class.test`."""
    # Not a pipe: a process that the tests leave behind would keep it open.
    with tempfile.TemporaryFile() as output:
        ended = subprocess.call(["bash"] + arguments, stdout=output, stderr=subprocess.STDOUT)  # noqa: RUF005
        output.seek(0)
        printed = output.read()
    sys.stdout.buffer.write(printed)
    text = re.sub("\x1b\\[[0-9;]*m", "", printed.decode("utf-8", "replace"))
    found = {}
    # Tests may print such a header too; what they print precedes the summary.
    for line in text.rpartition("short test summary info")[2].split("\n"):
        status, _, test = line.strip().partition(" ")
        if status in ("PASSED", "FAILED", "ERROR") and "::" in test:
            name, passed = ".".join(test.split("::")[1:]), status == "PASSED"
            found[name if passed else name.partition(" - ")[0]] = passed
    # Of names that become equal, R2E-Gym takes the result of the last one in order.
    results = {name.partition(" - ")[0]: found[name] for name in sorted(found)}
    for name, passed in results.items():
        report([name], passed)
    sys.exit(ended)


if __name__ == "__main__":
    target, runner = sys.argv[1:3]
    try:
        {"unittest": run_unittest, "sympy": run_sympy, "summary": run_summary}[runner](sys.argv[3:])
    finally:
        write(target)
