"""The language model's engine, against an executor whose tokens betray every mix-up."""

from __future__ import annotations

import pickle
from collections import defaultdict
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.scripted_executor import EOS, SLOT_BYTES, ScriptedExecutor, byte_tokenizer, expected

from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.detokenizer import Detokenizer, TokenBytes
from pliant.deployments.llm.engine import BrokenError, Engine, Item, TooLongError
from pliant.deployments.llm.request import Generation, Piece, merged
from pliant.policies.llm.decode_admission import LateError, QueueFullError
from pliant.policies.llm.decode_slots import SlotError
from pliant.sampling import Sampling

MAX_LENGTH = 48
TOKENIZER = byte_tokenizer()
CONTENTS = TokenBytes(TOKENIZER)


class Clock:
    """Time that passes when it is told to, and `tick_s` whenever somebody looks."""

    def __init__(self, tick_s: float = 0.0) -> None:
        self.now = 0.0
        self._tick_s = tick_s

    def __call__(self) -> float:
        self.now += self._tick_s
        return self.now


def engine(executor: ScriptedExecutor, queue: int = 100, stall_s: float = 0.05, **options: Any) -> Engine:
    return Engine(
        executor, TOKENIZER, (EOS,), queue, stall_s, clock=options.pop("clock", Clock()), debug=True, **options
    )


def generation(id: str = "a", prompt: int = 5, max_tokens: int = 10, seed: int = 0, **options: Any) -> Generation:
    tokens = tuple((seed + index) % 100 for index in range(prompt))
    return Generation(id, tokens, max_tokens, options.pop("sampling", Sampling(seed=seed)), **options)


def run(engine: Engine, most: int = 1000) -> list[Item]:
    items = []
    for _ in range(most):
        if not engine.busy:
            return items
        items += engine.step()
    raise AssertionError(f"still busy after {most} steps")


def by_request(items: list[Item]) -> dict[str, Piece]:
    """All of each request; an error, or anything behind a piece that says `finish`, fails."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for id, item in items:
        assert isinstance(item, Piece), item
        assert not (pieces[id] and pieces[id][-1].finish)
        pieces[id].append(item)
    return {id: merged(parts)._replace(prompt_s=None, cached=None) for id, parts in pieces.items()}


def right(generation: Generation, max_length: int = MAX_LENGTH) -> Piece:
    """What a whole answer must be: of the tokens that follow its prompt, those up to its end."""
    tokens = expected(generation, max_length)
    detokenizer = Detokenizer(CONTENTS, generation.stop)
    text = ""
    for count, token in enumerate(tokens, 1):
        if token == EOS and not generation.ignore_eos:
            return Piece(tuple(tokens), text + detokenizer.flush(), None, "stop")
        text += detokenizer.push(token)
        if detokenizer.stopped:
            return Piece(tuple(tokens[:count]), text, None, "stop")
    return Piece(tuple(tokens), text + detokenizer.flush(), None, "length")


generations = st.builds(
    generation,
    prompt=st.integers(1, 40),
    max_tokens=st.integers(1, 20),
    seed=st.integers(0, 50),
    stop=st.sampled_from(((), ("ab",), ("a", "日"), ("b\n",))),
    ignore_eos=st.booleans(),
)


@settings(max_examples=150)
@given(
    slots=st.integers(1, 5),
    page=st.sampled_from((4, 16, MAX_LENGTH)),
    pipelined=st.booleans(),
    compact=st.booleans(),
    arrivals=st.lists(st.tuples(st.integers(0, 6), generations, st.none() | st.integers(0, 8)), max_size=12),
    stall_s=st.sampled_from((0.001, 0.05, 10.0)),
)
def test_every_answer_is_right_whatever_else_there_is(
    slots: int,
    page: int,
    pipelined: bool,
    compact: bool,
    arrivals: list[tuple[int, Generation, int | None]],
    stall_s: float,
) -> None:
    """Requests come after some steps, and some are cancelled after some more; the others are answered, once."""
    executor = ScriptedExecutor(slots, MAX_LENGTH, pipelined, page=page)
    clock = Clock()
    served = engine(executor, stall_s=stall_s, compact=compact, clock=clock)
    items: list[Item] = []
    cancelled: set[str] = set()
    due: list[tuple[int, str]] = []
    step = 0

    def steps(count: int) -> None:
        nonlocal step
        for _ in range(count):
            step += 1
            clock.now += 0.001
            for at, id in due:
                if at == step:
                    served.cancel(id)
                    cancelled.add(id)
            new = served.step()
            assert not cancelled & {id for id, _ in new}
            items.extend(new)

    asked = {}
    for index, (pause, wanted, cancel_after) in enumerate(arrivals):
        steps(pause)
        wanted = wanted._replace(id=str(index))
        asked[wanted.id] = wanted
        served.add(wanted)
        if cancel_after is not None:
            due.append((step + 1 + cancel_after, wanted.id))
    while served.busy:
        steps(1)

    answers = by_request(items)
    for id, wanted in asked.items():
        whole = right(wanted)
        got = answers.get(id, Piece((), ""))
        if id in cancelled and got.finish is None:
            assert whole.tokens[: len(got.tokens)] == got.tokens
            assert whole.text.startswith(got.text)
        else:
            assert got == whole
    report = served.report()
    assert (report["live"], report["waiting"], report["live_tokens"]) == (0, 0, 0)
    assert report["served"] == sum(piece.finish is not None for piece in answers.values())
    assert compact or not executor.moves


@given(wanted=generations, cut=st.integers(1, 20), pipelined=st.booleans())
def test_an_answer_is_resumed_where_it_was(wanted: Generation, cut: int, pipelined: bool) -> None:
    whole = right(wanted)
    cut = min(cut, len(whole.tokens) - 1)
    first = engine(ScriptedExecutor(2, MAX_LENGTH, pipelined))
    first.add(wanted)
    pieces = [piece for _, piece in run(first) if isinstance(piece, Piece)][:cut]
    second = engine(ScriptedExecutor(2, MAX_LENGTH, pipelined))
    second.add(wanted._replace(generated=whole.tokens[:cut]))
    pieces += [piece for _, piece in run(second) if isinstance(piece, Piece)]
    assert merged(pieces)._replace(prompt_s=None, cached=None) == whole


@pytest.mark.parametrize("pipelined", [False, True])
def test_a_request_joins_the_next_iteration_and_takes_the_slot_that_just_became_free(pipelined: bool) -> None:
    executor = ScriptedExecutor(2, pipelined=pipelined)
    served = engine(executor)
    for id, tokens in (("a", 3), ("b", 30), ("c", 30)):
        served.add(generation(id, max_tokens=tokens, ignore_eos=True))
    run_items = [item for _ in range(4) for item in served.step()]
    assert [len(step.prefills) for step in executor.steps] == [2, 0, 0, 1]
    assert executor.steps[3].prefills[0].slot == 0  # that of "a", whose last token came from the step before
    assert executor.moves == []
    assert set(by_request(run_items + run(served))) == {"a", "b", "c"}


def test_the_first_piece_says_how_long_its_prompt_took_and_not_how_long_it_waited() -> None:
    clock, executor = Clock(), ScriptedExecutor(slots=1)
    served = engine(executor, clock=clock)
    launch = executor.launch

    def timed(step: Any) -> Any:
        clock.now += 2.0
        return launch(step)

    executor.launch = timed  # type: ignore[method-assign]
    served.add(generation("first", max_tokens=3, ignore_eos=True))
    served.add(generation("waits", max_tokens=3, ignore_eos=True))
    said = [(id, piece.prompt_s) for id, piece in run(served) if isinstance(piece, Piece)]
    assert said == [(id, prompt_s) for id in ("first", "waits") for prompt_s in (2.0, None, None)]
    report = served.report()
    assert (report["prompts"], report["prompts_s"]) == (2, 4.0)


def test_gaps_are_closed_with_what_is_shortest() -> None:
    executor = ScriptedExecutor(4)
    served = engine(executor)
    for id, prompt, tokens in (("a", 20, 30), ("b", 5, 2), ("c", 5, 2), ("d", 3, 30)):
        served.add(generation(id, prompt, tokens, ignore_eos=True))
    run(served)
    assert executor.moves == [(3, 1)]
    assert [(step.offset, len(step.lengths)) for step in executor.steps[:4]] == [(0, 0), (0, 4), (0, 2), (0, 2)]


def test_without_compaction_the_gaps_are_computed() -> None:
    executor = ScriptedExecutor(4)
    served = engine(executor, compact=False)
    for id, tokens in (("a", 9), ("b", 2), ("c", 2), ("d", 9)):
        served.add(generation(id, max_tokens=tokens, ignore_eos=True))
    run(served)
    assert [len(step.lengths) for step in executor.steps] == [0, *[4] * 8]
    assert executor.moves == []


def test_a_long_prompt_does_not_stall_the_others() -> None:
    executor = ScriptedExecutor(3, max_length=512)
    served = engine(executor, stall_s=0.001)
    served.add(generation("short", prompt=4, max_tokens=60, ignore_eos=True))
    served.step()
    served.add(generation("long", prompt=300, max_tokens=5))
    served.add(generation("next", prompt=8, max_tokens=5))
    answers = by_request(run(served))
    chunks = [(prefill.slot, len(prefill.ids)) for step in executor.steps[1:] for prefill in step.prefills]
    assert chunks == [(1, 16), (2, 8), (1, 8), *[(1, 16)] * 17, (1, 4)], "the short one goes first"
    assert all(len(step.lengths) for step in executor.steps[1:60])
    assert answers["long"].finish
    assert answers["next"].finish


def test_the_engine_tells_how_far_a_prompt_is() -> None:
    served = engine(ScriptedExecutor(2, max_length=512), stall_s=0.001)
    served.add(generation("first", max_tokens=300, ignore_eos=True))
    served.step()
    served.add(generation("long", prompt=50, max_tokens=300, ignore_eos=True))
    served.add(generation("waits"))
    told = []
    for _ in range(6):
        told.append((served.progress("long"), served.progress("waits")))
        served.step()
    assert told == [(None, None), (16, None), (32, None), (48, None), (50, None), (50, None)]
    assert served.progress("never heard of") == 0


def test_prompts_take_what_answers_can_spare_of_their_objective() -> None:
    """A step takes 1 ms, a token of a prompt 0.1 ms: an answer that is ahead of 20 ms a token can spare much more."""
    chunks: dict[float | None, list[int]] = {}
    for tpot_s in (None, 0.02, 0.001):
        clock = Clock()
        executor = ScriptedExecutor(2, max_length=2048)
        served = engine(executor, stall_s=0.004, clock=clock, tpot_s=tpot_s)
        launch = executor.launch

        def timed(step: Any, launch: Any = launch, clock: Clock = clock) -> Any:
            clock.now += 0.001 + 1e-4 * sum(len(prefill.ids) for prefill in step.prefills)
            return launch(step)

        executor.launch = timed  # type: ignore[method-assign]
        served.add(generation("answer", prompt=100, max_tokens=500, ignore_eos=True))
        for _ in range(100):
            served.step()
        seen = len(executor.steps)
        served.add(generation("prompt", prompt=1500, max_tokens=2, seed=9))
        run(served)
        chunks[tpot_s] = [len(prefill.ids) for step in executor.steps[seen:] for prefill in step.prefills]
    assert max(chunks[None]) <= 48, "4 ms"
    assert max(chunks[0.02]) > 300, "two tokens' time"
    assert max(chunks[0.001]) <= 16, "none to spare"
    assert {sum(each) for each in chunks.values()} == {1500}


def test_short_requests_share_the_memory_of_few_long_texts() -> None:
    executor = ScriptedExecutor(8, max_length=64, arena_bytes=None, page=16)
    executor.arena_bytes = 2 * SLOT_BYTES
    served = engine(executor)
    for index in range(8):
        served.add(generation(str(index), prompt=8, max_tokens=8, ignore_eos=True))
    served.add(generation("long", prompt=20, max_tokens=44, ignore_eos=True))
    served.step()
    assert (served.report()["live"], served.report()["waiting"]) == (8, 1)
    run(served)
    assert served.report()["served"] == 9


def test_alone_a_prompt_goes_in_one_piece() -> None:
    executor = ScriptedExecutor(3, max_length=512)
    served = engine(executor, stall_s=0.001)
    served.add(generation("long", prompt=250))
    run(served)
    assert [len(prefill.ids) for step in executor.steps for prefill in step.prefills] == [250]


def test_a_rehearsal_tells_the_speeds_and_leaves_nothing_behind() -> None:
    served = engine(ScriptedExecutor(), clock=Clock(tick_s=0.01))
    served.rehearse()
    report = served.report()
    assert report["step_ms"] > 0
    assert report["prompt_tokens_per_s"] > 0
    assert report["served"] == report["prompts"] == report["tokens"] == report["live"] == report["live_tokens"] == 0


def test_an_answer_that_goes_on_is_never_too_many() -> None:
    served = engine(ScriptedExecutor(slots=1), queue=0)
    served.add(generation("first"))
    with pytest.raises(QueueFullError):
        served.add(generation("new"))
    served.add(generation("resumed", generated=(1, 2)))
    assert {name for name, _ in run(served)} == {"first", "resumed"}


def test_a_pipelined_step_is_launched_before_the_last_is_read() -> None:
    executor = ScriptedExecutor(pipelined=True)
    served = engine(executor)
    served.add(generation(max_tokens=4, ignore_eos=True))
    assert served.step() == []
    assert len(executor.flying) == 1
    run(served)
    assert len(executor.steps) == 4  # none is launched beyond max_tokens
    assert executor.flying == []


@pytest.mark.parametrize("pipelined", [False, True])
def test_when_the_executor_fails_everybody_hears_of_it_once(pipelined: bool) -> None:
    executor = ScriptedExecutor(2, pipelined=pipelined, fails_at=3)
    served = engine(executor)
    for id in "abc":
        served.add(generation(id, max_tokens=40, ignore_eos=True))
    items = run(served)
    errors = [(id, str(item)) for id, item in items if isinstance(item, BrokenError)]
    reason = "the model's executor failed: RuntimeError: out of memory"
    assert errors == [("a", reason), ("b", reason), ("c", reason)]
    assert isinstance(served.failure, RuntimeError)
    assert served.step() == []
    with pytest.raises(BrokenError, match="out of memory"):
        served.add(generation("d"))
    served.cancel("a")
    assert (served.report()["live"], served.report()["live_tokens"]) == (0, 0)


def test_what_cannot_fit_is_refused_with_numbers() -> None:
    served = engine(ScriptedExecutor(max_length=16))
    with pytest.raises(TooLongError, match="a prompt of 16 tokens and 1 of its answer do not fit into 16 tokens"):
        served.add(generation(prompt=16))
    with pytest.raises(TooLongError, match="a prompt of 10 tokens and 7 of its answer do not fit"):
        served.add(generation(prompt=10, generated=(1,) * 6))
    with pytest.raises(ValueError, match="the prompt has no tokens"):
        served.add(generation(prompt=0))
    with pytest.raises(ValueError, match="max_tokens must be above the 2 of the answer, got 2"):
        served.add(generation(generated=(1, 2), max_tokens=2))
    with pytest.raises(ValueError, match="the answer has ended: there is a stop string in the 2 tokens given"):
        served.add(generation(generated=tuple(b"ab"), stop=("b",)))
    assert not served.busy


@pytest.mark.parametrize(
    "options",
    [
        {"generated": (1, EOS + 1)},
        {"sampling": Sampling(logit_bias=((EOS + 1, 1.0),))},
        {"sampling": Sampling(logit_bias=((-1, 1.0),))},
        {"stop_token_ids": (EOS + 1,)},
        {"bad_words": ((1, EOS + 1),)},
    ],
)
def test_tokens_that_the_model_does_not_have_end_their_request_alone(options: dict[str, Any]) -> None:
    served = engine(ScriptedExecutor())
    served.add(generation("other"))
    with pytest.raises(ValueError, match=r"token ids must lie in 0 to 256, got (0 to 257|-1 to 4)"):
        served.add(generation("wrong", **options))
    with pytest.raises(ValueError, match="token ids must lie in 0 to 256, got 1 to 257"):
        served.add(Generation("prompt", (1, EOS + 1), 9, Sampling()))
    assert by_request(run(served)) == {"other": right(generation("other"))}


def test_ends_that_the_model_does_not_have_are_not_waited_for() -> None:
    served = Engine(ScriptedExecutor(), TOKENIZER, (EOS, EOS + 1), 100, 0.05, debug=True)
    wanted = generation(sampling=Sampling(seed=0, min_tokens=3))
    answer = Answer(wanted, MAX_LENGTH, served._eos, CONTENTS)
    assert answer.sampling.ends == (EOS,)


def test_answers_are_cut_to_what_fits() -> None:
    served = engine(ScriptedExecutor(max_length=16))
    served.add(generation(prompt=15, max_tokens=100, ignore_eos=True))
    served.add(generation("b", prompt=10, max_tokens=100, ignore_eos=True))
    answers = by_request(run(served))
    assert {id: (len(answer.tokens), answer.finish) for id, answer in answers.items()} == {
        "a": (1, "length"),
        "b": (6, "length"),
    }


def test_ids_differ() -> None:
    served = engine(ScriptedExecutor())
    served.add(generation("a"))
    with pytest.raises(ValueError, match="'a' is under way already"):
        served.add(generation("a"))
    run(served)
    served.add(generation("a"))


def test_cancelling_frees_the_slot_for_the_next_step() -> None:
    executor = ScriptedExecutor(slots=1)
    served = engine(executor)
    served.add(generation("a", max_tokens=50, ignore_eos=True))
    served.add(generation("b"))
    served.step()
    served.cancel("a")
    served.cancel("a")
    served.cancel("never heard of")
    items = served.step()
    assert executor.steps[-1].prefills
    assert {id for id, _ in items} == {"b"}


def test_a_full_queue_refuses() -> None:
    served = engine(ScriptedExecutor(slots=2), queue=1)
    for id in "abc":
        served.add(generation(id, ignore_eos=True))
    with pytest.raises(QueueFullError, match="3 requests wait already"):
        served.add(generation("d"))
    served.step()
    with pytest.raises(QueueFullError, match="1 requests wait already, of at most 1"):
        served.add(generation("d"))
    assert set(by_request(run(served))) == {"a", "b", "c"}


def test_who_would_wait_too_long_is_refused_at_once() -> None:
    served = engine(ScriptedExecutor(slots=1), clock=Clock(tick_s=0.01))
    served.add(generation("a", max_tokens=50, ignore_eos=True))
    for _ in range(10):
        served.step()
    with pytest.raises(
        LateError, match=r"the first token would come after 0\.\d+ s, and is wanted within 0\.100 s"
    ) as late:
        served.add(generation("b", first_token_within_s=0.1))
    assert 0.2 < late.value.retry_after_s < 0.4  # 40 tokens of 10 ms
    served.add(generation("b", first_token_within_s=0.1 + late.value.retry_after_s * 1.01))


def test_who_has_waited_too_long_is_refused_before_a_slot_is_wasted() -> None:
    clock = Clock()
    executor = ScriptedExecutor(slots=1)
    served = engine(executor, clock=clock)
    served.add(generation("a", max_tokens=3, ignore_eos=True))
    served.step()
    served.add(generation("b", first_token_within_s=1.0))
    clock.now += 1.5
    (_, late), (id, _) = sorted(served.step(), key=lambda item: item[0] == "a")
    assert isinstance(late, LateError)
    assert late.retry_after_s >= 0
    assert id == "a"
    run(served)
    assert sum(len(step.prefills) for step in executor.steps) == 1


def test_log_probabilities_come_with_their_tokens() -> None:
    served = engine(ScriptedExecutor())
    served.add(generation("a", sampling=Sampling(logprobs=2), max_tokens=3, ignore_eos=True))
    served.add(generation("b", max_tokens=3, ignore_eos=True))
    answers = by_request(run(served))
    assert answers["b"].logprobs is None
    rows = answers["a"].logprobs
    assert rows is not None
    assert [row.token for row in rows] == list(answers["a"].tokens)
    assert all((row.logprob, row.top_ids, row.top) == (-1.0, (row.token, 0), (-1.0, -2.0)) for row in rows)


def test_the_report_tells_what_is_there() -> None:
    served = engine(ScriptedExecutor(slots=2, max_length=64))
    for id in "abc":
        served.add(generation(id, prompt=5, max_tokens=10, ignore_eos=True))
    served.step()
    report = served.report()
    assert (report["slots"], report["max_length"], report["live"], report["waiting"]) == (2, 64, 2, 1)
    assert (report["live_tokens"], report["tokens"], report["served"]) == (45, 2, 0)
    assert [(one["waiting"], one["admitted"], one["cut_off"]) for one in report["classes"]] == [(1, 2, None)]
    assert (report["squashed"], report["bypassed"], report["predictor"]["accuracy"]) == (0, 0, 0.0)
    assert (report["adapters"]["resident"], report["adapters"]["bytes"], report["adapters"]["hits"]) == ([], 0, 0)
    run(served)
    assert served.report()["predictor"] == {"accuracy": 1.0, "error": 0.0}


def test_check_finds_a_wrong_number() -> None:
    served = engine(ScriptedExecutor())
    served.add(generation("a", max_tokens=40, ignore_eos=True))
    served.step()
    served._batch._lengths[0] += 1
    with pytest.raises(SlotError, match="slot 0 has a: 6 tokens stored, 1 of 40"):
        served.check()


def test_what_travels_can_be_pickled() -> None:
    wanted = generation(stop=("x",), generated=(1, 2))
    assert pickle.loads(pickle.dumps(wanted)) == wanted
    for error in (LateError("late", 2.0), QueueFullError("full", 1.0), BrokenError("x"), TooLongError("y")):
        copied = pickle.loads(pickle.dumps(error))
        assert (type(copied), str(copied)) == (type(error), str(error))
