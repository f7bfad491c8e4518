"""The `sglang` engine: real SGLang servers behind the engine contract.

| file | holds |
|---|---|
| `settings` | `SGLangSettings`: which servers, how they are started; makes the engine |
| `engine` | `SGLangEngine`: the contract, and what happens when a server dies |
| `launch` | the command line of a server |
| `process`, `supervise` | a managed server as a process group that cannot outlive megarl |
| `client` | control calls to one server, or to several at once |
| `requests`, `wire` | many requests at once; one request and its answer |
| `sync`, `transports`, `layout` | weights into the servers, and the proof that they arrived |
"""
