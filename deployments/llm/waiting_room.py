"""Requests on their way to a slot: who is let in, who gets one next, and who has waited in vain (Chameleon §4.2).

Three policies side by side: a `Scheduler` decides the order and shares out the memory, `DecodeAdmission` refuses whom
it had better not let wait, and a `LengthPredictor` says how long answers will be, and learns from those that end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.report import ClassReport
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.decode_admission import DecodeAdmission, LateError, Load, Waiting
from pliant.policies.llm.jobs import Decisions, Job, SchedulerError
from pliant.policies.llm.output_length import LengthPredictor
from pliant.policies.llm.prefill_chunks import Speeds
from pliant.policies.llm.queue_order import Fifo
from pliant.policies.llm.request_scheduler import Scheduler

AnswerJob = Job[Answer, AdapterRef]
AnswerDecisions = Decisions[Answer, AdapterRef]
AnswerScheduler = Scheduler[Answer, AdapterRef]


def in_order(memory: int) -> AnswerScheduler:
    """First come, first served, in so many bytes."""
    return Scheduler(Fifo(), AdapterCache(), memory)


class WaitingRoom:
    """Answers that wait for memory, as `scheduler` orders them; at most `queue` beside those for whom there is some.

    `charge` is what a slot takes, in bytes. The scheduler also knows of the answers that hold memory: they are taken
    from here and leave it by `left`, or come back by `put_back`.
    """

    def __init__(self, scheduler: AnswerScheduler, predictor: LengthPredictor[str], queue: int, charge: int) -> None:
        self.scheduler = scheduler
        self.predictor = predictor
        self._admission = DecodeAdmission(queue)
        self.charge = charge
        self._answers: dict[Answer, None] = {}

    def __len__(self) -> int:
        return len(self._answers)

    def __contains__(self, answer: Answer) -> bool:
        return answer in self._answers

    def job(self, answer: Answer, adapter_bytes: int, now: float) -> AnswerJob:
        """What the scheduler is told of `answer`, whose length is predicted here."""
        name = answer.adapter and answer.adapter.name
        answer.predicted = max(self.predictor.predict(name, answer.prompt, answer.most), answer.count + 1)
        return Job(
            key=answer,
            prompt=len(answer.ids),
            output=answer.predicted - answer.count,
            charge=self.charge,
            adapter=answer.adapter,
            adapter_bytes=adapter_bytes,
            arrived=now,
        )

    def refuse(self, job: AnswerJob, load: Load, within_s: float | None, speeds: Speeds) -> None:
        """Return if `job` may wait here; `load` says what is live. Raises QueueFullError and LateError."""
        ahead = self._waiting(self.scheduler.ahead(job)) if within_s is not None else []
        load = load._replace(waiting=ahead, behind=len(self._answers) - len(ahead))
        self._admission.admit(load, job.prompt, within_s, speeds.step_s, speeds.prompt_tokens_per_s)

    def enter(self, answer: Answer, job: AnswerJob, now: float) -> None:
        """`answer` waits from now on. Raises ValueError if there will never be memory for it."""
        self.scheduler.add(job, now)
        self._answers[answer] = None

    def schedule(self, now: float, slots: int, prompts: int) -> AnswerDecisions:
        """What to do before the next iteration, in which `slots` answers may begin, with `prompts` tokens or more."""
        return self.scheduler.schedule(now, slots, prompts)

    def take(self, answer: Answer) -> None:
        """An answer that the scheduler has admitted holds memory from now on."""
        del self._answers[answer]
        answer.running = True
        answer.deadline = None

    def put_back(self, answer: Answer) -> None:
        """An answer that the scheduler has squashed: it waits again, and goes on behind the tokens that it has."""
        answer.put_back()
        self._answers[answer] = None

    def cancel(self, answer: Answer, now: float) -> None:
        """An answer that waits does so no longer."""
        del self._answers[answer]
        self.scheduler.cancel(answer, now)

    def left(self, answer: Answer, now: float) -> None:
        """An answer that held memory gives it back."""
        if answer.running:
            answer.running = False
            self.scheduler.ended(answer, now)

    def learn(self, answer: Answer) -> None:
        """`answer` has come to its end."""
        self._admission.ended(answer.count, answer.most)
        name = answer.adapter and answer.adapter.name
        self.predictor.observe(name, answer.prompt, answer.count, answer.predicted)

    def late(self, now: float) -> list[Answer]:
        """The answers whose deadlines are over."""
        return [answer for answer in self._answers if answer.deadline is not None and answer.deadline < now]

    def _waiting(self, jobs: Iterable[AnswerJob]) -> list[Waiting]:
        return [Waiting(job.prompt, job.key.most - job.key.count) for job in jobs]

    def clear(self) -> None:
        """Nobody waits any more, and the scheduler is not asked again."""
        self._answers.clear()

    @property
    def answer_ratio(self) -> float:
        """Tokens of answers to the most that they might have had, of late."""
        return self._admission.ratio

    def classes(self) -> list[ClassReport]:
        """The scheduler's queues."""
        return [
            ClassReport(
                cut_off=None if math.isinf(one.cut_off) else round(one.cut_off, 4),
                quota=one.quota,
                waiting=one.waiting,
                admitted=one.admitted,
                waited_s=round(one.waited_s, 3),
            )
            for one in self.scheduler.stats().classes
        ]

    def check(self) -> None:
        """Raise SchedulerError unless the scheduler agrees with itself and with this room."""
        self.scheduler.check()
        waiting = {job.key for job in self.scheduler.waiting()}
        if waiting != set(self._answers):
            raise SchedulerError(f"{len(self._answers)} answers wait, but the scheduler knows of {len(waiting)}")

    def late_error(self, load: Load, speeds: Speeds) -> LateError:
        """What those are told."""
        retry_s = self._admission.next_turn_s(load, speeds.step_s, speeds.prompt_tokens_per_s)
        return LateError("no slot was free before the time for the first token was over", retry_s)
