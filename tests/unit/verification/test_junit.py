"""A forged, broken or hostile report must never become a passed test."""

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from xml.sax.saxutils import quoteattr

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_runtime.grading.junit import (
    MESSAGE_CHARACTERS,
    REPORT_DEPTH,
    ReportedTest,
    ReportError,
    counted,
    defined_tests,
    judge_all,
    judge_named,
    parse_report,
)
from rollout_api.files import TaskFile
from rollout_api.tasks import UnpassedResult


def report(*cases: str) -> bytes:
    return f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>".encode()


def case(classname: str, name: str, inside: str = "", file: str | None = None) -> str:
    where = f" file={quoteattr(file)}" if file is not None else ""
    return f"<testcase classname={quoteattr(classname)} name={quoteattr(name)}{where}>{inside}</testcase>"


def passed(reported: bytes, *named: str) -> list[bool]:
    return [verdict.passed for verdict in judge_named(parse_report(reported), named)]


def test_only_a_case_without_failure_error_or_skip_has_passed() -> None:
    data = report(
        *(case("m", tag, f"<{tag} message='no'/>") for tag in ("failure", "error", "skipped")), case("m", "ok")
    )
    assert [test.passed for test in parse_report(data)] == [False, False, False, True]


def test_case_with_a_million_failures_is_read_at_once_and_its_message_is_short() -> None:
    # Time that grew with their square would be an hour, in which the engine does nothing for other rollouts.
    test = parse_report(report(case("m", "t", "<error/>" * 1_000_000)))[0]
    assert not test.passed
    assert len(test.message) <= MESSAGE_CHARACTERS


@pytest.mark.parametrize(
    "state", ['status="notrun" result="suppressed"', 'status="run" result="skipped"', 'status="disabled"']
)
def test_case_whose_attribute_marks_it_as_not_run_has_not_passed(state: str) -> None:
    data = report(f'<testcase classname="S" name="a" {state}/>', '<testcase classname="S" name="b" status="run"/>')
    assert passed(data, "S::a", "S::b") == [False, True]


def test_class_names_with_colons_are_found() -> None:
    data = report(case("tools::basic", "case_a"), case("tools::bin/cli", "args::parse"), case("tools", "basic::case_b"))
    named = ("tools::basic::case_a", "tools::bin/cli::args::parse", "tools::basic::case_b", "tools::basic::case_c")
    assert passed(data, *named) == [True, True, True, False]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"<testsuites><testsuite><testcase classname='m' name='t'/>",
        b"<html><testcase classname='m' name='t'/></html>",
        b"<!DOCTYPE x [<!ENTITY a 'aaaa'>]><testsuites/>",
        b"<!DOCTYPE testsuites SYSTEM 'file:///etc/passwd'><testsuites/>",
        b"<testsuites>&undefined;</testsuites>",
        b"<testsuites><testcase name='a'><testcase name='b'/></testcase></testsuites>",
        b"<testsuites>" + b"<a>" * REPORT_DEPTH + b"</a>" * REPORT_DEPTH + b"</testsuites>",
        b"<?xml version='1.0' encoding='no-such'?><testsuites/>",
        b"\xff\xfe\x00",
    ],
)
def test_a_report_that_is_cut_or_hostile_is_refused(data: bytes) -> None:
    with pytest.raises(ReportError):
        parse_report(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_report_or_a_clear_refusal(data: bytes) -> None:
    for form in (data, b"<testsuites>" + data + b"</testsuites>"):
        with contextlib.suppress(ReportError):  # and nothing else
            parse_report(form)


# Characters that XML 1.0 allows; parse_report must return every name unchanged.
TEXT = st.text(
    st.characters(exclude_categories=["Cs", "Cc"], exclude_characters="\ufffe\uffff"), min_size=1, max_size=30
)


@given(TEXT, TEXT, st.booleans())
def test_names_with_odd_characters_are_found_again(function: str, parameters: str, ok: bool) -> None:
    function = function.replace(":", "").replace("[", "") or "test"
    name = f"{function}[{parameters}]"
    data = report(case("tests.test_a.TestB", name, "" if ok else "<failure/>"))
    assert passed(data, f"tests/test_a.py::TestB::{name}") == [ok]


def test_parameters_may_look_like_node_ids() -> None:
    data = report(case("tests.test_a", "test_x[a::b.py::c/d[0]]"))
    assert passed(data, "tests/test_a.py::test_x[a::b.py::c/d[0]]", "tests/test_a.py::c/d[0]]") == [True, False]


def test_a_test_named_without_parameters_needs_all_of_them_to_pass() -> None:
    good, bad = case("test_a", "test_x[1]"), case("test_a", "test_x[2]", "<failure/>")
    assert passed(report(good), "test_a.py::test_x") == [True]
    assert passed(report(good, bad), "test_a.py::test_x", "test_a.py::test_x[1]") == [False, True]


def test_a_name_without_a_file_means_the_tests_of_that_name_in_every_file() -> None:
    data = report(
        case("tests.test_a.TestB", "test_x[1.5]"),
        case("tests.test_c.TestB", "test_x[1.5]"),
        case("tests.test_c.OtherTestB", "test_x[1.5]", "<failure/>"),
    )
    assert passed(data, "TestB.test_x", "TestB.test_x[1.5]", "test_c.OtherTestB.test_x", "test_x") == [
        True,
        True,
        False,
        False,
    ]


def test_a_test_that_is_reported_twice_must_pass_twice() -> None:
    data = report(case("test_a", "test_x"), case("test_a", "test_x", "<error message='teardown'/>"))
    assert passed(data, "test_a.py::test_x") == [False]


def test_a_test_that_was_not_reported_has_failed() -> None:
    assert passed(report(case("test_a", "test_y")), "test_a.py::test_x", "test_a.py") == [False, False]


def test_a_planted_file_with_the_same_dotted_name_does_not_count() -> None:
    planted = case("tests.unit.test_a", "test_x", file="tests.unit/test_a.py")
    real = case("tests.unit.test_a", "test_x", file="tests/unit/test_a.py")
    inherited = case("tests.unit.test_a", "test_x", file="tests/shared.py")
    named = "tests/unit/test_a.py::test_x"
    assert [passed(report(one), named) for one in (planted, real, inherited)] == [[False], [True], [True]]


def test_other_makers_of_reports_are_named_by_class_and_name() -> None:
    data = report(case("com.example.CartTest", "adds"), case("example.com/x/y", "TestZ"), case("suite", "adds numbers"))
    assert passed(data, "com.example.CartTest::adds", "example.com/x/y::TestZ", "adds numbers") == [True, True, True]


HIDDEN = TaskFile(
    path="tests/test_a.py", content="class TestB:\n    def test_m(self): ...\ndef test_one(): ...\ndef helper(): ...\n"
)
ALL = (case("tests.test_a.TestB", "test_m"), case("tests.test_a", "test_one"))


def verdicts(*cases: str) -> dict[str, bool]:
    return {verdict.name: verdict.passed for verdict in judge_all(parse_report(report(*cases)), [HIDDEN])}


def test_test_is_not_graded_by_another_whose_name_starts_with_its_own() -> None:
    data = report(case("a.test.js", "adds"), case("a.test.js", "adds numbers", "<failure/>"))
    assert passed(data, "a.test.js::adds", "adds") == [True, True]


def test_ambiguous_name_of_two_tests_requires_both_to_pass() -> None:
    # The second is a unit test that an agent adds to the library, to be taken for the integration test.
    hidden, added = case("pkg::integration", "a::adds", "<failure/>"), case("pkg", "integration::a::adds")
    assert passed(report(hidden, added), "pkg::integration::a::adds") == [False]


def test_a_report_with_control_characters_is_read() -> None:
    data = report(case("m", "\x1b[0m is plain\0"), case("m", "b", "<failure message='\x1b[31mred'/>"))
    assert passed(data, "m::\x1b[0m is plain\0", "m::b") == [True, False]


def test_every_control_character_of_a_report_is_shown_as_its_code() -> None:
    for code in set(range(32)) - set(b"\t\n\r"):
        assert passed(report(case("m", f"a{chr(code)}b")), f"m::a#x{code:02X}b") == [True]


def test_a_report_of_control_characters_takes_no_long_time() -> None:
    started = time.process_time()
    with pytest.raises(ReportError):
        parse_report(b"<testsuites>" + b"\x01" * (30 << 20))
    assert time.process_time() - started < 8, "a function called for each of them would take 20 s"


def test_every_test_that_a_hidden_file_defines_must_be_reported() -> None:
    assert all(verdicts(*ALL).values())
    # Code under test that calls pytest.exit(returncode=0) leaves a valid report of the tests before it.
    assert verdicts(ALL[0]) == {"tests.test_a.TestB::test_m": True, "tests/test_a.py::test_one": False}
    assert verdicts() == {"tests/test_a.py::TestB::test_m": False, "tests/test_a.py::test_one": False}


def test_tests_planted_beside_the_hidden_ones_do_not_raise_the_fraction() -> None:
    planted = [case("tests.test_mine", f"test_{number}") for number in range(50)]
    assert verdicts(*ALL, *planted).keys() == verdicts(*ALL).keys()


def test_tests_in_a_folder_named_like_the_hidden_file_do_not_count() -> None:
    hidden = TaskFile(path="tests/test_a.py", content="def test_x(): pass\nclass TestB(Base): pass\n")
    planted = "tests/test_a/test_b.py"
    data = report(
        case("tests.test_a", "test_x", "<failure/>", "tests/test_a.py"),
        case("tests.test_a.TestB", "test_inherited", "", "tests/base.py"),
        *(case("tests.test_a.test_b", f"test_{n}", "", planted) for n in range(9)),
        case("tests.test_a.test_b.TestC", "test_y", "", planted),
    )
    assert [verdict.passed for verdict in judge_all(parse_report(data), [hidden])] == [False, True]
    assert passed(data, "tests/test_a.py::test_b::test_1") == [False]


def test_a_root_folder_above_or_below_the_working_directory_is_recognised() -> None:
    for folder in ("app/tests/", ""):
        module = f"{folder}test_a".replace("/", ".")
        file = f"{folder}test_a.py"
        assert all(verdicts(case(f"{module}.TestB", "test_m", "", file), case(module, "test_one", "", file)).values())
    assert all(verdicts(case("app.tests.test_a.TestB", "test_m"), case("app.tests.test_a", "test_one")).values())


@pytest.mark.parametrize("root", ["", "workspace/"], ids=["in the working directory", "above it"])
def test_planted_tests_do_not_stand_in_for_a_hidden_file_that_was_skipped_as_a_whole(root: str) -> None:
    dots = root.replace("/", ".")
    skipped = case("", f"{dots}test_h", "<skipped/>", f"{root}test_h.py")
    planted = case(f"{dots}sub.test_h", "test_a", file=f"{root}sub/test_h.py")
    verdicts = judge_all(
        parse_report(report(skipped, planted)), [TaskFile(path="test_h.py", content="def test_a(): 1")]
    )
    assert verdicts
    assert not any(verdict.passed for verdict in verdicts)


def test_without_hidden_test_files_every_reported_test_counts() -> None:
    data = parse_report(report(case("test_a", "test_x"), case("test_a", "test_y", "<skipped/>")))
    assert [verdict.passed for verdict in judge_all(data, [])] == [True, False]
    assert judge_all([], []) == []


def test_defined_tests_equal_those_that_pytest_collects() -> None:
    source = b"""
import abc, dataclasses, typing, unittest
class Base:
    def test_no(self): ...
class TestOff:
    __test__ = False
    def test_no(self): ...
class TestInit:
    def __init__(self): ...
    def test_no(self): ...
class TestAbstract(abc.ABC):
    @abc.abstractmethod
    def make(self): ...
    def test_no(self): ...
@dataclasses.dataclass
class TestData:
    name: str
    def test_no(self): ...
class TestPair(typing.NamedTuple):
    name: str
    def test_no(self): ...
def test_data(): ...
test_data.__test__ = False
def test_marked(): ...
test_marked.__test__ = True
class Cases(unittest.TestCase):
    def test_case(self): ...
    @property
    def test_folder(self): ...
class TestA:
    class TestB:
        async def test_deep(self): ...
"""
    assert defined_tests(source) == [((), "test_marked"), (("Cases",), "test_case"), (("TestA", "TestB"), "test_deep")]
    assert defined_tests(b"def broken(") == []


@pytest.mark.parametrize(
    ("source", "is_expected"),
    [
        ("import pytest\nLIMIT = 3\ndef make_user(): ...\n@pytest.fixture\ndef test_user(): ...", False),
        ("class Fake:\n    def call(self): ...", False),
        ("", False),
        ("if True:\n    def test_it(): ...", True),
        ("from shared import *", True),
        ("import unittest\nclass User(unittest.TestCase): pass", True),
        ("for n in range(3): globals()[f'check_{n}'] = None", True),
        ("def broken(", True),
    ],
)
def test_helpers_that_are_named_like_a_test_file_need_no_report(source: str, is_expected: bool) -> None:
    files = [TaskFile(path="test_it.py", content="def test_a(): ..."), TaskFile(path="test_utils.py", content=source)]
    verdicts = judge_all(parse_report(report(case("test_it", "test_a"))), files)
    assert [verdict.name for verdict in verdicts if not verdict.passed] == ["test_utils.py"] * is_expected


def test_fixtures_and_deleted_base_classes_are_not_expected_in_the_report(tmp_path: Path) -> None:
    file = tmp_path / "test_it.py"
    file.write_text(
        """
import unittest
import pytest

@pytest.fixture
def test_client(): return 1

@pytest.fixture(scope="module")
def test_module(): return 1

def test_real(test_client, test_module): pass

class Base(unittest.TestCase):
    def test_shared(self): assert self.number
class Other(unittest.TestCase):
    def test_other(self): assert self.number
class TestOne(Base, Other):
    number = 1
    def test_own(self): pass
del Base
Other = None
"""
    )
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", file.name]
    subprocess.run(command, cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    verdicts = judge_all(parse_report(report.read_bytes()), [TaskFile(path=file.name, content=file.read_text())])
    assert [verdict for verdict in verdicts if not verdict.passed] == []
    assert len(verdicts) == 4


UNPASSED = """
import pytest
@pytest.mark.xfail
def test_marked(): assert False
@pytest.mark.xfail(strict=True)
def test_better_than_marked(): pass
def test_imperative(): pytest.xfail("broken")
@pytest.mark.skip
def test_skipped(): pass
def test_good(): pass
def test_bad(): assert False
@pytest.mark.parametrize("v", ["a b", "a c", pytest.param("a d", marks=pytest.mark.skip)])
def test_cut(v): pass
@pytest.mark.parametrize("v", ["a b", pytest.param("a c", marks=pytest.mark.xfail(raises=OSError))])
def test_cut_bad(v): assert "b" in v
@pytest.mark.parametrize("v", [pytest.param(v, marks=pytest.mark.skip) for v in ("a b", "a c")])
def test_cut_skipped(v): pass
"""


def test_results_that_count_as_passed_are_those_that_pytest_reports(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(UNPASSED)
    report = tmp_path / "report.xml"
    command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", "-o", "junit_family=xunit1", "test_it.py"]
    subprocess.run(command, cwd=tmp_path, check=False, stdout=subprocess.PIPE)

    def passing(*also_passed: UnpassedResult) -> set[str]:
        names = [f"test_it.py::{function}" for _, function in defined_tests(UNPASSED.encode())]
        cut = [f"{name}[a" if "cut" in name else name for name in names]
        verdicts = judge_named(counted(parse_report(report.read_bytes()), also_passed), cut)
        return {verdict.name.partition("::test_")[2] for verdict in verdicts if verdict.passed}

    assert passing() == {"good", "cut[a"}
    assert passing(UnpassedResult.XFAIL) == {"good", "cut[a", "marked", "imperative"}
    both = passing(UnpassedResult.XFAIL, UnpassedResult.SKIPPED)
    assert both == {"good", "cut[a", "marked", "imperative", "skipped", "cut_skipped[a"}


@pytest.mark.parametrize(
    "inside",
    ["<failure/><skipped/>", "<skipped/><error/>", "<skipped/><failure/><skipped/>", "<failure type='pytest.xfail'/>"],
)
def test_failure_outweighs_a_skip_that_counts_as_passed(inside: str) -> None:
    (test,) = counted(parse_report(report(case("m", "t", inside))), list(UnpassedResult))
    assert not test.passed


def test_output_of_pytest_is_matched_by_its_own_node_ids(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "test_odd.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('v', ['a::b', 'x[y]', 'ü', '<&>', 'a b', '\\x1b', '\\n', '', 'a/b.py'])\n"
        "def test_v(v): pass\n"
        "class TestC:\n    class TestD:\n        @pytest.mark.parametrize('a,b', [(1, '.')])\n"
        "        def test_w(self, a, b): pass\n"
    )
    base = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--rootdir={tmp_path}"]
    listed = subprocess.run([*base, "--collect-only"], cwd=tmp_path, capture_output=True, text=True, check=True)
    ids = [line for line in listed.stdout.splitlines() if "::" in line]
    options = ["--junitxml=r.xml", "-o", "junit_family=xunit1"]
    subprocess.run([*base, *options], cwd=tmp_path, capture_output=True, check=True)
    assert len(ids) == 10
    assert passed((tmp_path / "r.xml").read_bytes(), *ids) == [True] * 10


def test_report_is_parsed_into_plain_test_data() -> None:
    assert parse_report(report(case("m", "t", "<failure message='m'>text</failure>"))) == [
        ReportedTest("m", "t", None, False, "failure: m\ntext")
    ]
