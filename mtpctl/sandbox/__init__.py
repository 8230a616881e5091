"""Runs model-written Python in isolation: no network, access to the interpreter's files only, resource limits, and reliable termination.

In the caller: `sandbox.Sandbox` executes code and keeps sessions, and `sandbox.shared` is the sandbox of a process; `reward.score` is the
reward `code`; `fences` parses responses.

In the sandbox: `zygote` isolates itself and forks a process for each program, session, answer and list of tests, with a system call filter
(`isolation`) and limits. `inside` is the code in these processes. `judging` runs the tests of an answer, which access the answer by
messages (`questions`, `values`) and report verdicts (`messages`). The guarantees are in `docs/sandbox.md`.

The zygote imports modules of this package at every start, so these import nothing beyond the standard library and `mtpctl.errors`.
"""
