"""Traces in the forms in which they are published, and mistakes in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from pliant.simulation.cluster.trace import TraceError, merged, read

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,300,40\n2023-11-16 18:15:48.9,100,20\n"
BURST = (
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "0,ChatGPT,300,40,340,Conversation log\n2,GPT-4,100,20,120,API log\n"
)
MOONCAKE = (
    '{"timestamp": 0, "input_length": 300, "output_length": 40, "hash_ids": [1]}\n'
    '{"timestamp": 2500, "input_length": 100, "output_length": 20, "hash_ids": []}\n'
)


@pytest.mark.parametrize("text", [AZURE, BURST, MOONCAKE])
def test_requests_of_a_language_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "trace").write_text(text)
    load = read(tmp_path / "trace", "chat")["chat"]
    assert load.counts.tolist() == [1, 0, 1]
    assert (load.prompt, load.answer) == (200, 30)


def test_counts_of_several_services_beside_those_of_another(tmp_path: Path) -> None:
    (tmp_path / "mixed").write_text("second,service,requests\n0,a,3\n2,b,4\n0,a,2\n")
    (tmp_path / "one").write_text("second, requests\n1,7\n")
    loads = merged([read(tmp_path / "mixed"), read(tmp_path / "one", "c")])
    assert {name: load.counts.tolist() for name, load in loads.items()} == {
        "a": [5, 0, 0],
        "b": [0, 0, 4],
        "c": [0, 7, 0],
    }
    with pytest.raises(TraceError, match="a is in two traces"):
        merged([loads, loads])


@pytest.mark.parametrize(
    ("text", "service", "says"),
    [
        ("a,b\n", "", "the first line is 'a,b'; allowed: 'second,service,requests'"),
        ("second,requests\n0,1\n", "", "names no service; say which: --trace SERVICE="),
        ("second,service,requests\n0,a,1\n", "a", "names services itself"),
        ("second,service,requests\n0,a,1\n1,a,x\n", "", ":3: cannot be read: could not convert"),
        ("second,service,requests\n0,a,1\n1,a\n", "", ":3: cannot be read"),
        ("second,service,requests\n0,a,1.5\n", "", ":2: requests and tokens must be whole numbers"),
        ("second,service,requests\n0,a,1\n-4,a,1\n", "", ":3: -4 s after the start"),
        ("second,requests\nnan,1\n", "a", ":2: cannot be read: time is nan"),
        ("second,requests\n0,0\n", "a", "holds no request"),
        (MOONCAKE + "{\n", "a", ":3: cannot be read"),
        ('{"timestamp": 0}\n', "a", ":1: cannot be read: 'input_length'"),
    ],
)
def test_mistakes_are_told_in_a_line_with_its_number(tmp_path: Path, text: str, service: str, says: str) -> None:
    (tmp_path / "trace").write_text(text)
    with pytest.raises(TraceError) as error:
        read(tmp_path / "trace", service)
    assert says in str(error.value)
    assert "\n" not in str(error.value)
