"""The imports of an engine core, for the process from which cores are forked (`patches.cores`)."""

import setproctitle

from mtpctl.compat.transformers_import import import_transformers

# Before a core gets its environment: setproctitle does not find the command line after the environment has changed.
setproctitle.setproctitle("mtpctl::EngineCores")
import_transformers()  # faster than vLLM's import of it

import vllm.v1.engine.core  # noqa: E402, F401
