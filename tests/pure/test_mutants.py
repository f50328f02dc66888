"""The command that tries mutants: which changes it makes, and that the faults by hand fit the modules as they are."""

import ast
from pathlib import Path

import pytest

from tests.mutants import changes, equivalent, faults

ROOT = Path(__file__).parents[2]


def changed(source):
    """The mutants of a function's body, a line each."""
    head = "def f(a, b):\n"
    body = "".join(f"    {line}\n" for line in source.splitlines())
    prefix = "def f(a, b):\n    "
    return [mutant.source.removeprefix(prefix).replace("\n    ", "\n") for mutant in changes.mutants(head + body)]


@pytest.mark.parametrize(
    ("source", "want"),
    [
        ("return a < b", ["return a <= b"]),
        ("return a is b in a", ["return a is not b in a", "return a is b not in a"]),
        ("return a + 1", ["return a - 1", "return a + 2"]),
        ("return a and b", ["return a or b"]),
        ("return not a", ["return a"]),
        ("return a and (not b)", ["return a or not b", "return a and b"]),
        ("return [b for b in a if not b]", ["return [b for b in a if b]"]),
        ("return a(b, a)", ["return a(a, b)"]),
        ("return min(a, b)", ["return max(a, b)"]),
        ("return True", ["return False"]),
        ("a.b = b", ["pass"]),
        ("a(b)", ["pass"]),
        ("log.info(b)", []),
        ('"""text"""', []),
    ],
)
def test_one_change_at_a_time(source, want):
    assert changed(source) == want


def test_a_branch_is_left_out_and_what_ends_it_goes_on():
    assert changed("if a:\n    return b") == ["pass", "if a:\n    pass"]


def test_a_mutant_tells_its_line_and_the_module_is_as_it_was_after_all_of_them():
    source = "def f(a):\n    b = a * 2\n    return not b == 1\n"
    found = list(changes.mutants(source))
    assert {(mutant.line, mutant.was) for mutant in found} == {(2, "b = a * 2"), (3, "return not b == 1")}
    assert {mutant.change for mutant in found if mutant.line == 2} == {
        "left out: b = a * 2",
        "a * 2 -> a // 2",
        "2 -> 3",
    }
    assert all(mutant.source != ast.unparse(ast.parse(source)) for mutant in found)
    assert len({mutant.source for mutant in found}) == len(found)


def test_decorators_stay_as_they_are():
    assert list(changes.mutants("@dataclass(frozen=True)\nclass A:\n    b: int\n")) == []


@pytest.mark.parametrize("fault", faults.FAULTS, ids=lambda fault: fault.name)
def test_a_fault_by_hand_fits_its_module(fault):
    module, source = faults.faulty(fault, ROOT)
    ast.parse(source)
    assert source != (ROOT / module).read_text()
    assert all((ROOT / path.split("::")[0]).is_file() for path in fault.tests)


def test_a_fault_that_fits_no_module_is_found():
    with pytest.raises(LookupError, match="0 places"):
        faults.faulty(faults.Fault("f", "no such\ntext", "", ()), ROOT)


def test_what_is_equivalent_is_still_there():
    modules = {module for module, *_ in equivalent.EQUIVALENT}
    there = {
        (module, mutant.was, mutant.change)
        for module in modules
        for mutant in changes.mutants((ROOT / module).read_text())
    }
    assert equivalent.EQUIVALENT.keys() <= there
