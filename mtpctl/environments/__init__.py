"""Multi-turn generation: environments, agents, and the gateway between agents and engines."""
