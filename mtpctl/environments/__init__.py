"""What answers the model between its turns: environments, agents, the gateway, tools and user callables."""
