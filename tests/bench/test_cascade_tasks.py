"""What the cascade's benchmark promises of its data: splits that share no text."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from pliant.bench.cascade import compare, tasks
from pliant.bench.cascade.tasks import Splits
from pliant.bench.report import Options
from pliant.errors import DataError
from pliant.training.labelled_texts import FEWEST


def _share_nothing(splits: Splits) -> bool:
    parts = [[text.text for text in texts] for texts in vars(splits).values()]
    alone = all(len(set(part)) == len(part) for part in parts)
    return alone and not any(set(one) & set(other) for one, other in combinations(parts, 2))


def _sst2(folder: Path, train: int) -> None:
    (folder / "sst2").mkdir()
    for name, texts in {"train": train, "dev": 330, "test": 20}.items():
        rows = [f'the "{name} film {number}\t{number % 2}' for number in range(texts)]
        rows += ["the same everywhere\t1", "the same everywhere\t1"]
        (folder / "sst2" / f"{name}.tsv").write_text("\n".join(rows) + "\n")


def _clinc150(folder: Path, labels: int, **sizes: int) -> dict[str, list[list[str]]]:
    """What is written there: so many texts of each label and part, sorted by label."""
    content = {
        name: [[f"{name} {number} of {label}", f"intent {label}"] for label in range(labels) for number in range(texts)]
        for name, texts in sizes.items()
    }
    (folder / "clinc150").mkdir()
    (folder / "clinc150" / "data_full.json").write_text(json.dumps(content))
    return content


def test_texts_to_choose_on_are_taken_from_those_to_train_on_where_development_texts_are_few(tmp_path: Path) -> None:
    _sst2(tmp_path, train=1600)
    splits = tasks.sst2(tmp_path)
    assert _share_nothing(splits)
    assert sum(text.text.startswith('the "train') for text in splits.choose) in range(1498, 1501)
    assert 100 <= len(splits.train) <= 102
    assert len(splits.choose) == pytest.approx(1830, abs=2)
    assert len(splits.test) == 21
    assert splits.labels == ("negative", "positive")
    assert splits.train[0].text.startswith('the "train film ')
    assert 200 < sum(text.text.startswith('the "train') for text in splits.choose[:300]) < 300
    assert tasks.sst2(tmp_path) == splits


def test_a_validation_split_chooses(tmp_path: Path) -> None:
    (tmp_path / "clinc150").mkdir()
    content = {
        name: [[f"{name} {number}", f"intent {number % 3}"] for number in range(texts)]
        for name, texts in {"train": 40, "val": 1200, "test": 50, "oos_test": 10}.items()
    }
    (tmp_path / "clinc150" / "data_full.json").write_text(json.dumps(content))
    splits = tasks.clinc150(tmp_path)
    assert _share_nothing(splits)
    assert splits.sizes() == {"train": 40, "choose": 1200, "test": 50}


def test_the_first_texts_of_a_split_hold_all_labels_though_its_file_is_sorted(tmp_path: Path) -> None:
    content = _clinc150(tmp_path, 150, train=10, val=20, test=30)
    splits = tasks.clinc150(tmp_path)
    assert len({text.label for text in splits.test[:1000]}) == 150
    assert len({text.label for text in splits.choose[:1000]}) == 150
    assert [text.text for text in splits.train] == [text for text, _ in content["train"]]
    assert tasks.clinc150(tmp_path) == splits


def test_pairs_ask_for_the_same_thing_or_for_another_one_of_their_domain(tmp_path: Path) -> None:
    _clinc150(tmp_path, 9, train=8, val=100, test=8)
    domains = {f"domain {place}": [f"intent {3 * place + label}" for label in range(3)] for place in range(3)}
    (tmp_path / "clinc150" / "domains.json").write_text(json.dumps(domains))
    splits = tasks.clinc150_pairs(tmp_path)
    assert splits.labels == ("different", "same")
    assert _share_nothing(splits)
    assert tasks.clinc150_pairs(tmp_path) == splits
    for part in (splits.train, splits.choose, splits.test):
        seen: dict[str, list[str]] = {"same": [], "different": []}
        for (first, second), label in part:
            one, other = (int(text.split()[-1]) for text in (first, second))
            assert (one == other) == (label == "same")
            assert one // 3 == other // 3
            seen[label] += [first, second]
        assert all(len(set(texts)) == len(texts) for texts in seen.values())
        assert 0.3 < len(seen["same"]) / len([*seen["same"], *seen["different"]]) < 0.7


def test_the_zoos_topics_are_enough_to_choose_and_test_on() -> None:
    splits = tasks.topics()
    assert _share_nothing(splits)
    assert len(splits.choose) >= FEWEST
    assert len(splits.test) >= 100


def test_missing_data_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train\.tsv.*--data"):
        tasks.sst2(tmp_path)


@pytest.mark.parametrize(
    ("cells", "told"),
    [(["sst3"], "--cells: got sst3; tasks are topics, sst2"), (["sst2"], "no task is left to measure")],
)
def test_tasks_that_cannot_be_measured_are_told(cells: list[str], told: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=told):
        compare.run(Options(True, None, "cpu", tmp_path, cells))
