"""SGLang: engine, settings, weight receiver, plugin. Runs in the engine's actor and in the processes that SGLang starts."""
