"""Everything that knows vLLM: engine, settings, scheduler, weight receiver, HTTP client, plugin and patches.
Runs in the actor that holds the engine, and in the processes that vLLM starts.
"""
