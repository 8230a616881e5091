"""vLLM: engine, settings, weight receiver, clients, plugin and patches.
The engine runs in its actor. Receiver and patches also run in the processes that vLLM starts.
"""
