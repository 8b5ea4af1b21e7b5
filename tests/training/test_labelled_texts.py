"""Labelled texts: each mistake in a file is told with its line, and halves share nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pliant.errors import DataError
from pliant.texts import Pair
from pliant.training import labelled_texts
from pliant.training.labelled_texts import FEWEST, MOST, LabelledText, read, split
from pliant.zoo import corpus

LABELS = ("no", "yes")


def write(folder: Path, *lines: str, count: int = FEWEST) -> str:
    made = [{"text": f"text {number}", "label": LABELS[number % 2], "id": number} for number in range(count)]
    path = folder / "texts.jsonl"
    path.write_text("\n".join([*map(json.dumps, made), *lines]), encoding="utf-8")
    return str(path)


def test_a_file_is_read_and_each_text_counts_once(tmp_path: Path) -> None:
    again = json.dumps({"text": "text 3", "label": "no"})
    found = read(write(tmp_path, "", again, '{"text": "a\u2028b", "label": "yes"}'), LABELS)
    assert len(found) == FEWEST + 1
    assert found[3] == LabelledText("text 3", "yes")
    assert found[-1].text == "a\u2028b"


def test_pairs_are_read_and_each_counts_once(tmp_path: Path) -> None:
    lines = [{"text": "a", "text_pair": str(number // 2), "label": "no"} for number in range(2 * FEWEST)]
    path = write(tmp_path, *map(json.dumps, lines), count=0)
    found = read(path, LABELS)
    assert len(found) == FEWEST
    assert found[3] == LabelledText(Pair("a", "3"), "no")


def test_a_mark_at_the_beginning_and_other_letters_are_read_whatever_the_locale(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"text": "größer", "label": "yes"}, ensure_ascii=False))
    plain = read(path, LABELS)
    Path(path).write_bytes(b"\xef\xbb\xbf" + Path(path).read_bytes())
    assert read(path, LABELS) == plain
    assert plain[-1].text == "größer"


def test_the_zoo_has_texts_that_its_models_have_not_seen() -> None:
    found = read(labelled_texts.ZOO, corpus.LABELS)
    assert len(found) >= FEWEST
    assert not {text.text for text in found} & {text.text for text in corpus.training()}


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", "line 202: the line: Invalid JSON"),
        ('{"text": 1, "label": "no"}', "line 202: text: Input should be a valid string"),
        ('{"text": "a"}', "line 202: label: Field required"),
        ('{"text": "a", "label": "maybe"}', "line 202: got label 'maybe'; the levels know: no, yes"),
        ('{"text": " ", "label": "no"}', "line 202: the text is empty"),
        ('{"text": "a", "text_pair": 1, "label": "no"}', "line 202: text_pair: Input should be a valid string"),
        ('{"text": "a", "text_pair": "b", "label": "no"}', "line 202: some lines have a text_pair, others none"),
    ],
)
def test_each_mistake_is_told_with_its_line(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(DataError) as error:
        read(write(tmp_path, "", line), LABELS)
    assert told in str(error.value)
    assert "\n" not in str(error.value)


def test_too_few_texts_and_no_file_are_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has 7 different texts; at least 200 are needed"):
        read(write(tmp_path, count=7), LABELS)
    with pytest.raises(DataError, match=r"cannot be read: No such file.*choose zoo/topics, or a file of JSON lines"):
        read(str(tmp_path / "nothing"), LABELS)
    (tmp_path / "odd").write_bytes(b"\xff")
    with pytest.raises(DataError, match="is not UTF-8"):
        read(str(tmp_path / "odd"), LABELS)


def test_the_two_parts_share_nothing_and_follow_from_the_seed() -> None:
    texts = [LabelledText(str(number), "no") for number in range(MOST + 100)]
    calibrate, choose = split(texts, 1)
    assert (len(calibrate), len(choose)) == (500, MOST - 500)
    assert [len(part) for part in split(texts[:1000], 1)] == [250, 750]
    assert not set(calibrate) & set(choose)
    assert split(texts, 1) == (calibrate, choose)
    assert split(texts, 2) != (calibrate, choose)
    assert [len(part) for part in split(texts[:FEWEST], 1)] == [100, FEWEST - 100]
