"""Self-contained HTML pages and SVG charts."""
