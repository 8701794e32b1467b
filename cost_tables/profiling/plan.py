"""Which rounds to time, and for how long.

Every variable of T(R, M, C, N) has to move alone somewhere: batches of many sizes, each drafted
deeply, shallowly and not at all, in small, large and middle tiers, and some of it with long
contexts. All such cells are put in an order of importance, and the time decides how far down the
list a sweep goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cost_tables.measure import Cell
from cost_tables.profiling.errors import ProfileError
from cost_tables.profiling.facts import Facts
from cost_tables.profiling.live import SKIPPED_ROUNDS

PASSES = 2
FEWEST_ROUNDS, MOST_ROUNDS = 4, 32  # of one visit
# Rounds of a visit that are not counted: until the server knows of the change and after it, and
# while it is asked and answers.
LOST_ROUNDS = SKIPPED_ROUNDS + 4
VISIT_OVERHEAD_S, LOAD_OVERHEAD_S = 0.05, 1.0
# New tokens of a request for one round that it is in: more are accepted only from a draft that
# knows the random prompts' continuations well, and then a second load follows.
TOKENS_A_ROUND = 3
KV_SHARE = 0.9  # of the KV pool that a load may fill
# Cells up to this rank are measured however little time there is: fewer tell nothing.
CORE_RANK = 2


class Pace(Protocol):
    """How long things are thought to take."""

    prefill_tokens_per_s: float

    def round_s(self, cell: Cell) -> float:
        """Seconds of a round."""


@dataclass(frozen=True)
class Group:
    """Cells that share the requests of a load."""

    requests: int
    context: int
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Plan:
    """groups: what a pass visits. rounds: that count, of each visit. seconds: of all passes, as
    expected. left_out: cells without room, as text."""

    groups: tuple[Group, ...]
    rounds: int
    seconds: float
    left_out: tuple[str, ...] = ()
    passes: int = PASSES

    @property
    def cells(self) -> tuple[Cell, ...]:
        return tuple(cell for group in self.groups for cell in group.cells)


def spread(values: Sequence[int]) -> list[int]:
    """Last, first, middle, then the middles of what is between: any head of it covers the range."""
    order = dict.fromkeys((len(values) - 1, 0)) if values else {}
    step = len(values) - 1
    while step > 1:
        step = -(-step // 2)
        order |= dict.fromkeys(range(step, len(values) - 1, step))
    return [values[i] for i in dict.fromkeys([*order, *range(len(values))])]


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({*(2**i for i in range(most.bit_length())), most})


def ranked_cells(
    facts: Facts, requests: Sequence[int], contexts: Sequence[int]
) -> list[tuple[int, Cell]]:
    """All cells that make sense, the most important (rank 0) first."""
    ranked: dict[Cell, int] = {}

    def add(rank: int, cell: Cell) -> None:
        ranked[cell] = min(rank, ranked.get(cell, rank))

    for i, count in enumerate(spread(sorted(requests))):
        for j, depth in enumerate(spread(doubling(facts.gamma))):
            most = facts.tier(count * (1 + depth))
            tiers = [tier for tier in facts.tiers if count <= tier <= most]
            for k, tokens in enumerate(spread(tiers)):
                add(i + j + k, Cell(count, tokens, depth, contexts[0]))
        add(i, Cell(count, facts.plain_tokens(count), 0, contexts[0]))
        full = facts.tier(count * (1 + facts.gamma))
        for j, context in enumerate(contexts[1:]):
            # The smallest batch is the cheapest one in which to see what a context costs.
            rank = 1 + i + 2 * j
            add(rank, Cell(count, full, facts.gamma, context))
            add(rank, Cell(count, facts.plain_tokens(count), 0, context))
            for k, tokens in enumerate(spread([t for t in facts.tiers if count <= t < full])):
                add(rank + 2 + k, Cell(count, tokens, facts.gamma, context))
    return sorted(((rank, cell) for cell, rank in ranked.items()), key=lambda x: (x[0], _key(x[1])))


def room(facts: Facts, requests: int, context: int) -> int:
    """New tokens that each request of a load has room for; below 1: there is none."""
    of_all = int(KV_SHARE * facts.kv_tokens) // requests
    return min(of_all, facts.max_context) - context - 2 * (facts.gamma + 1)


def new_tokens(facts: Facts, group: Group, rounds: int) -> int:
    """max_new_tokens of a load that should see all visits of a group."""
    needed = len(group.cells) * (rounds + LOST_ROUNDS + 2) * TOKENS_A_ROUND
    return max(1, min(needed, room(facts, group.requests, group.context)))


def make_plan(
    facts: Facts,
    pace: Pace,
    seconds: float,
    requests: Sequence[int] | None = None,
    contexts: Sequence[int] = (128, 1024),
) -> Plan:
    """The cells that `seconds` are enough for, and the core however few they are.

    requests: R to measure; None: 1, 2, 4, ... up to the most. Raises ProfileError if there is room
    for nothing.
    """
    chosen = requests or doubling(facts.max_requests)
    if wrong := [count for count in chosen if not 1 <= count <= facts.max_requests]:
        raise ProfileError(
            f"--requests has {wrong[0]}; must be 1 to {facts.max_requests}, the most that the "
            "server runs at a time (--max-running-requests)"
        )
    least = (FEWEST_ROUNDS + LOST_ROUNDS) * TOKENS_A_ROUND
    cells: list[Cell] = []
    left_out: dict[str, None] = {}
    spent = 0.0
    for rank, cell in ranked_cells(facts, chosen, contexts):
        if room(facts, cell.requests, cell.context) < least:
            need = cell.requests * (cell.context + least + 2 * (facts.gamma + 1))
            left_out[
                f"R {cell.requests}, context {cell.context}: needs {need} KV tokens, has "
                f"{int(KV_SHARE * facts.kv_tokens)}, and {facts.max_context} a request"
            ] = None
            continue
        more = PASSES * visit_s(pace, cell, FEWEST_ROUNDS)
        if not any((c.requests, c.context) == (cell.requests, cell.context) for c in cells):
            more += PASSES * load_s(pace, cell)
        if rank <= CORE_RANK or spent + more <= seconds:
            cells.append(cell)
            spent += more
    if not cells:
        raise ProfileError(f"no cell has room: {next(iter(left_out))}")
    rounds = _rounds(pace, cells, seconds - spent)
    total = spent + sum(PASSES * (rounds - FEWEST_ROUNDS) * pace.round_s(c) for c in cells)
    return Plan(groups_of(cells), rounds, total, tuple(left_out))


def _rounds(pace: Pace, cells: Sequence[Cell], left_s: float) -> int:
    """Of a visit: what the time that is left is enough for."""
    one_more = PASSES * sum(pace.round_s(cell) for cell in cells)
    return min(FEWEST_ROUNDS + max(0, int(left_s / one_more)), MOST_ROUNDS)


def visit_s(pace: Pace, cell: Cell, rounds: int) -> float:
    """Seconds of a visit with so many rounds that count."""
    return (rounds + LOST_ROUNDS) * pace.round_s(cell) + VISIT_OVERHEAD_S


def load_s(pace: Pace, cell: Cell) -> float:
    """Seconds until all requests of a load decode, and to end them."""
    return cell.requests * cell.context / pace.prefill_tokens_per_s + LOAD_OVERHEAD_S


def seconds_of(plan: Plan, pace: Pace) -> float:
    """All visits and loads of a plan."""
    visits = sum(visit_s(pace, cell, plan.rounds) for cell in plan.cells)
    loads = sum(load_s(pace, group.cells[0]) for group in plan.groups)
    return plan.passes * (visits + loads)


def groups_of(cells: Sequence[Cell]) -> tuple[Group, ...]:
    """Cells by the load that they share."""
    shared: dict[tuple[int, int], list[Cell]] = {}
    for cell in sorted(cells, key=_key):
        shared.setdefault((cell.requests, cell.context), []).append(cell)
    return tuple(Group(*key, tuple(group)) for key, group in sorted(shared.items()))


def _key(cell: Cell) -> tuple[int, ...]:
    return cell.requests, cell.context, cell.depth, cell.tokens
