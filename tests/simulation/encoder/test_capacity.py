"""`pliant simulate`: traces that operators have, or get wrong, and what the forecast says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from pliant.formats.pass_times import PassTimes
from pliant.simulation.encoder.capacity import Cluster, Forecast, TraceError, plan_capacity, read_trace

CLUSTER = Cluster({64: 0.01, 512: 0.05}, slo_s=0.2, least=3, most=3)
PASSES = PassTimes(counts=(1, 8), lengths=(64, 512), seconds=((0.01, 0.05), (0.02, 0.3)))
PACKED = replace(CLUSTER, passes=PASSES)
"""Eight short texts take no longer together than two do one after the other."""


def forecast(folder: Path, trace: str, cluster: Cluster = CLUSTER) -> Forecast:
    (folder / "trace.csv").write_text(trace)
    return plan_capacity(cluster, folder / "trace.csv")


def test_a_row_for_each_request(tmp_path: Path) -> None:
    found = forecast(tmp_path, "seconds,tokens\n1700000000.5,10\n1700000002.1,512\n1700000000.9,64\n")
    assert found.outcome.requests == 3
    assert found.outcome.arrived == [2, 0, 1]
    assert found.outcome.latencies.mean == pytest.approx((0.01 + 0.05 + 0.01) / 3)
    assert found.outcome.attainment == 1.0
    assert not found.plans, "too few requests to plan for"


def test_a_row_for_each_second(tmp_path: Path) -> None:
    found = forecast(tmp_path, "second, requests\n10,40\n11,60\n14,20\n")
    assert found.outcome.seconds == 5
    assert found.outcome.requests == pytest.approx(120, abs=50)
    assert found.outcome.arrived[2:4] == [0, 0]
    assert found.trace.made_up_lengths


def test_overload_is_shed_and_reported(tmp_path: Path) -> None:
    rows = "".join(f"{second},400\n" for second in range(20))
    found = forecast(tmp_path, "second,requests\n" + rows)
    assert found.outcome.shed > 0.1 * found.outcome.requests
    assert found.outcome.latencies.quantile(0.999) <= 0.2 * 1.005
    assert found.plans[0][1].counts.keys() == {64, 512}
    console = Console(record=True, width=120)
    console.print(found.table())
    console.print(found.plan_table())
    said = console.export_text()
    assert "shed" in said
    assert "start" in said
    found.plot().savefig(tmp_path / "forecast.png")


def test_autoscaling_adds_gpus(tmp_path: Path) -> None:
    rows = "".join(f"{second},250\n" for second in range(120))
    scaled = Cluster({64: 0.01, 512: 0.05}, slo_s=0.2, least=3, most=12)
    found = forecast(tmp_path, "second,requests\n" + rows, scaled)
    assert max(found.outcome.running) > 3
    assert found.outcome.attainment > forecast(tmp_path, "second,requests\n" + rows).outcome.attainment


def test_a_packed_runtime_answers_what_waits_in_one_pass(tmp_path: Path) -> None:
    rows = "".join(f"{second + index / 400},{9 + index % 8}\n" for second in range(10) for index in range(400))
    one_by_one, packed = (forecast(tmp_path, "seconds,tokens\n" + rows, each) for each in (CLUSTER, PACKED))
    assert one_by_one.outcome.attainment < 0.9, "three replicas answer 300 a second at most"
    assert packed.outcome.attainment == 1.0
    assert packed.plans[0][1].counts.keys() == {64, 512}


def test_texts_that_are_too_long_are_cut_or_left_out(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("seconds,tokens\n0,600\n1,100\n")
    assert read_trace(path, 512, truncate=False).too_long == 1
    cut = read_trace(path, 512, truncate=True)
    assert [second.tokens.tolist() for second in cut.stream] == [[512], [100]]
    path.write_text("seconds,tokens\n0,600\n")
    with pytest.raises(TraceError, match="longer than 512"):
        read_trace(path, 512, truncate=False)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "first line is ''"),
        ("time,length\n0,1\n", "first line is 'time,length'; allowed: 'seconds,tokens'"),
        ("seconds,tokens\n", "needs rows of two numbers"),
        ("seconds,tokens\n0\n", "needs rows of two numbers"),
        ("seconds,tokens\n0,1,2\n", "needs rows of two numbers"),
        ("seconds,tokens\n0,1\n1,many\n", "could not convert string 'many'"),
        ("seconds,tokens\n0,1\n1,2,3\n", "columns"),
        ("seconds,tokens\n0,5\n1,0\n", "row 2 is 1,0; tokens must be a whole number from 1 to 10,000,000"),
        ("seconds,tokens\n0,1.5\n", "row 1"),
        ("seconds,tokens\n0,nan\n", "row 1"),
        ("second,requests\n0,0\n", "holds no request"),
        ("second,requests\n0,1e300\n", "from 0 to 10,000,000"),
        ("second,requests\n0,-1\n", "requests must be a whole number from 0 to"),
        ("seconds,tokens\n0,1\n1700000000000,1\n", "is the first column in seconds"),
    ],
)
def test_a_malformed_trace_is_explained_in_one_line(tmp_path: Path, content: str, said: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(TraceError) as caught:
        read_trace(path, 512, truncate=False)
    message = str(caught.value)
    assert said in message
    assert message.startswith(str(path))
    assert "\n" not in message


def test_a_trace_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read_trace(tmp_path / "none.csv", 512, truncate=False)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00seconds")
    with pytest.raises(TraceError, match="not UTF-8"):
        read_trace(tmp_path / "binary.csv", 512, truncate=False)
