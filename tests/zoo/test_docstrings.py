"""What the zoo's adapters learn from."""

import subprocess
import sys

import pytest

from pliant.errors import ModelError
from pliant.zoo import docstrings
from pliant.zoo.docstrings import Docstring


@pytest.mark.parametrize("part", docstrings.PARTS)
def test_every_part_has_much_to_say(part: str) -> None:
    found = docstrings.docstrings(part)
    assert len(found) > 80
    assert len({text for _, text in found}) == len(found)
    assert all(text.endswith(".") and "\n" not in text and 4 <= len(text.split()) <= 24 for _, text in found)


@pytest.mark.parametrize("part", docstrings.PARTS)
def test_the_split_is_a_partition(part: str) -> None:
    training, held_out = docstrings.training(part), docstrings.held_out(part)
    assert not {text for _, text in training} & {text for _, text in held_out}
    assert sorted(training + held_out) == sorted(docstrings.docstrings(part))
    assert 0.05 < len(held_out) / len(docstrings.docstrings(part)) < 0.25


def test_subjects_say_what_is_described() -> None:
    found = dict(docstrings.docstrings("asyncio"))
    assert found["Event.clear()"].startswith("Reset the internal flag to false.")
    assert Docstring("Event.set()", "Sets.").document == "Event.set()\n\nSets."
    assert any(subject.startswith("class ") for subject in found)
    assert not any("._" in subject.replace(".__", "") or subject.startswith("_") for subject in found)


def test_a_python_without_sources_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(docstrings.PARTS, "nothing", ("no_such_module", "sys"))
    with pytest.raises(ModelError, match="lacks the sources of nothing"):
        docstrings.docstrings("nothing")


def test_nothing_is_imported_for_it() -> None:
    code = (
        "import sys; from pliant.zoo import docstrings; docstrings.docstrings('unittest'); "
        "print([m for m in ('unittest', 'doctest', 'torch') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
