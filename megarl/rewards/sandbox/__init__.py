"""Run untrusted programs: `choose(...)` a sandbox that works here, open a `session`, look at its `Run`s."""

from megarl.rewards.sandbox.choose import Kind, choose
from megarl.rewards.sandbox.limits import Limits, Run, SandboxFailure
from megarl.rewards.sandbox.session import Sandbox, Session

__all__ = ["Kind", "Limits", "Run", "Sandbox", "SandboxFailure", "Session", "choose"]
