"""vLLM: engine, settings, scheduler, weight receiver, clients, plugin and patches.
The engine runs in its actor; scheduler, receiver and patches also run in the processes that vLLM starts.
"""
