"""Which queries run together: those with like arrival, deadline and utility (OTAS §III-C, Algorithm 1).

A query joins the newest batch that it is like enough, and else opens one. What live use needs besides: the queue is
bounded, clients leave, deadlines pass, and a batch runs without those of its queries that would be late.

The paper takes utilities for like that differ by 0.8 at most, so that most batches mix what is worth much with what is
worth next to nothing; but a batch has one gamma, and runs or not. Here they also differ by a factor of 2 at most, which
needs no scale, and leaves a plan more to choose between.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar


class Query(Protocol):
    """One image of one task that waits for its answer; times in seconds on any clock that does not run backwards."""

    @property
    def arrival(self) -> float: ...

    @property
    def deadline(self) -> float: ...

    @property
    def utility(self) -> float:
        """What an accurate answer in time earns, at least 0."""

    @property
    def task(self) -> Hashable: ...

    def __hash__(self) -> int: ...


Q = TypeVar("Q", bound=Query)


class Batch(Generic[Q]):
    """Queries that run together, in the order in which they came; never empty while it waits.

    Whoever joins is compared with the query that opened it, even if that has left: so a batch never drifts, and all of
    its queries are like one and the same.
    """

    def __init__(self, first: Q) -> None:
        self.arrival = first.arrival
        """Of the query that opened it (the paper's s_b)."""
        self.utility = first.utility
        """Of the query that opened it (u_b)."""
        self.deadline = first.deadline
        """The earliest of its queries' (d_b)."""
        self._queries = {first: None}

    @property
    def queries(self) -> Sequence[Q]:
        return tuple(self._queries)

    def __len__(self) -> int:
        return len(self._queries)

    def add(self, query: Q) -> None:
        self._queries[query] = None
        self.deadline = min(self.deadline, query.deadline)

    def remove(self, queries: Iterable[Q]) -> None:
        """Raises KeyError if one is not in the batch."""
        for query in queries:
            del self._queries[query]
        if self._queries:
            self.deadline = min(other.deadline for other in self._queries)


class Batching(NamedTuple):
    """How close queries are to the one that opened their batch (Algorithm 1); defaults are the paper's but `factor`."""

    delta_s: float = 0.5
    """Seconds by which they come later at most."""
    most_rows: int = 64
    """Queries in a batch at most: epsilon."""
    eta_s: float = 0.5
    """Seconds by which deadlines differ at most."""
    mu: float = 0.8
    """By which utilities differ at most."""
    factor: float = 2.0
    """By which the larger utility exceeds the smaller at most; infinite, this is Algorithm 1 as written."""


class SloBatcher(Generic[Q]):
    """The batch queue, of at most `limit` queries.

    A query joins a batch that is close to it as `batching` says. Takes time proportional to the batches that began
    within `delta_s`.
    """

    def __init__(self, limit: int, batching: Batching | None = None) -> None:
        delta_s, most_rows, eta_s, mu, factor = batching or Batching()
        if limit < 1 or most_rows < 1:
            raise ValueError(f"limit and most_rows must be at least 1, got {limit} and {most_rows}")
        if not (delta_s >= 0 and eta_s >= 0 and mu >= 0):
            raise ValueError(f"delta_s, eta_s and mu must be at least 0, got {delta_s}, {eta_s} and {mu}")
        if not factor >= 1:
            raise ValueError(f"factor must be at least 1, got {factor}")
        self._limit = limit
        self._delta_s = delta_s
        self._most_rows = most_rows
        self._eta_s = eta_s
        self._mu = mu
        self._factor = factor
        self._batches: list[Batch[Q]] = []
        self._batch_of: dict[Q, Batch[Q]] = {}

    def __len__(self) -> int:
        """Queries that wait."""
        return len(self._batch_of)

    @property
    def batches(self) -> Sequence[Batch[Q]]:
        """Those that wait, the oldest first."""
        return tuple(self._batches)

    @property
    def full(self) -> bool:
        """Whether one has to go for each that comes."""
        return len(self) >= self._limit

    def add(self, query: Q, losers: Collection[Q] | None = None) -> Q | None:
        """Queue a query that has just come (Algorithm 1).

        Returns the query that had to go because the queue was full: of `losers`, by default of all, that of the least
        utility, of these the newest, maybe `query` itself. Raises ValueError if it waits already, or its numbers make
        no sense.
        """
        if query in self._batch_of:
            raise ValueError(f"{query!r} waits already")
        if not (query.utility >= 0 and query.deadline >= query.arrival):
            raise ValueError(
                f"a query needs a utility of at least 0 and a deadline after its arrival, got utility {query.utility}, "
                f"arrival {query.arrival} and deadline {query.deadline}"
            )
        self._place(query)
        if len(self) <= self._limit:
            return None
        among = [waiting for waiting in self._batch_of if losers is None or waiting in losers]
        shed = min(reversed(among), key=lambda waiting: waiting.utility)
        self.remove(shed)
        return shed

    def remove(self, query: Q) -> bool:
        """Take out a query whose client has left. False if it does not wait."""
        batch = self._batch_of.get(query)
        if batch is None:
            return False
        self._leave(batch, [query])
        return True

    def drop_late(self, by: float) -> list[Q]:
        """Take out, and return, the queries whose deadline is before `by`, when a batch can end at the soonest."""
        late = []
        for batch in self.batches:
            if batch.deadline < by:
                leaving = [query for query in batch.queries if query.deadline < by]
                self._leave(batch, leaving)
                late += leaving
        return late

    def take(self, batch: Batch[Q], queries: Sequence[Q]) -> None:
        """Take out `queries` of `batch`, which run now. Others of the batch go on waiting in it.

        Raises ValueError if one of them does not wait in that batch.
        """
        strangers = [query for query in queries if self._batch_of.get(query) is not batch]
        if strangers:
            raise ValueError(f"{len(strangers)} of {len(queries)} queries do not wait in that batch: {strangers[0]!r}")
        self._leave(batch, queries)

    def _place(self, query: Q) -> None:
        batch = self._like(query)
        if batch is None:
            batch = Batch(query)
            self._batches.append(batch)
        else:
            batch.add(query)
        self._batch_of[query] = batch

    def _leave(self, batch: Batch[Q], queries: Sequence[Q]) -> None:
        batch.remove(queries)
        for query in queries:
            del self._batch_of[query]
        if not batch:
            self._batches.remove(batch)

    def _like(self, query: Q) -> Batch[Q] | None:
        """The newest batch that `query` may join."""
        for batch in reversed(self._batches):
            if batch.arrival + self._delta_s < query.arrival:
                return None
            if len(batch) >= self._most_rows:
                continue
            if abs(batch.deadline - query.deadline) > self._eta_s:
                continue
            if abs(batch.utility - query.utility) > self._mu:
                continue
            lower, higher = sorted((batch.utility, query.utility))
            if higher > lower * self._factor:
                continue
            return batch
        return None
