"""Run Python that a model has written: no network, no files but the interpreter's, bounded, and killed for good.

`sandbox.Sandbox` runs code and keeps sessions; `reward.score` is the reward `code`, `environment.Python` the environment `python`.
These three run in the caller, as do `fences` and `cases`, which parse responses and rows. `zygote` is a process that isolates itself
(`walls`, `landlock`) and forks one process for each run. `inside` is the code of that process, behind a system call filter (`seccomp`) and
limits. `judging` runs the tests of an answer. Tests access the answer by messages (`questions`, `remote`, `values`), cannot run text from
it (`guard`), and report with `verdicts`. The guarantees are in `docs/sandbox.md`.

This package is imported by the zygote at every start: it imports nothing beyond the standard library and `mtpctl.errors`.
"""
