"""Run Python that a model has written: no network, no files but the interpreter's, bounded, and killed for good.

`sandbox.Sandbox` runs code and keeps sessions; `reward.score` is the reward `code`, `environment.Python` the environment `python`.
Those three are the side of the caller, with `fences` and `cases`, which read responses and rows. `zygote` is a process that puts itself
behind walls (`walls`, `landlock`), and forks one process for each run; `inside` is what that process does, behind a filter of system calls
(`seccomp`) and limits. `judging` runs the tests of an answer; these ask it by messages (`questions`, `remote`, `values`), run no text of it
(`guard`), and report by `verdicts`. `docs/sandbox.md` says what holds.

This package is imported by the zygote at every start: it imports nothing beyond the standard library and `mtpctl.errors`.
"""
