"""Where keys and values lie: pages that requests own or share, and prefixes that stay when nobody uses them.

Memory is cut into pages of equally many tokens. A request has a table of pages: keys and values of its token t lie in
page table[t // page_tokens], at slot t % page_tokens. Page 0 is never given out: whatever pads a batch may write there.

A page that is full and computed is found by what is in it and before it: the tokens from the start on, and a *root*,
which says for whom they were computed (an adapter, and a tenant where these are kept apart). Requests of one root that
begin alike share such pages, whether the first of them still runs or has ended. Pages that are not full have one owner,
but for those of a request that was forked: who writes to such a page first gets a copy of its own.

Full pages that nobody uses any more stay until they are evicted, a page after all that continue it. Which go first is
not decided here, and neither is how many are kept: whoever wants pages evicts what is worth least.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

K = TypeVar("K", bound=Hashable)
"""Names a request."""
R = TypeVar("R", bound=Hashable)
"""Names whose requests may share pages."""

WINDOW_S = 300.0
"""A use counts for 1/e of what it did so many seconds ago."""


class PagesError(Exception):
    """The pages contradict themselves: a defect, after which no table may be trusted."""


class Copy(NamedTuple):
    """What a page holds of the first `tokens` slots is to be copied before anything else is computed."""

    source: int
    target: int
    tokens: int


@dataclass(eq=False)
class Prefix(Generic[R]):
    """A full page that can be found by its content."""

    page: int
    root: R
    parent: Prefix[R] | None
    """The page before it."""
    tokens: tuple[int, ...]
    depth: int
    """Tokens before it."""
    last_used: float
    children: int = 0
    """Pages found behind it."""
    _uses: float = 0.0
    _counted_at: float = 0.0

    def use(self, now: float) -> None:
        """A request has it from now on."""
        self._uses = self.frequency(now) + 1.0
        self._counted_at = self.last_used = now

    def frequency(self, now: float) -> float:
        """Uses, the older ones counted for less."""
        return self._uses * math.exp((self._counted_at - now) / WINDOW_S)


@dataclass(eq=False)
class _Request(Generic[R]):
    root: R
    tokens: list[int]
    """All that are known: of its prompt, and of its answer so far."""
    table: list[int]
    computed: int
    """Of the tokens, from the first on: those whose keys and values are there."""


class Pages(Generic[K, R]):
    """`count` pages of `page_tokens` tokens each, and which request has which.

    `now` is in seconds on any clock that does not run backwards. What is asked of unknown requests raises KeyError.
    """

    def __init__(self, count: int, page_tokens: int) -> None:
        if count < 1 or page_tokens < 1 or page_tokens & (page_tokens - 1):
            raise ValueError(f"pages must be 1 or more, of 1, 2, 4, ... tokens; got {count} of {page_tokens}")
        self.count = count
        self.page_tokens = page_tokens
        self.idle = 0
        """Pages that nobody uses, and that can be found: all of them can be evicted, leaves first."""
        self._free = list(range(count, 0, -1))
        self._users: Counter[int] = Counter()
        """By page: requests and others that have it."""
        self._requests: dict[K, _Request[R]] = {}
        self._found: dict[tuple[int, R, tuple[int, ...]], Prefix[R]] = {}
        """By the page before (0: none), the root and the tokens in it."""
        self._prefixes: dict[int, Prefix[R]] = {}
        self._leaves: dict[int, Prefix[R]] = {}

    @property
    def free(self) -> int:
        """Pages that hold nothing."""
        return len(self._free)

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

    def left(self, key: K) -> int:
        """Its known tokens that are still to be computed."""
        request = self._requests[key]
        return len(request.tokens) - request.computed

    def cached(self, root: R, tokens: Sequence[int]) -> list[Prefix[R]]:
        """The full pages from which a request of `tokens` could begin, in order.

        At least its last token is left to be computed: its answer begins with what comes of that.
        """
        found: list[Prefix[R]] = []
        page = 0
        for start in range(0, len(tokens) - self.page_tokens, self.page_tokens):
            prefix = self._found.get((page, root, tuple(tokens[start : start + self.page_tokens])))
            if prefix is None:
                break
            found.append(prefix)
            page = prefix.page
        return found

    def begin(self, key: K, root: R, tokens: Sequence[int], now: float) -> int:
        """A request with `tokens` begins, with the pages of others that begin alike; returns the tokens in these."""
        if key in self._requests:
            raise ValueError(f"request {key!r} has begun already")
        if not tokens:
            raise ValueError(f"request {key!r} has no tokens")
        request = self._requests[key] = _Request(root, list(tokens), [], 0)
        self._share(request, self.cached(root, tokens), now)
        return request.computed

    def catch_up(self, key: K, now: float) -> int:
        """Take over what others have computed meanwhile of the same tokens; returns all tokens that are there."""
        request = self._requests[key]
        while (place := self.next_page(key)) is not None and len(request.table) * self.page_tokens == request.computed:
            prefix = self._found.get(place)
            if prefix is None:
                break
            self._share(request, [prefix], now)
        return request.computed

    def next_page(self, key: K) -> tuple[int, R, tuple[int, ...]] | None:
        """What the next page of a request will be found by; None if it begins within one, or has no full one left.

        Two requests that have the same need not compute it both: one can catch up.
        """
        request = self._requests[key]
        index, within = divmod(request.computed, self.page_tokens)
        if within or request.computed + self.page_tokens >= len(request.tokens):
            return None
        return self._place(request, index)

    def append(self, key: K, tokens: Sequence[int]) -> None:
        """A request has got further tokens, which are not computed yet."""
        self._requests[key].tokens.extend(tokens)

    def lacking(self, key: K, tokens: int) -> int:
        """Free pages that it takes to compute the next `tokens` of a request."""
        request = self._requests[key]
        return self.needed(request.computed + tokens) - len(request.table) + self._writes_to_shared(request)

    def grow(self, key: K, tokens: int) -> list[Copy]:
        """Give a request pages for its next `tokens`; returns what must be copied before they are computed.

        Raises ValueError if fewer tokens are known, or fewer than `lacking` pages are free.
        """
        request = self._requests[key]
        if not 0 < tokens <= len(request.tokens) - request.computed:
            raise ValueError(f"request {key!r} has {self.left(key)} tokens to compute, not {tokens}")
        if self.lacking(key, tokens) > self.free:
            raise ValueError(f"request {key!r} lacks {self.lacking(key, tokens)} pages, and {self.free} are free")
        copies = []
        if self._writes_to_shared(request):
            index, within = divmod(request.computed, self.page_tokens)
            shared, own = request.table[index], self._new()
            self._drop(shared)
            request.table[index] = own
            copies.append(Copy(shared, own, within))
        while len(request.table) * self.page_tokens < request.computed + tokens:
            request.table.append(self._new())
        return copies

    def advance(self, key: K, tokens: int, now: float) -> None:
        """The next `tokens` of a request, for which it has pages, are computed. Full pages can be found from now on.

        Where the same tokens were computed for another request meanwhile, this one takes that one's pages for its own.
        """
        request = self._requests[key]
        end = request.computed + tokens
        if end > min(len(request.tokens), len(request.table) * self.page_tokens) or self._writes_to_shared(request):
            raise ValueError(f"request {key!r} has no pages for {tokens} tokens: `grow` comes first")
        for index in range(request.computed // self.page_tokens, end // self.page_tokens):
            place = self._place(request, index)
            prefix = self._found.get(place)
            if prefix is not None:
                self._drop(request.table[index])
                self._take(prefix)
                request.table[index] = prefix.page
            else:
                page = request.table[index]
                parent = self._prefixes[request.table[index - 1]] if index else None
                prefix = Prefix(page, request.root, parent, place[2], index * self.page_tokens, now)
                self._found[place] = self._prefixes[page] = prefix
                if parent is not None:
                    parent.children += 1
            prefix.use(now)
        request.computed = end

    def fork(self, key: K, child: K, now: float) -> None:
        """Another request begins with all that a request has now, and shares its pages."""
        if child in self._requests:
            raise ValueError(f"request {child!r} has begun already")
        request = self._requests[key]
        pages = request.table[: self.needed(request.computed)]
        self._requests[child] = _Request(request.root, request.tokens.copy(), pages, request.computed)
        for page in pages:
            self._users[page] += 1
            if page in self._prefixes:
                self._prefixes[page].use(now)

    def end(self, key: K, now: float) -> None:
        """A request ended, or makes way: its full pages stay and can be found, the others are free."""
        request = self._requests.pop(key)
        for page in reversed(request.table):
            if page in self._prefixes:
                self._prefixes[page].last_used = now
            self._drop(page)

    def freed_by(self, key: K) -> int:
        """Pages that nobody would use any more if a request made way."""
        return sum(self._users[page] == 1 for page in self._requests[key].table)

    def in_use(self, prefix: Prefix[R]) -> bool:
        """Whether a request has it."""
        return self._users[prefix.page] > 0

    def leaves(self) -> Iterator[Prefix[R]]:
        """What can be evicted now. Nothing may change meanwhile."""
        return iter(self._leaves.values())

    def evict(self, prefix: Prefix[R]) -> Prefix[R] | None:
        """Free a leaf; returns the page before it, if that has become a leaf by it."""
        if self._leaves.pop(prefix.page, None) is not prefix:
            raise ValueError(f"page {prefix.page} cannot be evicted: it is in use, or others continue it")
        del self._found[prefix.parent.page if prefix.parent else 0, prefix.root, prefix.tokens]
        del self._prefixes[prefix.page]
        self._free.append(prefix.page)
        self.idle -= 1
        parent = prefix.parent
        if parent is None:
            return None
        parent.children -= 1
        self._note_leaf(parent)
        return parent if parent.page in self._leaves else None

    def take(self, count: int) -> list[int]:
        """So many pages for something else than tokens, until `give_back`. Raises ValueError if fewer are free."""
        if count > self.free:
            raise ValueError(f"{count} pages are wanted, and {self.free} are free")
        return [self._new() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Pages that were taken are free again."""
        for page in pages:
            self._drop(page)

    def check(self, taken: Sequence[int] = ()) -> None:
        """Raise PagesError unless all counts agree, `taken` being the pages for something else than tokens."""
        users = Counter(taken)
        for key, request in self._requests.items():
            users.update(request.table)
            self._check_request(key, request)
        if users != self._users:
            raise PagesError(f"pages are used as {dict(users)}, and counted as {dict(self._users)}")
        idle = {page for page in self._prefixes if not users[page]}
        pages = [*self._free, *users, *idle]
        if sorted(pages) != list(range(1, self.count + 1)):
            raise PagesError(f"of {self.count} pages, some are lost or owned twice: {sorted(pages)}")
        if self.idle != len(idle):
            raise PagesError(f"{len(idle)} pages are idle, {self.idle} are counted")
        children = Counter(prefix.parent.page for prefix in self._prefixes.values() if prefix.parent)
        if any(prefix.children != children[page] for page, prefix in self._prefixes.items()):
            raise PagesError("pages that continue others are not counted right")
        if {prefix.page: prefix for prefix in self._found.values()} != self._prefixes:
            raise PagesError(f"{len(self._found)} pages can be found, {len(self._prefixes)} are known")
        if not children.keys() <= self._prefixes.keys() or any(children[page] for page in self._leaves):
            raise PagesError("a page is gone, and what continues it is not")
        if {page for page in idle if not children[page]} != self._leaves.keys():
            raise PagesError(f"leaves are counted as {list(self._leaves)}")

    def _check_request(self, key: K, request: _Request[R]) -> None:
        """What it reads is what it computed, or others did of the same tokens; what it writes to nobody else finds."""
        size = self.page_tokens
        full = request.computed // size
        for index, page in enumerate(request.table[:full]):
            prefix = self._prefixes.get(page)
            if prefix is None or self._found.get(self._place(request, index)) is not prefix:
                raise PagesError(f"page {page} of request {key!r} does not hold its tokens from {index * size} on")
        if any(page in self._prefixes for page in request.table[full:]):
            raise PagesError(f"request {key!r} writes to a page that others may find")
        if len(request.table) < self.needed(request.computed):
            raise PagesError(f"request {key!r} has {len(request.table)} pages for {request.computed} tokens")

    def _place(self, request: _Request[R], index: int) -> tuple[int, R, tuple[int, ...]]:
        start = index * self.page_tokens
        tokens = tuple(request.tokens[start : start + self.page_tokens])
        return request.table[index - 1] if index else 0, request.root, tokens

    def _writes_to_shared(self, request: _Request[R]) -> bool:
        within = request.computed % self.page_tokens
        return within > 0 and self._users[request.table[request.computed // self.page_tokens]] > 1

    def _share(self, request: _Request[R], prefixes: Sequence[Prefix[R]], now: float) -> None:
        for prefix in prefixes:
            self._take(prefix)
            prefix.use(now)
            request.table.append(prefix.page)
        request.computed += len(prefixes) * self.page_tokens

    def _new(self) -> int:
        page = self._free.pop()
        self._users[page] = 1
        return page

    def _take(self, prefix: Prefix[R]) -> None:
        """Somebody else uses it from now on."""
        if not self._users[prefix.page]:
            self.idle -= 1
            self._leaves.pop(prefix.page, None)
        self._users[prefix.page] += 1

    def _drop(self, page: int) -> None:
        """One fewer uses it."""
        self._users[page] -= 1
        if self._users[page]:
            return
        del self._users[page]
        prefix = self._prefixes.get(page)
        if prefix is None:
            self._free.append(page)
        else:
            self.idle += 1
            self._note_leaf(prefix)

    def _note_leaf(self, prefix: Prefix[R]) -> None:
        if not prefix.children and not self._users[prefix.page]:
            self._leaves[prefix.page] = prefix
