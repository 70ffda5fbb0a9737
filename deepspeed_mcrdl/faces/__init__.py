"""Who calls us: each face turns one interface's calls into catalogue calls of the one runtime."""
