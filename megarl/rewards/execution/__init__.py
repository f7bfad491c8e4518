"""Run untrusted programs: `choose(...)` a sandbox that works here, open a `session`, read its `SandboxResult`s."""

from megarl.rewards.execution.choose import Kind, choose
from megarl.rewards.execution.limits import Limits, SandboxFailure, SandboxResult
from megarl.rewards.execution.session import Sandbox, Session

__all__ = ["Kind", "Limits", "Sandbox", "SandboxFailure", "SandboxResult", "Session", "choose"]
