"""The gateway's language model against scripted replicas: what is answered, resumed, refused, cancelled or given up."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.scripted import MAX_LENGTH, TOKENIZER, Replica, Replicas, ids, language_model, report, said
from support.waiting import until
from tokenizers import AddedToken

from pliant.config.tenants import TenantConfig
from pliant.deployments.llm.errand import AnswerErrand
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.deployments.serving.outcome import Fault, Outcome, RequestError
from pliant.deployments.serving.parcels import Refusal
from pliant.deployments.serving.tenants import Account, act_for
from pliant.formats.adapter_info import AdapterRef
from pliant.sampling import Sampling

pytestmark = pytest.mark.virtual_time

BUSY = Refusal("busy", "128 requests wait", 2.5)
GREEDY = Generation("g", ids("hello"), 20, Sampling(temperature=0))
SEEDED = Generation("s", ids("hello"), 20, Sampling(temperature=1, seed=11))


async def answer(folder: Path, replicas: Replicas, generation: Generation = GREEDY, **options: float) -> Piece:
    model = language_model(folder, replicas, **options)
    return merged([piece async for piece in model.answer(generation)])


async def test_an_answer_comes_whole(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica())
    piece = await answer(tmp_path, replicas)
    assert (piece.text, piece.finish, len(piece.tokens)) == (said(GREEDY), "length", 20)
    assert replicas.recorder.events == [("answered", 5, 20, 0)]
    assert replicas.recorder.ends == [Outcome.OK]
    [asked] = replicas.asked
    assert 0 < (asked.first_token_within_s or 0) <= 10
    assert replicas.table.replicas()["a"]["outstanding"] == 0


def test_an_answer_weighs_what_it_may_come_to_hold() -> None:
    assert AnswerErrand(GREEDY, "chat", 1, 1).want(late=False)[:3] == (25, None, None)
    assert AnswerErrand(ADAPTED, "chat", 1, 1).want(late=True)[:3] == (25, "sql", None)


@pytest.mark.parametrize("generation", [GREEDY, SEEDED])
@pytest.mark.parametrize("dies_after", [0, 1, 7, 19])
async def test_a_killed_replica_is_not_noticed(tmp_path: Path, generation: Generation, dies_after: int) -> None:
    replicas = Replicas(a=Replica(dies_after=dies_after), b=Replica())
    piece = await answer(tmp_path, replicas, generation)
    assert piece.text == said(generation)
    assert len(piece.tokens) == 20
    assert replicas.recorder.retries == ["lost"]
    assert replicas.recorder.events == [("answered", 5, 20, 0)]
    assert replicas.recorder.ends == [Outcome.OK]
    resumed = replicas.replicas["b"].asked[0]
    assert len(resumed.generated) == dies_after
    assert resumed.first_token_within_s is None, "late is better than never"
    assert resumed.sampling == generation.sampling


async def test_an_end_without_a_reason_is_a_loss(tmp_path: Path) -> None:
    first = Piece((ids(said(GREEDY)[0])), said(GREEDY)[0])
    replicas = Replicas(a=Replica(gives=[first]), b=Replica())
    assert (await answer(tmp_path, replicas)).text == said(GREEDY)
    assert replicas.recorder.retries[0] == "lost"


async def test_a_prompt_that_kills_replicas_is_given_up(tmp_path: Path) -> None:
    replicas = Replicas(**{name: Replica(dies_after=0) for name in "abcde"})
    with pytest.raises(RequestError, match="3 replicas of chat failed over this request") as error:
        await answer(tmp_path, replicas)
    assert error.value.outcome == Outcome.UNAVAILABLE
    assert len(replicas.asked) == 3
    assert replicas.recorder.retries == ["lost", "lost"]
    assert replicas.recorder.ends == [Outcome.UNAVAILABLE]


async def test_an_answer_that_gets_on_outlives_every_replica(tmp_path: Path) -> None:
    replicas = Replicas(**{name: Replica(dies_after=index) for index, name in enumerate("abcdef")}, z=Replica())
    assert (await answer(tmp_path, replicas)).text == said(GREEDY)
    assert replicas.recorder.retries == ["lost"] * 6
    assert [len(asked.generated) for asked in replicas.asked] == [0, 0, 1, 2, 3, 4, 5]


async def test_with_no_other_replica_it_ends_with_an_error_in_time(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(dies_after=3))
    with pytest.raises(RequestError, match=r"went on with this answer within 0\.2 s") as error:
        await answer(tmp_path, replicas, timeout_s=0.2)
    assert error.value.outcome == Outcome.UNAVAILABLE
    assert replicas.recorder.ends == [Outcome.UNAVAILABLE]


async def test_a_replica_that_comes_later_goes_on(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(dies_after=3))
    waiting = asyncio.create_task(answer(tmp_path, replicas))
    await until(lambda: replicas.replicas["a"].dead)
    replicas.start("b", Replica())
    assert (await waiting).text == said(GREEDY)
    assert replicas.recorder.retries == ["lost"]
    assert replicas.recorder.events == [("answered", 5, 20, 0)]


async def test_a_replica_that_was_waited_for_may_answer_late(tmp_path: Path) -> None:
    replicas = Replicas()
    waiting = asyncio.create_task(answer(tmp_path, replicas))
    await asyncio.sleep(20)
    replicas.start("a", Replica())
    assert (await waiting).text == said(GREEDY)
    assert 9 < (replicas.asked[0].first_token_within_s or 0) <= 10, "as if it had come just now"


async def test_no_replica_at_all_is_unavailable_in_time(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"no replica of chat answered within 0\.1 s") as error:
        await answer(tmp_path, Replicas(), timeout_s=0.1)
    assert (error.value.outcome, error.value.fault) == (Outcome.UNAVAILABLE, Fault.TIMED_OUT)


async def test_a_replica_that_hangs_is_an_error_in_time(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(hangs_after=2))
    with pytest.raises(RequestError, match="went on with this answer"):
        await answer(tmp_path, replicas, timeout_s=0.2)
    assert replicas.replicas["a"].live == 0, "it goes on all the same"


async def test_a_silent_replica_is_left_when_another_can_go_on(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(hangs_after=2), b=Replica())
    started = asyncio.get_running_loop().time()
    assert (await answer(tmp_path, replicas)).text == said(GREEDY)
    assert 10 < asyncio.get_running_loop().time() - started < 11
    assert replicas.recorder.retries == ["stalled"]
    assert replicas.recorder.events == [("answered", 5, 20, 0)]
    assert len(replicas.replicas["b"].asked[0].generated) == 2
    assert replicas.replicas["a"].live == 0
    assert {name: each["outstanding"] for name, each in replicas.table.replicas().items()} == {"a": 0, "b": 0}


async def test_whoever_goes_on_may_fail_too(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(hangs_after=2), b=Replica(dies_after=3), c=Replica())
    assert (await answer(tmp_path, replicas)).text == said(GREEDY)
    assert replicas.recorder.retries == ["stalled", "lost"]
    assert replicas.recorder.events == [("answered", 5, 20, 0)]
    assert [len(asked.generated) for asked in replicas.asked] == [0, 2, 3]


async def test_a_replica_that_has_a_request_wait_is_not_left(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(waits_s=40), b=Replica())
    assert (await answer(tmp_path, replicas)).text == said(GREEDY)
    assert replicas.recorder.events == [("answered", 5, 20, 0)]


async def test_signs_of_life_do_not_replace_an_answer(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(waits_s=1000))
    with pytest.raises(RequestError, match="no replica of chat answered within 60 s"):
        await answer(tmp_path, replicas)
    assert 60 <= asyncio.get_running_loop().time() < 61


async def test_a_slow_reader_is_no_standstill(tmp_path: Path) -> None:
    model = language_model(tmp_path, Replicas(a=Replica()), timeout_s=0.05)
    text = ""
    async for piece in model.answer(GREEDY._replace(max_tokens=3)):
        await asyncio.sleep(0.1)
        text += piece.text
    assert text == said(GREEDY)[:3]


async def test_a_busy_replica_is_passed_over(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(gives=[BUSY]), b=Replica())
    assert (await answer(tmp_path, replicas)).text == said(GREEDY)
    assert replicas.recorder.retries[0] == "busy"


async def test_when_all_are_busy_clients_hear_when_to_come_back(tmp_path: Path) -> None:
    few = Replicas(a=Replica(gives=[BUSY]), b=Replica(gives=[Refusal("busy", "too late", 7)]))
    many = Replicas(**{name: Replica(gives=[BUSY]) for name in "abcde"})
    for replicas, tried in ((few, 2), (many, 3)):
        with pytest.raises(RequestError, match="chat is too busy: 128 requests wait") as error:
            await answer(tmp_path, replicas)
        assert (error.value.outcome, error.value.retry_after_s) == (Outcome.SHED, 2.5)
        assert len(replicas.asked) == tried
        assert replicas.recorder.ends[-1] == Outcome.SHED


async def test_what_a_replica_never_takes_is_a_bad_request(tmp_path: Path) -> None:
    long = Refusal("final", "does not fit", outcome=Outcome.REJECTED, fault=Fault.CONTEXT_LENGTH)
    replicas = Replicas(a=Replica(gives=[long]), b=Replica())
    with pytest.raises(RequestError, match="does not fit") as error:
        await answer(tmp_path, replicas)
    assert (error.value.outcome, error.value.fault) == (Outcome.REJECTED, Fault.CONTEXT_LENGTH)
    assert len(replicas.asked) == 1


async def test_once_begun_an_answer_waits_for_a_busy_replica(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(dies_after=3), b=Replica(gives=[BUSY]))
    waiting = asyncio.create_task(answer(tmp_path, replicas))
    await until(lambda: len(replicas.replicas["b"].asked) == 5)
    replicas.replicas["b"].gives = None
    assert (await waiting).text == said(GREEDY)


async def test_other_errors_are_counted_and_raised(tmp_path: Path) -> None:
    """Those of the gateway: whatever a replica raises is its loss."""
    replicas = Replicas(a=Replica(gives=[ValueError("a bug")]))
    with pytest.raises(ValueError, match="a bug"):
        await answer(tmp_path, replicas)
    assert replicas.recorder.ends == [Outcome.FAILED]


async def test_a_replica_that_breaks_down_is_left(tmp_path: Path) -> None:
    broken = Refusal("failed", "the engine has failed: no memory")
    replicas = Replicas(a=Replica(gives=[broken]), b=Replica())
    assert (await answer(tmp_path, replicas)).text == said(GREEDY)
    assert replicas.recorder.retries[0] == "lost"


@pytest.mark.parametrize("leave", ["cancel", "close"])
async def test_a_client_that_leaves_ends_the_generation_at_once(tmp_path: Path, leave: str) -> None:
    replicas = Replicas(a=Replica(hangs_after=3))
    pieces = language_model(tmp_path, replicas).answer(GREEDY)
    for _ in range(3):
        await anext(pieces)
    assert replicas.replicas["a"].live == 1
    if leave == "close":
        await pieces.aclose()
    else:
        reader = asyncio.ensure_future(anext(pieces))
        await asyncio.sleep(0.01)
        reader.cancel()
        await asyncio.gather(reader, return_exceptions=True)
    assert replicas.replicas["a"].live == 0
    assert replicas.recorder.ends == [Outcome.CANCELLED]
    assert replicas.table.replicas()["a"]["outstanding"] == 0


async def test_requests_go_where_the_fewest_tokens_live(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(hangs_after=1), b=Replica(hangs_after=1))
    model = language_model(tmp_path, replicas)
    open_answers = []

    async def begin(prompt: str, max_tokens: int) -> None:
        open_answers.append(model.answer(Generation("x", ids(prompt), max_tokens, Sampling())))
        await anext(open_answers[-1])

    await begin("p" * 40, 20)
    for _ in range(3):
        await begin("p", 10)
    assert [len(replicas.replicas[name].asked) for name in "ab"] == [1, 3]
    replicas.table.sync({"a": report(**{replicas.table.gateway: 60}), "b": report(**{"another gateway": 50})})
    await begin("p", 10)
    assert [len(replicas.replicas[name].asked) for name in "ab"] == [2, 3]
    for pieces in open_answers:
        await pieces.aclose()


async def test_texts_become_tokens(tmp_path: Path) -> None:
    model = language_model(tmp_path, Replicas(a=Replica()))
    assert await model.encode("hé") == ids("hé")
    assert await model.encode([3, 1]) == (3, 1)
    assert model.text([*ids("hé"), 256]) == "hé</s>"
    chat = await model.encode_chat([{"role": "system", "content": "x"}, {"role": "user", "content": "y"}])
    assert TOKENIZER.decode(chat, skip_special_tokens=False) == "s:x</s>u:y</s>a:"


async def test_what_cannot_be_a_prompt_is_refused(tmp_path: Path) -> None:
    model = language_model(tmp_path, Replicas(a=Replica()))
    for prompt, reason in [("", "no tokens"), ([256, 257], "token 257; chat has tokens 0 to 256")]:
        with pytest.raises(RequestError, match=reason) as error:
            await model.encode(prompt)
        assert (error.value.outcome, error.value.param) == (Outcome.REJECTED, "prompt")
    with pytest.raises(RequestError, match="the system speaks first") as error:
        await model.encode_chat([{"role": "user", "content": "y"}, {"role": "system", "content": "x"}])
    assert (error.value.outcome, error.value.param) == (Outcome.REJECTED, "messages")
    with pytest.raises(RequestError, match="100000 characters; chat takes at most 64 tokens") as error:
        await model.encode("x" * 100_000)
    assert error.value.fault == Fault.CONTEXT_LENGTH


async def test_tokens_beyond_the_model_s_are_no_prompt_and_nothing_to_ban(tmp_path: Path) -> None:
    model = language_model(tmp_path, Replicas(a=Replica()))
    model.tokenizer.add_tokens([AddedToken("<pad0>", special=False)])
    for prompt, param in ((model.encode("x<pad0>"), "prompt"), (model.encode_chat([user("x<pad0>")]), "messages")):
        with pytest.raises(RequestError, match=f"{param}: has token 257; chat has tokens 0 to 256") as refused:
            await prompt
        assert (refused.value.outcome, refused.value.param) == (Outcome.REJECTED, param)
    for biased, wrong in (([-1], -1), ([3, 300, -1], 300)):
        with pytest.raises(RequestError, match=f"logit_bias: has token {wrong}; chat has tokens 0 to 256"):
            model.check_tokens(biased, "logit_bias")
    assert model.bad_words(["<pad0>", "x<pad0>", "x"]) == [ids("x"), ids(" x")]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_without_a_chat_template_the_other_endpoint_is_named(tmp_path: Path) -> None:
    model = language_model(tmp_path, Replicas(a=Replica()), template=None)
    with pytest.raises(RequestError, match="no chat template; send a prompt to /v1/completions"):
        await model.encode_chat([{"role": "user", "content": "y"}])


async def test_the_length_of_an_answer(tmp_path: Path) -> None:
    model = language_model(tmp_path, Replicas(a=Replica()))
    assert model.tokens_for(ids("hello"), None) == 8
    assert model.tokens_for([0] * (MAX_LENGTH - 2), None) == 2
    assert model.tokens_for([0] * 60, 4) == 4
    for prompt, wanted in [(60, 5), (64, None)]:
        with pytest.raises(RequestError, match="at most 64 tokens, prompt and answer together") as error:
            model.tokens_for([0] * prompt, wanted)
        assert error.value.fault == Fault.CONTEXT_LENGTH


async def test_replicas_say_how_much_they_take(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(), b=Replica())
    model = language_model(tmp_path, replicas, max_length=50)
    assert model.max_length == MAX_LENGTH
    replicas.table.sync({"a": {**report(), "max_length": 40}, "b": report()})
    assert model.max_length == 40
    replicas.table.sync({})
    assert model.max_length == 50
    assert not model.ready


ADAPTER = AdapterRef("sql", "/adapters/sql", "1", (8, 0, 8, 0, 0, 0, 0))
ADAPTED = GREEDY._replace(adapter=ADAPTER)
NOT_LOADED = Refusal("unable", "adapter sql cannot be loaded: no such folder", fault=Fault.ADAPTER_NOT_LOADABLE)
TOO_LARGE = Refusal("unable", "adapter sql takes 9 MiB", outcome=Outcome.REJECTED, fault=Fault.ADAPTER_TOO_LARGE)


async def test_an_adapter_s_requests_go_to_one_replica(tmp_path: Path) -> None:
    replicas = Replicas(**{name: Replica() for name in "abcd"})
    model = language_model(tmp_path, replicas)
    for _ in range(6):
        assert merged([piece async for piece in model.answer(ADAPTED)]).finish == "length"
    assert sorted(len(replica.asked) for replica in replicas.replicas.values()) == [0, 0, 0, 6]
    assert replicas.recorder.events == [("answered", 5, 20, 8)] * 6


async def test_another_replica_may_load_what_one_cannot(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(), b=Replica())
    replicas.replicas[replicas.chosen("sql")].gives = [NOT_LOADED]
    assert (await answer(tmp_path, replicas, ADAPTED)).text == said(ADAPTED)


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_an_adapter_that_no_replica_can_load_is_unavailable(tmp_path: Path, count: int) -> None:
    replicas = Replicas(**{name: Replica(gives=[NOT_LOADED]) for name in "abcde"[:count]})
    with pytest.raises(RequestError, match="adapter sql cannot be loaded: no such folder") as error:
        await answer(tmp_path, replicas, ADAPTED)
    assert (error.value.param, error.value.fault) == ("model", Fault.ADAPTER_NOT_LOADABLE)
    assert len(replicas.asked) == min(count, 3)
    assert replicas.recorder.ends == [Outcome.UNAVAILABLE]


@pytest.mark.parametrize("count", [1, 2, 5])
async def test_an_adapter_that_fits_no_replica_is_the_client_s_mistake(tmp_path: Path, count: int) -> None:
    replicas = Replicas(**{name: Replica(gives=[TOO_LARGE]) for name in "abcde"[:count]})
    with pytest.raises(RequestError, match="sql takes 9 MiB") as error:
        await answer(tmp_path, replicas, ADAPTED)
    assert (error.value.param, error.value.fault) == ("model", Fault.ADAPTER_TOO_LARGE)
    assert len(replicas.asked) == min(count, 3)
    one_has_room = Replicas(a=Replica(gives=[TOO_LARGE]), b=Replica(gives=[NOT_LOADED]))
    with pytest.raises(RequestError) as error:
        await answer(tmp_path, one_has_room, ADAPTED)
    assert error.value.outcome == Outcome.UNAVAILABLE


async def test_a_busy_replica_may_load_it_later(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(gives=[NOT_LOADED]), b=Replica(gives=[BUSY]))
    with pytest.raises(RequestError, match=r"sql \(chat\) is too busy: 128 requests wait") as error:
        await answer(tmp_path, replicas, ADAPTED)
    assert (error.value.outcome, error.value.retry_after_s) == (Outcome.SHED, 2.5)


async def test_an_answer_goes_on_with_its_adapter(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(), b=Replica())
    home = replicas.chosen("sql")
    replicas.replicas[home].dies_after = 7
    assert (await answer(tmp_path, replicas, ADAPTED)).text == said(ADAPTED)
    assert [asked.adapter for asked in replicas.asked] == [ADAPTER, ADAPTER]


async def test_an_answer_ends_when_its_adapter_cannot_be_loaded_again(tmp_path: Path) -> None:
    replicas = Replicas(a=Replica(), b=Replica(gives=[NOT_LOADED]))
    home = replicas.chosen("sql")
    other = next(name for name in "ab" if name != home)
    replicas.replicas = {home: Replica(dies_after=7), other: Replica(gives=[NOT_LOADED])}
    with pytest.raises(RequestError, match="adapter sql cannot be loaded"):
        await answer(tmp_path, replicas, ADAPTED)
    assert len(replicas.replicas[other].asked) == 3


@pytest.mark.parametrize(
    ("gives", "tokens"),
    [([BUSY], 0), ([Piece((97,), "a", finish="length")], len(GREEDY.prompt) + 1)],
)
async def test_tokens_count_that_are_computed_and_no_others(tmp_path: Path, gives: list[Any], tokens: int) -> None:
    account = Account("a", TenantConfig(tokens_per_minute=100))
    act_for(account)
    with suppress(RequestError):
        await answer(tmp_path, Replicas(a=Replica(gives=gives)))
    assert (account.facts()["tokens"], account.facts()["remaining_tokens"]) == (tokens, 100 - tokens)


async def test_a_prompt_counts_whose_answer_ends_early(tmp_path: Path) -> None:
    account = Account("a")
    act_for(account)
    with pytest.raises(RequestError):
        await answer(tmp_path, Replicas(a=Replica(dies_after=3)), timeout_s=1)
    assert account.facts()["tokens"] == len(GREEDY.prompt) + 3
