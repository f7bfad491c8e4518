"""What is known of each running request, as tensors, so that a step touches all of them without Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megarl.rollout.embedded.draw import Filters, uniforms
from megarl.rollout.embedded.job import Job


class Table:
    """One line for each running request, which keeps it while it runs.

    [lines, width]: tokens int64 (prompt and response), uniforms float64 and logprobs float32 (column p
    belongs to the token at position p). routes [lines, width, moe_layers, top_k]. stops int64 [lines, n],
    filled up with -1. [lines]: length, limit, top_k int64; temperature, top_p, min_p float32.
    """

    def __init__(self, lines: int, jobs: Sequence[Job], device: torch.device):
        """Make a table wide enough for these jobs; others may be refused by `fits`."""
        self.device, self.width = device, max(job.limit for job in jobs)
        stops = max(len(job.sampling.stop_token_ids) for job in jobs)
        wide, routes = jobs[0].routes.itemsize > 1, jobs[0].routes.shape[1:]

        def full(value: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
            return torch.full((lines, *shape), value, dtype=dtype, device=device)

        self.tokens = full(0, torch.int64, self.width)
        self.uniforms = full(0, torch.float64, self.width)
        self.logprobs = full(0, torch.float32, self.width)
        self.routes = full(0, torch.int32 if wide else torch.uint8, self.width, *routes)
        self.stops = full(-1, torch.int64, stops)
        self.length, self.limit, self.top_k = (full(0, torch.int64) for _ in range(3))
        self.temperature, self.top_p, self.min_p = (full(0, torch.float32) for _ in range(3))

    def fits(self, job: Job) -> bool:
        return job.limit <= self.width and len(job.sampling.stop_token_ids) <= self.stops.shape[1]

    def write(self, lines: torch.Tensor, jobs: Sequence[Job]) -> None:
        """Give the jobs these lines, int64 [jobs]."""
        count = len(jobs)
        tokens = np.zeros((count, self.width), np.int64)
        numbers = np.zeros((count, self.width), np.float64)
        logprobs = np.zeros((count, self.width), np.float32)
        routes = np.zeros((count, *self.routes.shape[1:]), np.int32)
        stops = np.full((count, self.stops.shape[1]), -1, np.int64)
        for i, job in enumerate(jobs):
            tokens[i, : len(job.tokens)] = job.tokens
            numbers[i, job.prompt : job.limit] = uniforms(job.seed, job.sampling.max_new_tokens)
            logprobs[i, job.prompt : len(job.tokens)] = job.logprobs
            routes[i, : len(job.routes)] = job.routes
            stops[i, : len(job.sampling.stop_token_ids)] = job.sampling.stop_token_ids
        for column, values in (
            (self.tokens, tokens),
            (self.uniforms, numbers),
            (self.logprobs, logprobs),
            (self.routes, routes),
            (self.stops, stops),
            (self.length, np.array([len(job.tokens) for job in jobs])),
            (self.limit, np.array([job.limit for job in jobs])),
            (self.temperature, np.array([job.sampling.temperature for job in jobs])),
            (self.top_p, np.array([job.sampling.top_p for job in jobs])),
            (self.top_k, np.array([job.sampling.top_k for job in jobs])),
            (self.min_p, np.array([job.sampling.min_p for job in jobs])),
        ):
            column[lines] = torch.from_numpy(values).to(column)

    def read(self, line: int, job: Job) -> None:
        """Store in the job what its line has."""
        n = int(self.length[line])
        job.tokens = self.tokens[line, :n].cpu().numpy().copy()
        job.logprobs = self.logprobs[line, job.prompt : n].cpu().numpy().copy()
        if job.request.return_routes:
            job.routes = self.routes[line, : n - 1].cpu().numpy().astype(job.routes.dtype)

    def filters(self, lines: torch.Tensor) -> Filters:
        return Filters(self.top_p[lines], self.top_k[lines], self.min_p[lines])
