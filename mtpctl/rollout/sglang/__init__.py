"""Everything that knows SGLang: engine, settings, weight receiver and client, plugin.
Runs in the actor that holds the engine, and in the processes that SGLang starts.
"""
