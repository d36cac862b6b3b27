"""torch's TCPStore for the workers, served by a child of the agent."""
