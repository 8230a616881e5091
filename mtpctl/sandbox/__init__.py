"""Runs Python that a model has written: without network, with access to the interpreter's files only, limited, and reliably killed.

In the caller: `sandbox.Sandbox` runs code and keeps sessions; `reward.score` is the reward `code`, `environment.Python` the environment
`python`; `fences` parses responses; `shared` is the sandbox of a process.

In the sandbox: `zygote` isolates itself (`isolation`) and forks a process for each run, with a system call filter (`kernel`) and limits.
`inside` is the code of a run. `judging` runs the tests of an answer, which access it by messages (`questions`, `remote`, `values`) and
report with verdicts (`messages`). The guarantees are in `docs/sandbox.md`.

The zygote imports this package at every start, so it imports nothing beyond the standard library and `mtpctl.errors`.
"""
