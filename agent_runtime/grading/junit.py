"""JUnit reports: parse one from an untrusted workspace, and find a task's tests in it."""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from xml.parsers import expat

from rollout_api.files import TaskFile
from rollout_api.records import TestVerdict
from rollout_api.tasks import UnpassedResult

REPORT_BYTES = 32 * 1024 * 1024
"""Largest report: 10,000 failed tests with 3 KiB of message each."""

REPORT_TESTS = 100_000
"""Most tests of one report; `verifier.tests` names at most 10,000."""

REPORT_DEPTH = 64
"""Deepest nesting of elements; reports have 4 levels."""

MESSAGE_CHARACTERS = 2000
"""Most characters of a failed test's message."""

_NOT_PASSED = ("failure", "error", "skipped", "rerun", "flakyFailure", "flakyError")
_NOT_RUN = frozenset({"notrun", "disabled", "skipped", "suppressed"})
"""Values of the attributes `status` and `result` of a `testcase` that was not run: GoogleTest sets them and adds no
element.
"""

_XFAIL = "pytest.xfail"
"""Type of the `skipped` element of such a test."""
_UNPASSED = {_XFAIL: UnpassedResult.XFAIL, **dict.fromkeys(_NOT_RUN, UnpassedResult.SKIPPED)}

_UTF_16 = (b"\xff\xfe", b"\xfe\xff")
_CONTROL = bytes({*range(32)} - {*b"\t\n\r"})
"""Control characters that XML does not allow. The reporters of Node and Jest write them unescaped in a test's name or
message.
"""


class ReportError(ValueError):
    """A report that cannot be read; the message says why."""


@dataclass(frozen=True)
class ReportedTest:
    """One `testcase` of a report."""

    classname: str
    name: str
    file: str | None
    """Path of the test's code, from pytest's `xunit1` family."""
    passed: bool
    """Reported without failure, error or skip."""
    message: str = ""
    unpassed: UnpassedResult | None = None
    """Why it did not pass, if it did not fail."""


def parse_report(data: bytes) -> list[ReportedTest]:
    """Parse the tests of a report, in order. Raises ReportError unless it is a complete, plain JUnit report."""
    if len(data) > REPORT_BYTES:
        raise ReportError(f"the report has {len(data)} bytes, at most {REPORT_BYTES} are read")
    handler = _Handler()
    parser = expat.ParserCreate()
    parser.buffer_text = True
    # Only a document type can declare entities, so without one no entity can be expanded.
    parser.StartDoctypeDeclHandler = handler.refuse_doctype
    parser.StartElementHandler = handler.start
    parser.EndElementHandler = handler.end
    parser.CharacterDataHandler = handler.text
    try:
        parser.Parse(data if data.startswith(_UTF_16) else _without_control(data), True)
    except (expat.ExpatError, LookupError, UnicodeError, ValueError) as error:
        raise ReportError(f"the report is not readable: {error}") from None
    return handler.tests


@dataclass
class _Case:
    classname: str
    name: str
    file: str | None
    result: str | None = None
    message: str = ""


@dataclass
class _Handler:
    tests: list[ReportedTest] = field(default_factory=list)
    stack: list[str] = field(default_factory=list)
    case: _Case | None = None

    def refuse_doctype(self, *_: object) -> None:
        raise ReportError("it declares a document type, which a test report must not have")

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        if not self.stack and tag not in ("testsuite", "testsuites"):
            raise ReportError(f"its root is <{tag[:40]}>, expected <testsuites> or <testsuite>")
        if len(self.stack) >= REPORT_DEPTH:
            raise ReportError(f"its elements are nested more than {REPORT_DEPTH} deep")
        if tag == "testcase":
            if len(self.tests) >= REPORT_TESTS:
                raise ReportError(f"it has more than {REPORT_TESTS} tests")
            if self.case is not None:
                raise ReportError("it has nested tests")
            states = (attributes.get(name, "").lower() for name in ("status", "result"))
            not_run = next((state for state in states if state in _NOT_RUN), None)
            known = (attributes.get("classname", ""), attributes.get("name", ""), attributes.get("file"))
            self.case = _Case(*known, not_run, not_run or "")
        elif self.case is not None and tag in _NOT_PASSED:
            if self.case.result is None or self.case.result in _UNPASSED:  # a failure outweighs a skip
                self.case.result = _XFAIL if tag == "skipped" and attributes.get("type") == _XFAIL else tag
            self.add_message(f"{tag}: {attributes.get('message', '')}")
        self.stack.append(tag)

    def end(self, tag: str) -> None:
        self.stack.pop()
        if tag == "testcase" and (case := self.case) is not None:
            unpassed = None if case.result is None else _UNPASSED.get(case.result)
            message = case.message[:MESSAGE_CHARACTERS].strip()
            self.tests.append(
                ReportedTest(case.classname, case.name, case.file, case.result is None, message, unpassed)
            )
            self.case = None

    def text(self, data: str) -> None:
        if self.case is not None and self.stack[-1] in _NOT_PASSED:
            self.add_message(f"\n{data}")

    def add_message(self, text: str) -> None:
        if self.case is not None and len(self.case.message) < MESSAGE_CHARACTERS:
            self.case.message += text[:MESSAGE_CHARACTERS]


def _without_control(data: bytes) -> bytes:
    # Not by a function for each match: a report of control characters would take 20 s.
    for character in _CONTROL:
        data = data.replace(b"%c" % character, b"#x%02X" % character)
    return data


def counted(tests: Iterable[ReportedTest], also_passed: Collection[UnpassedResult]) -> list[ReportedTest]:
    """Return the tests with these results as passed."""
    return [replace(test, passed=True, message="") if test.unpassed in also_passed else test for test in tests]


# Matching of reported tests to named ones


def judge_named(reported: Sequence[ReportedTest], named: Sequence[str]) -> list[TestVerdict]:
    """Return one verdict for each named test: passed if it was reported, and always as passed. A test that was reported
    under a form of the name counts only if none was under the name itself.
    """
    exact: dict[tuple[str | None, str], list[ReportedTest]] = {}
    changed: dict[tuple[str | None, str], list[ReportedTest]] = {}
    for test in reported:
        for by_key, names in ((exact, {test.name}), (changed, _forms(test.name))):
            for name in names:
                by_key.setdefault((test.classname, name), []).append(test)
                by_key.setdefault((None, name), []).append(test)
        if "[" in test.name:
            for classname in (test.classname, None):
                exact.setdefault((classname, test.name.partition("[")[0]), []).append(test)
    return [_verdict(name, _reports_of(name, exact) or _reports_of(name, changed)) for name in named]


def _forms(name: str) -> set[str]:
    """Return the other forms of a test's name in SWE-bench. Its harness cuts names at the first blank, which may be within
    parameters, keeps only the end of a parameter that is an absolute path, and writes Matplotlib's mouse buttons as numbers.
    """
    first = name.replace("MouseButton.LEFT", "1").replace("MouseButton.RIGHT", "3").partition(" ")[0]
    return {first, _without_folders(first)} if "[" in first else set()


def _without_folders(name: str) -> str:
    """Replace an absolute path at the end of the parameters by `/` and its last part. Its harness has the expression
    `(?<!\\])\\[/(?!/)[^*]*/([^/*]*)\\]$`. Searching for that takes time quadratic in the length, which the policy controls.
    """
    last, star = name.rfind("/"), name.rfind("*")
    if not name.endswith("]") or star > last:
        return name
    start = name.find("[/", star + 1)
    while 0 <= start < last - 1:
        if name[start + 2] != "/" and name[start - 1 : start] != "]":
            return f"{name[:start]}[/{name[last + 1 :]}"
        start = name.find("[/", start + 1)
    return name


def _reports_of(name: str, by_key: dict[tuple[str | None, str], list[ReportedTest]]) -> list[ReportedTest]:
    path, separator, rest = name.removeprefix("./").partition("::")
    if not separator:
        names, bracket, parameters = name.partition("[")
        of_class, _, function = names.rpartition(".")
        found = by_key.get((None, _reportable(function + bracket + parameters)), []) if of_class else []
        found = [test for test in found if f".{test.classname}".endswith(f".{_reportable(of_class)}")]
        return found + by_key.get((None, _reportable(name)), [])
    keys = [_address(path, rest), (_reportable(path), _reportable(rest))]
    # Class names of other languages contain `::` too: cargo-nextest's are `package::binary`.
    keys += [(_reportable(name[: at.start()]), _reportable(name[at.end() :])) for at in re.finditer("::", name)]
    # All tests with this name must pass, because the agent may have added one that passes.
    found = [test for key in keys for test in by_key.get(key, []) if not _of_another_file(test, path)]
    return found + by_key.get((None, _reportable(name)), [])


def _address(path: str, rest: str) -> tuple[str, str]:
    """Return the `classname` and `name` under which pytest reports a node id: dots for slashes, classes after the
    module.
    """
    names, bracket, parameters = rest.partition("[")
    *classes, function = names.split("::")
    module = re.sub(r"\.py$", "", path.replace("/", "."))
    return _reportable(".".join([module, *classes])), _reportable(function + bracket + parameters)


# The characters that pytest considers invalid in XML; it writes them as #x1B or #x110000.
_UNREPORTABLE = re.compile("[^\t\n\r\x20-\x7e\x80-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def _reportable(name: str) -> str:
    def escaped(match: re.Match[str]) -> str:
        code = ord(match.group())
        return f"#x{code:02X}" if code <= 0xFF else f"#x{code:04X}"

    return _UNREPORTABLE.sub(escaped, name)


def _of_another_file(test: ReportedTest, path: str) -> bool:
    """Whether the test is from another file with a similar classname, which the agent may have planted.
    `tests.unit/test_a.py` and `tests/unit/test_a.py` have the same classname, and the classname of
    `tests/test_a/test_b.py` begins like those of classes in `tests/test_a.py`. An inherited test has the file of its
    base class, and the classname of the class that inherits it.
    """
    if test.file is None or test.file == path:
        return False
    reported, wanted = _module(test.file), _module(path)
    return reported == wanted or (reported.startswith(f"{wanted}.") and f"{test.classname}.".startswith(f"{reported}."))


def _module(path: str) -> str:
    return re.sub(r"\.py$", "", path.strip("/").replace("/", "."))


def _verdict(name: str, reports: Sequence[ReportedTest]) -> TestVerdict:
    if not reports:
        return TestVerdict(name=name, passed=False, message="was not reported")
    # A name that SWE-bench has cut stands for several tests, and its harness does not see those that are skipped.
    is_cut = "[" in name and len({test.name for test in reports}) > 1 and all(" " in test.name for test in reports)
    bad = [test for test in reports if not test.passed]
    if is_cut and len(bad) < len(reports):
        bad = [test for test in bad if test.unpassed is not UnpassedResult.SKIPPED]
    return TestVerdict(name=name, passed=not bad, message=bad[0].message if bad else "")


def judge_all(reported: Sequence[ReportedTest], hidden: Sequence[TaskFile]) -> list[TestVerdict]:
    """Return one verdict for each test that counts if the task names none.

    If the task has hidden test files, only their tests count, because planted tests would raise the fraction. Each test
    that they define must be reported, because code under test could end the session before failing tests. Without
    hidden test files every reported test counts.
    """
    files = [file for file in hidden if _is_test_file(file.path)]
    if not files:
        return [_verdict(_node_id(test), [test]) for test in reported]
    verdicts: list[TestVerdict] = []
    for file in files:
        tests = _tests_of(reported, file.path)
        verdicts += [_verdict(_node_id(test), [test]) for test in tests]
        module = _module(file.path)
        seen = {(test.classname.rpartition(".")[2], test.name.partition("[")[0]) for test in tests}
        for classes, function in defined_tests(file.data()):
            owner = classes[-1] if classes else module.rpartition(".")[2]
            if (owner, function) not in seen:
                verdicts.append(_verdict("::".join([file.path, *classes, function]), []))
        is_known = any(verdict.name.startswith(f"{file.path}::") for verdict in verdicts)
        if not tests and not is_known and may_define_tests(file.data()):
            verdicts.append(TestVerdict(name=file.path, passed=False, message="no test of this file was reported"))
    return verdicts


def has_tests(hidden: Sequence[TaskFile]) -> bool:
    """Whether hidden files define tests, each of which must be reported."""
    return any(_is_test_file(file.path) and may_define_tests(file.data()) for file in hidden)


def _is_test_file(path: str) -> bool:
    name = PurePosixPath(path).name
    return name.endswith(".py") and (name.startswith("test_") or name.endswith("_test.py"))


def _tests_of(reported: Sequence[ReportedTest], path: str) -> list[ReportedTest]:
    """Return the tests of a file. pytest reports paths relative to its root folder, which may be above or below the
    working directory.
    """
    module = _module(path)
    exact = [test for test in reported if _in_module(test, module) and not _of_another_file(test, path)]
    alike = [test for test in reported if _ends_alike(test, module)]
    # A file that the agent planted deeper has a longer path than the hidden one, because all paths have the same root.
    files = sorted({_module(test.file) for test in alike if test.file}, key=len)
    above = [file for file in files if file.endswith(f".{module}")]
    chosen = above[0] if above else files[-1] if files else None
    return exact or [test for test in alike if chosen is None or (test.file and _module(test.file) == chosen)]


def _in_module(test: ReportedTest, module: str) -> bool:
    # A file that is skipped or broken as a whole is reported as one test with this name and no class.
    return (test.classname or test.name) == module or test.classname.startswith(f"{module}.")


def _ends_alike(test: ReportedTest, module: str) -> bool:
    if test.file is None:
        return f".{module}." in f".{test.classname}."
    reported = _module(test.file)
    return reported.endswith(f".{module}") or module.endswith(f".{reported}")


def _node_id(test: ReportedTest) -> str:
    if test.file and test.classname.startswith(module := _module(test.file)):
        classes = [part for part in test.classname[len(module) :].split(".") if part]
        return "::".join([test.file, *classes, test.name])
    return f"{test.classname}::{test.name}" if test.classname else test.name


_DYNAMIC = frozenset({"exec", "globals", "load_tests", "setattr", "type", "vars"})
"""Functions with which a file may define tests under any name."""


def may_define_tests(source: bytes) -> bool:
    """Whether a file may have tests; False for helpers that are named like a test file."""
    try:
        nodes = list(ast.walk(ast.parse(source)))
    except (SyntaxError, ValueError, RecursionError):
        return True
    for node in nodes:
        match node:
            case ast.ClassDef(bases=bases) if any("test" in ast.unparse(base).lower() for base in bases):
                return True
            case ast.ClassDef(name=name):
                names = [name]
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names = [] if _is_decorated(node, "fixture") else [name]
            case ast.alias(name=name, asname=known_as):
                names = [known_as or name]
            case ast.Name(id=name) if name in _DYNAMIC:
                return True
            case _:
                continue
        if any(name.lower().startswith("test") or name in ("*", "load_tests") for name in names):
            return True
    return False


_Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def defined_tests(source: bytes) -> list[tuple[tuple[str, ...], str]]:
    """Return the tests that a file defines by pytest's default names: (classes, function); none inside `if` and the
    like. Fixtures, and base classes that the file deletes, are not tests.
    """
    try:
        return list(_defined(ast.parse(source).body, ()))
    except (SyntaxError, ValueError, RecursionError):
        return []


def _defined(body: Sequence[ast.stmt], classes: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], str]]:
    for statement in _kept(body):
        if isinstance(statement, ast.ClassDef):
            if _is_test_class(statement):
                yield from _defined(statement.body, (*classes, statement.name))
        elif statement.name.startswith("test") and not _is_decorated(statement, "fixture", "property"):
            yield classes, statement.name


def _kept(body: Sequence[ast.stmt]) -> Iterable[_Definition]:
    """Return the functions and classes that still have their names at the end."""
    found: dict[str, _Definition] = {}
    for statement in body:
        removed: Sequence[ast.expr] = ()
        if isinstance(statement, _Definition):
            found[statement.name] = statement
        elif isinstance(statement, ast.Delete):
            removed = statement.targets
        elif (
            isinstance(statement, ast.Assign)
            and isinstance(statement.value, ast.Constant)
            and not statement.value.value
        ):
            removed = statement.targets  # as in `Base = None` and `test_data.__test__ = False`
        for target in removed:
            if isinstance(target, ast.Attribute) and target.attr == "__test__":
                target = target.value
            if isinstance(target, ast.Name):
                found.pop(target.id, None)
    return found.values()


def _is_decorated(definition: _Definition, *names: str) -> bool:
    called = (each.func if isinstance(each, ast.Call) else each for each in definition.decorator_list)
    return any(ast.unparse(decorator).endswith(names) for decorator in called)


def _is_test_class(node: ast.ClassDef) -> bool:
    """Whether pytest collects the class: it is not switched off, not abstract, and has no constructor of its own."""
    functions = [line for line in node.body if isinstance(line, ast.FunctionDef | ast.AsyncFunctionDef)]
    bases = [ast.unparse(base) for base in node.bases]
    switched_off = any(
        isinstance(line, ast.Assign) and any(isinstance(to, ast.Name) and to.id == "__test__" for to in line.targets)
        for line in node.body
    ) or any(_is_decorated(function, "abstractmethod") for function in functions)
    is_constructed = (
        any(function.name in ("__init__", "__new__") for function in functions)
        or _is_decorated(node, "dataclass")
        or any(base.endswith("NamedTuple") for base in bases)
    )
    is_case = any(base.endswith("TestCase") for base in bases)
    return not switched_off and (is_case or (node.name.startswith("Test") and not is_constructed))
