"""Tools of the event loop: a bounded mailbox, an accept loop, loops by name."""
