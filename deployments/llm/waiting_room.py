"""Requests on their way to a slot: who is let in, who gets one next, and who has waited in vain (Chameleon §4.2).

Four policies side by side: a `StepScheduler` makes the plan of each iteration, `FairShare` says which tenants go first
where several wait, `DecodeAdmission` refuses whom it had better not let wait, and a `LengthPredictor` says how long
answers will be, and learns from those that end.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from pliant.deployments.llm.answer import Answer
from pliant.deployments.llm.memory import AnswerSteps
from pliant.deployments.llm.report import ClassReport, PredictorReport, WaitingReport
from pliant.formats.adapter_info import AdapterRef
from pliant.policies.cluster.fair_share import FairShare
from pliant.policies.llm.adapter_cache import AdapterCache
from pliant.policies.llm.decode_admission import DecodeAdmission, LateError, Load, QueueFullError, Waiting
from pliant.policies.llm.idle_memory import Root
from pliant.policies.llm.jobs import Job, SchedulerError
from pliant.policies.llm.output_length import LengthPredictor
from pliant.policies.llm.prefill_chunks import Speeds
from pliant.policies.llm.queue_order import Fifo
from pliant.policies.llm.request_scheduler import Scheduler
from pliant.policies.llm.step_requests import Plan, Prompt, Row

_ANSWER_COST = 2.0
"""What a token of an answer costs, in tokens of a prompt (Sheng et al., OSDI'24, §5.1)."""

AnswerJob = Job[Answer, AdapterRef]
AnswerPrompt = Prompt[Answer, AdapterRef]
AnswerPlan = Plan[Answer, AdapterRef]
AnswerScheduler = Scheduler[Answer, AdapterRef]


def in_order(memory: int) -> AnswerScheduler:
    """First come, first served, in so many bytes."""
    return Scheduler(Fifo(), AdapterCache(), memory)


class WaitingRoom:
    """Answers that wait for memory, as `steps` orders them; at most `queue` beside those for whom there is some.

    With `share_prefixes` tenants share what was computed of prompts. `steps` also knows of the answers that hold
    memory: they are taken from here and leave it by `left`, or come back by `put_back`.
    """

    def __init__(
        self, steps: AnswerSteps, predictor: LengthPredictor[str], queue: int, share_prefixes: bool = False
    ) -> None:
        self.steps = steps
        self.predictor = predictor
        self._queue = queue
        self._admission = DecodeAdmission(queue)
        self._share_prefixes = share_prefixes
        self._share: FairShare[Answer] = FairShare()
        """Those that wait; in tokens of a prompt."""

    def __len__(self) -> int:
        return len(self._share)

    def __contains__(self, answer: Answer) -> bool:
        return answer in self._share

    @property
    def _scheduler(self) -> AnswerScheduler:
        return self.steps.admission

    def prompt(self, answer: Answer, adapter_bytes: int, work: float, now: float) -> AnswerPrompt:
        """What `steps` is told of `answer`, whose length is predicted here; for `work` see `Prompt`."""
        name = answer.adapter and answer.adapter.name
        answer.predicted = max(self.predictor.predict(name, answer.prompt, answer.most), answer.count + 1)
        return Prompt(
            key=answer,
            text=answer,
            root=Root(answer.adapter, None if self._share_prefixes else answer.tenant.name),
            length=answer.prompt,
            output=answer.predicted - answer.count,
            size=answer.size,
            arrived=now,
            adapter_bytes=adapter_bytes,
            work=work,
            shares=answer.alternatives is None,
        )

    def refuse(self, job: AnswerJob, load: Load, within_s: float | None, speeds: Speeds) -> Answer | None:
        """Return if `job` may wait here; `load` says what is live. Raises QueueFullError and LateError.

        If an answer is returned, that must go first: the queue is full, and its tenant is further over its share.
        """
        full = len(self._share) >= self._queue + load.free
        loser = self._loser(job) if full else None
        ahead = [answer for answer in self._ahead(job) if answer is not loser] if within_s is not None else []
        load = load._replace(
            waiting=[Waiting(len(answer.ids), answer.most - answer.count) for answer in ahead],
            behind=len(self._share) - (loser is not None) - len(ahead),
        )
        self._admission.admit(load, job.prompt, within_s, speeds.step_s, speeds.prompt_tokens_per_s)
        return loser

    def _loser(self, job: AnswerJob) -> Answer | None:
        """What came last of the tenant that is further over its share than the one of `job`, if one is."""
        tenant = job.key.tenant
        over = self._share.furthest_over(*tenant, _cost(job.prompt, job.output))
        if over == tenant.name:
            return None
        return next((answer for answer in self._share.newest(over) if not answer.count), None)

    def _ahead(self, job: AnswerJob) -> list[Answer]:
        """Those that will likely begin before `job`."""
        before, tenant = [other.key for other in self._scheduler.ahead(job)], job.key.tenant
        if self._share.waiting().keys() <= {tenant.name}:
            return before
        return self._share.ahead(*tenant, [answer for answer in before if answer.tenant.name == tenant.name])

    def enter(self, prompt: AnswerPrompt, job: AnswerJob, now: float) -> None:
        """An answer waits from now on. Raises ValueError if there will never be memory for it."""
        self.steps.add(prompt, job, now)
        self._wait(prompt.key, job.output)

    def _wait(self, answer: Answer, output: int) -> None:
        """It waits, and will get `output` tokens, as predicted."""
        answer.foreseen = answer.count + output
        self._share.add(answer, *answer.tenant, _cost(len(answer.ids), output))

    def schedule(self, now: float, slots: int, budget: int, full: Sequence[Row[Answer]], step_s: float) -> AnswerPlan:
        """The next iteration, in which `slots` answers may begin; see `StepScheduler.schedule`."""
        first: list[Answer] = []
        if self._share.contended and slots > 0 and budget > 0:
            first = self._share.ranked(slots, (job.key for job in self._scheduler.waiting()))
        return self.steps.schedule(now, slots, budget, full, step_s, frozenset(first))

    def take(self, answer: Answer) -> None:
        """An answer that the scheduler has admitted holds memory from now on."""
        self._share.take(answer)
        answer.running = True
        answer.deadline = None

    def put_back(self, answer: Answer) -> None:
        """An answer that the scheduler has squashed: it waits again, and goes on behind the tokens that it has."""
        self._settle(answer)
        answer.put_back()
        self._wait(answer, answer.most - answer.count)

    def cancel(self, answer: Answer, now: float) -> None:
        """An answer that waits does so no longer."""
        self._share.remove(answer)
        self.steps.cancel(answer, now)

    def left(self, answer: Answer, now: float) -> None:
        """An answer that held memory gives it back."""
        if answer.running:
            answer.running = False
            self._settle(answer)
            self.steps.ended(answer, now)

    def _settle(self, answer: Answer) -> None:
        """Its tenant pays for the tokens that it got, and not for those that were predicted."""
        self._share.charge(*answer.tenant, _cost(0, answer.count - answer.foreseen))

    def learn(self, answer: Answer) -> None:
        """`answer` has come to its end."""
        self._admission.ended(answer.count, answer.most)
        name = answer.adapter and answer.adapter.name
        self.predictor.observe(name, answer.prompt, answer.count, answer.predicted)

    def late(self, now: float) -> list[Answer]:
        """The answers whose deadlines are over."""
        return [answer for answer in self._share if answer.deadline is not None and answer.deadline < now]

    def clear(self) -> None:
        """Nobody waits any more, and the scheduler is not asked again."""
        self._share = FairShare()

    @property
    def answer_ratio(self) -> float:
        """Tokens of answers to the most that they might have had, of late."""
        return self._admission.ratio

    def report(self) -> WaitingReport:
        """Who waits, and what the scheduler and the predictor have done."""
        stats = self._scheduler.stats()
        return WaitingReport(
            waiting=len(self),
            squashed=stats.squashed,
            preempted=stats.preempted,
            bypassed=stats.bypassed,
            tenants=self._share.waiting(),
            classes=[
                ClassReport(
                    cut_off=None if math.isinf(one.cut_off) else round(one.cut_off, 4),
                    quota=one.quota,
                    waiting=one.waiting,
                    admitted=one.admitted,
                    waited_s=round(one.waited_s, 3),
                )
                for one in stats.classes
            ],
            predictor=PredictorReport(accuracy=round(self.predictor.accuracy, 3), error=round(self.predictor.error, 3)),
        )

    def check(self) -> None:
        """Raise an error unless the scheduler agrees with itself and with this room."""
        self.steps.check()
        waiting = {job.key for job in self._scheduler.waiting()}
        if waiting != set(self._share):
            raise SchedulerError(f"{len(self._share)} answers wait, but the scheduler knows of {len(waiting)}")

    def crowded_out_error(self, load: Load, speeds: Speeds) -> QueueFullError:
        """What those are told that made way for another tenant's."""
        retry_s = self._admission.next_turn_s(load, speeds.step_s, speeds.prompt_tokens_per_s)
        return QueueFullError("the queue is full, and this client has more than its share of it", retry_s)

    def late_error(self, load: Load, speeds: Speeds) -> LateError:
        """What those are told."""
        retry_s = self._admission.next_turn_s(load, speeds.step_s, speeds.prompt_tokens_per_s)
        return LateError("no slot was free before the time for the first token was over", retry_s)


def _cost(prompt: int, output: int) -> float:
    return prompt + _ANSWER_COST * output
