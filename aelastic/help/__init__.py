"""Help on messages: `topics` names the entry of the troubleshooting page that explains one, and has its text."""

__all__ = ["topics"]
