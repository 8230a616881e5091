"""Imports the modules of an engine core, in the fork server from which cores are forked (`mtpctl.rollout.vllm.patches.cores`)."""

import setproctitle

from mtpctl.compat.transformers import import_transformers

# setproctitle locates the command line through the original environment, so it is called before `cores._core_main` replaces
# the environment.
setproctitle.setproctitle("mtpctl::EngineCores")
import_transformers()  # faster than vLLM's import of it

import vllm.v1.engine.core  # noqa: E402, F401
