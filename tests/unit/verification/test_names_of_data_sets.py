"""Names of tests in data sets: reported tests are found, and similar names are not mistaken for them."""

import pytest

from agent_runtime.grading.junit import ReportedTest, judge_named

REPORTED = [
    ReportedTest("tests.test_a.TestB", "test_c[x y]", "tests/test_a.py", True),
    ReportedTest("tests.test_a.TestB", "test_c[x z]", "tests/test_a.py", False),
    ReportedTest("tests.test_a.TestB", "test_d[u v]", "tests/test_a.py", True),
    ReportedTest("tests.test_a", "test_e", "tests/test_a.py", True),
    ReportedTest("tests.test_p", "test_i[/opt/lib/__init__.py]", "tests/test_p.py", True),
    ReportedTest("tests.test_p", "test_i[/]", "tests/test_p.py", True),
    ReportedTest("tests.test_p", "test_i[//opt/x]", "tests/test_p.py", True),
    ReportedTest("tests.test_p", "test_k[/b]", "tests/test_p.py", True),
    ReportedTest("tests.test_p", "test_k[/a/b]", "tests/test_p.py", False),
    ReportedTest("tests.test_p", "test_j[MouseButton.LEFT-x]", "tests/test_p.py", True),
    ReportedTest("tests.test_p", "test_j[MouseButton.RIGHT-x y]", "tests/test_p.py", False),
    ReportedTest("", "test_f (app.tests.Case)", None, True),
    ReportedTest("", "Reads a::b as text.", None, True),
    ReportedTest("", "adds", None, True),
    ReportedTest("", "adds - negative ones", None, False),
]


@pytest.mark.parametrize(
    ("name", "passed"),
    [
        ("tests/test_a.py::TestB::test_d[u", True),
        ("tests/test_a.py::TestB::test_c[x", False),
        ("tests/test_p.py::test_i[/__init__.py]", True),
        ("tests/test_p.py::test_i[/]", True),
        ("tests/test_p.py::test_i[/x]", False),
        ("tests/test_p.py::test_k[/b]", True),
        ("tests/test_p.py::test_k[/a/b]", False),
        ("tests/test_p.py::test_j[1-x]", True),
        ("tests/test_p.py::test_j[3-x", False),
        ("adds", True),
        ("test_e", True),
        ("test_f (app.tests.Case)", True),
        ("test_f (app.tests.Other)", False),
        ("Reads a::b as text.", True),
        ("tests/other.py::test_e", False),
    ],
)
def test_name_matches_the_tests_that_its_data_set_means(name: str, passed: bool) -> None:
    (verdict,) = judge_named(REPORTED, [name])
    assert verdict.passed is passed
