"""The `sglang` engine: real SGLang servers behind the engine contract.

| file | holds |
|---|---|
| `settings` | `SGLangSettings`: which servers, how they are started, how they are treated |
| `engine` | `SGLangEngine`: the contract, and what happens when a server dies |
| `process`, `supervise` | a managed server as a process group that cannot outlive megarl |
| `client` | control calls to one server |
| `requests`, `wire` | many requests at once; one request and its answer |
| `sync`, `transports`, `layout` | weights into the servers, and the proof that they arrived |
"""

from megarl.rollout.sglang.engine import SGLangEngine
from megarl.rollout.sglang.settings import SGLangSettings

__all__ = ["SGLangEngine", "SGLangSettings"]
