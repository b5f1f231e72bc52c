"""Moving KV between instances: head plan, wire layout, transports."""
