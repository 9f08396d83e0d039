"""Remote calls: the protocol (pure), connections, peers, the server and the agent."""
