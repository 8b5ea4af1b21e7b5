"""The zoo's adapters, at a size that learns in seconds, as what is served and as PEFT sees them."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.decoders import perplexity
from tokenizers import Tokenizer
from typer.testing import CliRunner

from pliant import zoo
from pliant.cli import command
from pliant.errors import ModelError
from pliant.formats.adapter_info import read_adapter
from pliant.models import sources
from pliant.models.lora_layout import MODULES
from pliant.torchvision_ops import declare
from pliant.zoo import adapters, docstrings, shapes
from pliant.zoo.shapes import AdapterShape, LlamaShape

declare()
from peft import PeftModel  # noqa: E402
from transformers import LlamaForCausalLM  # noqa: E402

TINY = LlamaShape(
    layers=2,
    hidden=64,
    heads=2,
    kv_heads=1,
    intermediate=128,
    steps=10,
    learning_rate=1e-2,
    vocabulary=400,
    positions=128,
)
ADAPTERS = {
    "logging-2": AdapterShape("logging", 2, MODULES, alpha=4, learning_rate=1e-2),
    "decimal-5": AdapterShape("decimal", 5, MODULES[:4], alpha=5, learning_rate=1e-2, rank_stabilised=True),
}
STEPS = 20
Reports = list[tuple[str, float]]


@pytest.fixture(scope="module")
def tiny_zoo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PLIANT_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setitem(shapes.SHAPES, shapes.BASE, TINY)
        patch.setattr(shapes, "ADAPTERS", ADAPTERS)
        patch.setattr(shapes, "ADAPTER_STEPS", STEPS)
        yield


@pytest.fixture(scope="module")
def reports(tiny_zoo: None) -> Reports:
    """What was reported while they were trained."""
    assert not any(entry.trained for entry in zoo.status())
    found: Reports = []
    sources.fetch_adapters("zoo/adapters", lambda text, done: found.append((text, done)))
    return found


@pytest.fixture(scope="module")
def folder(reports: Reports) -> Path:
    return sources.fetch_adapters("zoo/adapters")


@pytest.fixture(scope="module")
def base(folder: Path) -> Path:
    return zoo.folder(shapes.BASE)


def adapted(base: Path, adapter: Path) -> LlamaForCausalLM:
    model = LlamaForCausalLM.from_pretrained(base)
    return PeftModel.from_pretrained(model, str(adapter)).get_base_model()


def test_they_are_trained_once_after_their_model_and_say_how_far_they_are(reports: Reports, folder: Path) -> None:
    told = list(dict.fromkeys(text for text, _ in reports))
    assert told == ["training zoo/tiny-llama", "training zoo/adapters"]
    fractions = [done for text, done in reports if "adapters" in text]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1.0
    again: Reports = []
    assert sources.fetch_adapters("zoo/adapters", lambda text, done: again.append((text, done))) == folder
    assert not again


def test_each_is_a_folder_that_is_served(folder: Path) -> None:
    shape = sources.check_decoder("zoo/tiny-llama")
    assert {entry.name for entry in folder.iterdir() if entry.is_dir()} == set(ADAPTERS)
    for name, given in ADAPTERS.items():
        info = read_adapter(folder / name, shape)
        assert info.base == "zoo/tiny-llama"
        assert info.ranks == tuple(given.rank if module in given.modules else 0 for module in MODULES)
        assert len(info.modules) == TINY.layers * len(given.modules)
        scale = given.rank**0.5 if given.rank_stabilised else given.rank
        assert {module.scaling for module in info.modules} == {given.alpha / scale}


def test_each_knows_its_own_part_better_than_the_model(folder: Path) -> None:
    entries = {entry.name: entry for entry in zoo.status()}
    for name in ADAPTERS:
        entry = entries[f"adapters/{name}"]
        assert entry.trained
        assert entry.perplexity is not None
        assert entry.base_perplexity is not None
        assert entry.perplexity < entry.base_perplexity / 1.1


def test_the_saved_adapter_is_the_one_that_was_measured(folder: Path, base: Path) -> None:
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    for name, shape in ADAPTERS.items():
        texts = [docstring.document for docstring in docstrings.held_out(shape.part)]
        card = json.loads((folder / name / "zoo.json").read_text())
        measured = perplexity(adapted(base, folder / name), tokenizer, texts)
        assert measured == pytest.approx(card["perplexity"], rel=1e-5)
        assert card["parameters"] == sum(
            map(torch.numel, load_file(folder / name / "adapter_model.safetensors").values())
        )


def test_they_answer_differently(folder: Path, base: Path) -> None:
    compared = [LlamaForCausalLM.from_pretrained(base), *(adapted(base, folder / name) for name in ADAPTERS)]
    ids = torch.tensor([Tokenizer.from_file(str(base / "tokenizer.json")).encode("Return the").ids])
    with torch.inference_mode():
        alone, *others = [model.eval()(ids).logits[0, -1].log_softmax(0) for model in compared]
    assert all((other - alone).abs().max() > 0.5 for other in others)
    assert (others[0] - others[1]).abs().max() > 0.5


def test_training_repeats_itself_and_leaves_the_callers_random_numbers_alone(
    folder: Path, base: Path, tmp_path: Path
) -> None:
    state = torch.random.get_rng_state()
    adapters.train(ADAPTERS, STEPS, base, tmp_path, lambda _text, _done: None)
    assert torch.equal(torch.random.get_rng_state(), state)
    for name in ADAPTERS:
        once, again = (load_file(part / name / "adapter_model.safetensors") for part in (folder, tmp_path))
        assert once.keys() == again.keys()
        assert all(torch.equal(once[name], again[name]) for name in once)


def test_they_learn_beside_each_other_what_they_would_alone(folder: Path, base: Path, tmp_path: Path) -> None:
    """All but where they begin, which is drawn for one after the other."""
    first = next(iter(ADAPTERS))
    adapters.train({first: ADAPTERS[first]}, STEPS, base, tmp_path, lambda _text, _done: None)
    beside, alone = (load_file(part / first / "adapter_model.safetensors") for part in (folder, tmp_path))
    for name in beside:
        torch.testing.assert_close(alone[name], beside[name], rtol=1e-2, atol=1e-4)


def test_an_interrupted_training_leaves_nothing_that_looks_trained(
    folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PLIANT_CACHE", str(tmp_path))
    zoo.folder(shapes.BASE).parent.mkdir()
    zoo.folder(shapes.BASE).symlink_to(base)

    def interrupt(_text: str, done: float) -> None:
        if done > 0.6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources.fetch_adapters("zoo/adapters", interrupt)
    assert not any(entry.trained for entry in zoo.status() if entry.name.startswith("adapters/"))


def test_another_version_of_the_model_has_adapters_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    before = zoo.folder(zoo.ADAPTERS)
    monkeypatch.setitem(shapes.SHAPES, shapes.BASE, LlamaShape(**{**vars(TINY), "version": 2}))
    assert zoo.folder(zoo.ADAPTERS) != before


def test_the_command_lists_them(folder: Path) -> None:
    said = " ".join(CliRunner().invoke(command.app, ["zoo"]).output.split())
    assert "zoo/adapters/logging-2" in said
    assert "→" in said


def test_other_folders_are_used_as_they_are(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    assert sources.fetch_adapters(str(tmp_path / "link")) == tmp_path.resolve()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("zoo/adapter", "choose zoo/adapters"),
        ("zoo/tiny-llama", "choose zoo/adapters"),
        ("./no/such", "no such folder"),
    ],
)
def test_what_holds_no_adapters_is_refused(given: str, words: str) -> None:
    with pytest.raises(ModelError, match=words) as caught:
        sources.fetch_adapters(given)
    assert str(caught.value).startswith(f"{given}: ")
