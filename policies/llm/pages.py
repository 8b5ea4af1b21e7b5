"""Where keys and values lie: pages that requests own or share, and prefixes that stay when nobody uses them.

Memory is cut into pages of equally many tokens. A request has a table of pages: keys and values of its token t lie in
page table[t // page_tokens], at slot t % page_tokens. Page 0 is never given out: whatever pads a batch may write there.

A page that is full and computed is found by what is in it and before it: the tokens from the start on, and a *root*,
which says for whom they were computed (an adapter, and a tenant where these are kept apart). Requests of one root that
begin alike share such pages, whether the first of them still runs or has ended. Pages that are not full have one owner:
what is on them is computed again by whoever begins alike, which takes a part of a step, so that nobody writes to what
others read.

Full pages that nobody uses any more stay until they are evicted, a page after all that continue it. Which go first is
not decided here, and neither is how many are kept: whoever wants pages evicts what is worth least.

The lowest free page is given out first, so that what lies behind the pages may grow: `resize` has the last ones moved.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from pliant.policies.llm.prefixes import Place, Prefix, R

K = TypeVar("K", bound=Hashable)
"""Names a request."""


class PagesError(Exception):
    """The pages contradict themselves: a defect, after which no table may be trusted."""


@dataclass(eq=False)
class _Request(Generic[R]):
    root: R
    tokens: list[int]
    """All that are known: of its prompt, and of its answer so far."""
    table: list[int]
    computed: int
    """Of its tokens, from the first on: those whose keys and values are there. The last may not be known yet."""
    found: list[Prefix[R]]
    """Its first pages, as far as these can be found: those that are full of known tokens."""


class Pages(Generic[K, R]):
    """`count` pages of `page_tokens` tokens each, and which request has which.

    `now` is in seconds on any clock that does not run backwards. What is asked of unknown requests raises KeyError.
    """

    def __init__(self, count: int, page_tokens: int) -> None:
        if count < 1 or page_tokens < 1:
            raise ValueError(f"pages must be 1 or more, of 1 token or more; got {count} of {page_tokens}")
        self.count = count
        self.page_tokens = page_tokens
        self.idle = 0
        """Pages that nobody uses, and that can be found: all of them can be evicted, leaves first."""
        self.limit = count
        """Pages that may be given out are no higher."""
        self.saved = 0
        """By how many more there would have to be if nobody shared any."""
        self._free = list(range(1, count + 1))
        self._users: Counter[int] = Counter()
        """By page: requests that have it."""
        self._requests: dict[K, _Request[R]] = {}
        self._found: dict[Place[R], Prefix[R]] = {}
        self._prefixes: dict[int, Prefix[R]] = {}
        self._leaves: dict[int, Prefix[R]] = {}

    @property
    def free(self) -> int:
        """Pages that hold nothing, those above the limit too."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Pages that requests have."""
        return len(self._users)

    def needed(self, tokens: int) -> int:
        """Pages for so many tokens."""
        return -(-tokens // self.page_tokens)

    def __contains__(self, key: K) -> bool:
        return key in self._requests

    def table(self, key: K) -> Sequence[int]:
        """The pages of a request, in the order of its tokens. Not to be kept: it changes."""
        return self._requests[key].table

    def computed(self, key: K) -> int:
        """Tokens of a request whose keys and values are there."""
        return self._requests[key].computed

    def known(self, key: K) -> int:
        """Tokens of a request that are known."""
        return len(self._requests[key].tokens)

    def left(self, key: K) -> int:
        """Its known tokens that are still to be computed."""
        request = self._requests[key]
        return len(request.tokens) - request.computed

    def cached(self, root: R, tokens: Sequence[int]) -> list[Prefix[R]]:
        """The full pages from which a request of `tokens` could begin, in order.

        At least its last token is left to be computed: its answer begins with what comes of that.
        """
        found: list[Prefix[R]] = []
        last: Prefix[R] | None = None
        for start in range(0, len(tokens) - self.page_tokens, self.page_tokens):
            last = self._found.get((last, root, tuple(tokens[start : start + self.page_tokens])))
            if last is None:
                break
            found.append(last)
        return found

    def begin(self, key: K, root: R, tokens: Sequence[int], now: float, shares: bool = True) -> int:
        """A request with `tokens` begins, with the pages of others that begin alike; returns the tokens in these. One
        that does not share begins with none, and computes all.
        """
        if key in self._requests:
            raise ValueError(f"request {key!r} has begun already")
        if not tokens:
            raise ValueError(f"request {key!r} has no tokens")
        request = self._requests[key] = _Request(root, list(tokens), [], 0, [])
        if shares:
            self._share(request, self.cached(root, tokens), now)
        return request.computed

    def catch_up(self, key: K, now: float) -> int:
        """Take over what others have computed meanwhile of the same tokens; returns all tokens that are there."""
        request = self._requests[key]
        size = self.page_tokens
        while request.computed == len(request.found) * size == len(request.table) * size:
            place = self.next_page(key)
            prefix = self._found.get(place) if place else None
            if prefix is None:
                break
            self._share(request, [prefix], now)
        return request.computed

    def next_page(self, key: K) -> Place[R] | None:
        """What the page will be found by of which a request computes tokens next; None if its tokens do not fill it.

        Two requests that have the same need not compute it both: one that has computed none of it can catch up.
        """
        request = self._requests[key]
        index = request.computed // self.page_tokens
        if (index + 1) * self.page_tokens >= len(request.tokens):
            return None
        return self._place(request, index)

    def append(self, key: K, tokens: Sequence[int], now: float) -> None:
        """The next tokens of a request are known, whether they are computed already or not."""
        request = self._requests[key]
        request.tokens.extend(tokens)
        self._find(request, now)

    def lacking(self, key: K, tokens: int) -> int:
        """Free pages that it takes to compute the next `tokens` of a request."""
        request = self._requests[key]
        return self.needed(request.computed + tokens) - len(request.table)

    def grow(self, key: K, tokens: int) -> None:
        """Give a request pages for its next `tokens`.

        Raises ValueError, and changes nothing, if fewer than `lacking` pages are free within the limit.
        """
        lacking = self.lacking(key, tokens)
        if lacking > self.free - (self.count - self.limit):  # all above the limit are free
            raise ValueError(f"request {key!r} lacks {lacking} pages, and {self.free} of {self.count} are free")
        table = self._requests[key].table
        for _ in range(lacking):
            table.append(self._new())

    def advance(self, key: K, tokens: int, now: float) -> None:
        """The next `tokens` of a request, for which it has pages, are computed. Those that are full can be found from
        now on, as soon as their tokens are known.

        Where the same tokens were computed for another request meanwhile, this one takes that one's pages for its own.
        """
        request = self._requests[key]
        end = request.computed + tokens
        if end > len(request.table) * self.page_tokens:
            raise ValueError(f"request {key!r} has no pages for {tokens} tokens: `grow` comes first")
        request.computed = end
        self._find(request, now)

    def end(self, key: K, now: float) -> None:
        """A request ended, or makes way: its full pages stay and can be found, the others are free."""
        request = self._requests.pop(key)
        for prefix in request.found:
            prefix.last_used = now
        for page in reversed(request.table):
            self._drop(page)

    def freed_by(self, key: K) -> int:
        """Pages that nobody would use any more if a request made way."""
        return sum(self._users[page] == 1 for page in self._requests[key].table)

    def in_use(self, prefix: Prefix[R]) -> bool:
        """Whether a request has it."""
        return self._users[prefix.page] > 0

    def latest(self, most: int) -> list[Prefix[R]]:
        """Of the prefixes that none or several others continue, those that were used last. For any thread."""
        ends = [prefix for prefix in list(self._prefixes.values()) if prefix.children != 1]
        return heapq.nlargest(most, ends, key=lambda prefix: prefix.last_used)

    def leaves(self) -> Iterator[Prefix[R]]:
        """What can be evicted now. Nothing may change meanwhile."""
        return iter(self._leaves.values())

    def evict(self, prefix: Prefix[R]) -> Prefix[R] | None:
        """Free a leaf; returns the page before it, if that has become a leaf by it."""
        if self._leaves.pop(prefix.page, None) is not prefix:
            raise ValueError(f"page {prefix.page} cannot be evicted: it is in use, or others continue it")
        del self._found[prefix.parent, prefix.root, prefix.tokens]
        del self._prefixes[prefix.page]
        heapq.heappush(self._free, prefix.page)
        self.idle -= 1
        parent = prefix.parent
        if parent is None:
            return None
        parent.children -= 1
        self._note_leaf(parent)
        return parent if parent.page in self._leaves else None

    def resize(self, limit: int) -> list[tuple[int, int]]:
        """Give out no page above `limit` from now on; returns the moves, (source, target), that empty those above it.

        They are to be made before anything else is computed. Raises ValueError if more than `limit` pages hold
        something.
        """
        if not self.count - self.free <= limit <= self.count:
            raise ValueError(f"{self.count - self.free} of {self.count} pages hold something, and {limit} shall do")
        self.limit = limit
        moves = {
            page: heapq.heappop(self._free) for page in sorted(self._users.keys() | self._prefixes) if page > limit
        }
        for source, target in moves.items():
            heapq.heappush(self._free, source)
            if source in self._users:
                self._users[target] = self._users.pop(source)
            for by_page in (self._prefixes, self._leaves):
                if prefix := by_page.pop(source, None):
                    prefix.page = target
                    by_page[target] = prefix
        if moves:
            for request in self._requests.values():
                request.table[:] = [moves.get(page, page) for page in request.table]
        return list(moves.items())

    def check(self) -> None:
        """Raise PagesError unless all counts agree. Slow: for tests and debugging."""
        users: Counter[int] = Counter()
        for key, request in self._requests.items():
            users.update(request.table)
            self._check_request(key, request)
        if users != self._users:
            raise PagesError(f"pages are used as {dict(users)}, and counted as {dict(self._users)}")
        idle = {page for page in self._prefixes if not users[page]}
        pages = [*self._free, *users, *idle]
        if sorted(pages) != list(range(1, self.count + 1)):
            raise PagesError(f"of {self.count} pages, some are lost or owned twice: {sorted(pages)}")
        if (self.idle, self.saved) != (len(idle), users.total() - len(users)):
            raise PagesError(f"{len(idle)} pages are idle, {self.idle} are counted; {self.saved} are said to be saved")
        if max((*users, *idle), default=0) > self.limit:
            raise PagesError(f"pages above {self.limit} hold something")
        children = Counter(prefix.parent for prefix in self._prefixes.values() if prefix.parent)
        if any(prefix.children != children[prefix] for prefix in self._prefixes.values()):
            raise PagesError("pages that continue others are not counted right")
        if {prefix.page: prefix for prefix in self._found.values()} != self._prefixes:
            raise PagesError(f"{len(self._found)} pages can be found, {len(self._prefixes)} are known")
        if not children.keys() <= set(self._prefixes.values()):
            raise PagesError("a page is gone, and what continues it is not")
        if {page for page in idle if not children[self._prefixes[page]]} != self._leaves.keys():
            raise PagesError(f"leaves are counted as {list(self._leaves)}")

    def _check_request(self, key: K, request: _Request[R]) -> None:
        """What it reads is what it computed, or others did of the same tokens; what it writes to nobody else finds."""
        full = min(request.computed, len(request.tokens)) // self.page_tokens
        if len(request.found) != full:
            raise PagesError(f"{len(request.found)} pages of request {key!r} can be found, and {full} are full")
        for index, prefix in enumerate(request.found):
            if request.table[index] != prefix.page or self._found.get(self._place(request, index)) is not prefix:
                raise PagesError(f"page {index} of request {key!r} does not hold its tokens")
        if any(page in self._prefixes for page in request.table[full:]):
            raise PagesError(f"request {key!r} writes to a page that others may find")
        if len(request.table) < self.needed(request.computed):
            raise PagesError(f"request {key!r} has {len(request.table)} pages for {request.computed} tokens")

    def _place(self, request: _Request[R], index: int) -> Place[R]:
        start = index * self.page_tokens
        tokens = tuple(request.tokens[start : start + self.page_tokens])
        return request.found[index - 1] if index else None, request.root, tokens

    def _find(self, request: _Request[R], now: float) -> None:
        """Pages of a request that have become full of known tokens can be found from now on."""
        full = min(request.computed, len(request.tokens)) // self.page_tokens
        for index in range(len(request.found), full):
            place, page = self._place(request, index), request.table[index]
            prefix = self._found.get(place)
            if prefix is not None:
                self._drop(page)
                self._take(prefix)
                request.table[index] = prefix.page
            else:
                parent, root, tokens = place
                prefix = Prefix(page, root, parent, tokens, index * self.page_tokens, now)
                self._found[place] = self._prefixes[page] = prefix
                if parent is not None:
                    parent.children += 1
            prefix.use(now)
            request.found.append(prefix)

    def _share(self, request: _Request[R], prefixes: Sequence[Prefix[R]], now: float) -> None:
        for prefix in prefixes:
            self._take(prefix)
            prefix.use(now)
            request.table.append(prefix.page)
            request.found.append(prefix)
        request.computed += len(prefixes) * self.page_tokens

    def _new(self) -> int:
        page = heapq.heappop(self._free)
        self._users[page] = 1
        return page

    def _take(self, prefix: Prefix[R]) -> None:
        """Somebody else uses it from now on."""
        if self._users[prefix.page]:
            self.saved += 1
        else:
            self.idle -= 1
            self._leaves.pop(prefix.page, None)
        self._users[prefix.page] += 1

    def _drop(self, page: int) -> None:
        """One fewer uses it."""
        self._users[page] -= 1
        if self._users[page]:
            self.saved -= 1
            return
        del self._users[page]
        prefix = self._prefixes.get(page)
        if prefix is None:
            heapq.heappush(self._free, page)
        else:
            self.idle += 1
            self._note_leaf(prefix)

    def _note_leaf(self, prefix: Prefix[R]) -> None:
        if not prefix.children and not self._users[prefix.page]:
            self._leaves[prefix.page] = prefix
