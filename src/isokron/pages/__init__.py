"""Pages that need nothing but themselves: plots, tables and texts, and files written whole."""
