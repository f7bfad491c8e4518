"""Decoding many requests at once: a bounded number of slots that requests enter and leave between steps.

The running rows are slots 0, 1, ... of a pre-allocated cache. A step runs every row by one token, without any
Python per row; a row that finishes gives its slot to the last one, so that nothing is computed for it again.
Requests wait in a queue, in order. When nothing runs or waits everything is released: what a batch computes
depends on its own requests and on the weights only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from megarl.records import FinishReason
from megarl.rollout.embedded.draw import draw
from megarl.rollout.embedded.job import Job
from megarl.rollout.embedded.model import HFModel, KVCache
from megarl.rollout.embedded.table import Table

PREFILL_TOKENS = 8192  # of one prefill forward, padding included: bounds its memory


class DecodeBatch:
    """Requests waiting and running on one model. Every method returns between steps; nothing here waits.

    running[r] is the job of row r, whose line in the table is lines[r].
    """

    def __init__(self, model: HFModel, slots: int):
        self.model, self.slots = model, slots
        self.device = next(model.network.parameters()).device
        self.version = 0
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self._release()

    def _release(self) -> None:
        self.kv = KVCache(self.slots, 0)
        self.table: Table | None = None
        self.lines = torch.empty(0, dtype=torch.int64, device=self.device)
        self.free = list(range(self.slots))

    def add(self, jobs: Sequence[Job]) -> None:
        self.waiting.extend(jobs)

    @torch.inference_mode()
    def step(self) -> None:
        """Admit what fits, then draw one token for every running row."""
        room = self.slots - len(self.running)
        if self.waiting and room >= min(len(self.waiting), max(1, self.slots // 8)):
            self._admit()
        if self.running:
            self._decode()
        if not self.running and not self.waiting:
            self._release()

    @torch.inference_mode()
    def retract(self) -> None:
        """Forget keys and values; running rows go back to the head of the queue with what they have."""
        self.waiting.extendleft(reversed(self._leave(list(range(len(self.running))))))

    @torch.inference_mode()
    def drop(self, ids: set[str] | None, *, deliver: bool) -> None:
        """End these requests (None: all) where they stand. deliver: they become results with reason 'abort'."""

        def hit(job: Job) -> bool:
            return ids is None or job.request.request_id in ids

        jobs = self._leave([row for row, job in enumerate(self.running) if hit(job)])
        jobs += [job for job in self.waiting if hit(job)]
        self.waiting = deque(job for job in self.waiting if not hit(job))
        for job in jobs if deliver else ():
            job.finish("abort")

    def _admit(self) -> None:
        """Fill the free slots from the queue, run the new sequences and draw their first token."""
        if self.table is None or not all(map(self.table.fits, self.waiting)):
            self.retract()
            self.table = Table(self.slots, self.waiting, self.device)
            self.kv = KVCache(self.slots, self.table.width)
        first = len(self.running)
        jobs = [self.waiting.popleft() for _ in range(min(self.slots - first, len(self.waiting)))]
        lines = torch.tensor([self.free.pop() for _ in jobs], device=self.device)
        self.table.write(lines, jobs)
        self._rows([*self.running, *jobs], torch.cat([self.lines, lines]))
        self._append(first, self._prefill(first, jobs))

    def _prefill(self, first: int, jobs: list[Job]) -> torch.Tensor:
        """Fill the cache of rows first, first + 1, ...; equal sequences run once. Returns logits by job."""
        index: dict[bytes, int] = {}
        member = [index.setdefault(job.tokens.tobytes(), len(index)) for job in jobs]
        unique = [jobs[member.index(u)].tokens for u in range(len(index))]
        logits = torch.empty(len(jobs), self.model.vocabulary, device=self.device)
        for part in parts([len(tokens) for tokens in unique]):
            lengths = torch.tensor([len(unique[u]) for u in part])
            ids = torch.zeros(len(part), int(lengths.max()), dtype=torch.int64)
            for row, u in enumerate(part):
                ids[row, : len(unique[u])] = torch.from_numpy(unique[u])
            out = self.model.prefill(ids.to(self.device), lengths.to(self.device), self.routed)
            here = [(j, u - part.start) for j, u in enumerate(member) if u in part]
            at, of = torch.tensor(here, device=self.device).T
            logits[at] = out.logits[of]
            self.kv.write(first + at, out.keys[:, of], out.values[:, of])
            if out.routes is not None:
                self._write_routes([(jobs[j], first + j, row) for j, row in here], out.routes)
        return logits

    def _write_routes(self, who: list[tuple[Job, int, int]], routes: torch.Tensor) -> None:
        """Store routes, but keep those that tokens have by the weights that sampled them."""
        table = self._table()
        for job, row, source in who:
            known, n = len(job.routes), len(job.tokens)
            table.routes[self.lines[row], known:n] = routes[source, known:n].to(table.routes.dtype)

    def _decode(self) -> None:
        table, lines = self._table(), self.lines
        positions = table.length[lines] - 1
        at = lines * table.width + positions
        length = int(positions.max()) + 1
        self.kv.fit(len(lines), length)
        out, routes = self.model.decode(table.tokens.view(-1)[at], positions, self.kv, length, self.routed)
        if routes is not None:
            table.routes.flatten(0, 1)[at] = routes.to(table.routes.dtype)
        self._append(0, out)

    def _append(self, first: int, logits: torch.Tensor) -> None:
        """Draw the next token of rows first, first + 1, ... and let those that are done go."""
        table, lines = self._table(), self.lines[first:]
        position = table.length[lines]
        at = lines * table.width + position
        filters = table.filters(lines) if self.filtered else None
        tokens, logprobs = draw(logits, table.temperature[lines], table.uniforms.view(-1)[at], filters)
        table.tokens.view(-1)[at] = tokens
        table.logprobs.view(-1)[at] = logprobs
        table.length[lines] = position + 1
        stopped = (table.stops[lines] == tokens[:, None]).any(1)
        done = (stopped | (position + 1 >= table.limit[lines])).nonzero()[:, 0]
        if len(done):
            reasons: list[FinishReason] = ["stop" if s else "length" for s in stopped[done].tolist()]
            for job, reason in zip(self._leave((first + done).tolist()), reasons, strict=True):
                job.finish(reason)

    def _leave(self, rows: list[int]) -> list[Job]:
        """Take these rows (ascending) out and store in their jobs what they have; the last rows fill the gaps."""
        jobs = [self.running[row] for row in rows]
        if not jobs:
            return jobs
        table, order = self._table(), list(range(len(self.running)))
        gone = self.lines[rows].tolist()
        for line, job in zip(gone, jobs, strict=True):
            table.read(line, job)
            job.close_span(self.version)
        self.free += gone
        keep = len(order) - len(rows)
        target = [row for row in rows if row < keep]
        source = sorted(set(order[keep:]) - set(rows))
        for t, s in zip(target, source, strict=True):
            order[t] = s
        self.kv.move(source, target)
        self._rows([self.running[row] for row in order[:keep]], self.lines[order[:keep]])
        return jobs

    def _rows(self, jobs: list[Job], lines: torch.Tensor) -> None:
        self.running, self.lines = jobs, lines
        self.routed = any(job.request.return_routes for job in jobs)
        self.filtered = any(job.filtered for job in jobs)

    def _table(self) -> Table:
        assert self.table is not None
        return self.table


def parts(lengths: list[int]) -> list[range]:
    """Split into ranges of consecutive sequences whose padded forward stays within PREFILL_TOKENS, at least one in
    each part."""
    ranges, start, longest = [], 0, 0
    for i, n in enumerate(lengths):
        longest = max(longest, n)
        if i > start and longest * (i + 1 - start) > PREFILL_TOKENS:
            ranges.append(range(start, i))
            start, longest = i, n
    return [*ranges, range(start, len(lengths))]
