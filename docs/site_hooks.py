"""Hooks of mkdocs: pages whose text lies outside docs/, and links to it.

Pages link to ../examples/train_cnn.py and CONTRIBUTING.md to docs/architecture.md, as is right in
the repository. The site has the examples on one page, and notebooks and the other files as pages of
their own.
"""

import base64
import json
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parent.parent
PAGES = {"contributing.md": "CONTRIBUTING.md", "changelog.md": "CHANGELOG.md"}


def examples() -> str:
    """All scripts of examples/, each under a heading with its file name."""
    scripts = sorted((ROOT / "examples").glob("*.py"))
    parts = [f"## {path.name}\n\n```python\n{path.read_text()}```\n" for path in scripts]
    return "\n".join(
        ["# Examples\n", "Complete scripts, tested in every run of the tests.\n", *parts]
    )


def notebook(path: Path) -> str:
    """The text and code of a notebook with its stored outputs, as Markdown."""
    parts = []
    for cell in json.loads(path.read_text())["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            source = re.sub(r"\]\((\w+)\.ipynb\)", r"](\1.md)", source)
            parts.append(source.replace("](../docs/", "](../"))
            continue
        parts.append(f"```python\n{source}\n```")
        for output in cell["outputs"]:
            data = {kind: "".join(value) for kind, value in output.get("data", {}).items()}
            if "image/svg+xml" in data:
                picture = base64.b64encode(data["image/svg+xml"].encode()).decode()
                parts.append(f'<img alt="" src="data:image/svg+xml;base64,{picture}">')
            elif "text/markdown" in data:
                parts.append(data["text/markdown"])
            else:
                text = "".join(output.get("text", data.get("text/plain", "")))
                parts.append(f"```text\n{text.rstrip()}\n```")
    return "\n\n".join(parts)


def on_files(files: Any, config: Any) -> Any:
    texts = {page: (ROOT / source).read_text() for page, source in PAGES.items()}
    for path in (ROOT / "notebooks").glob("*.ipynb"):
        texts[f"notebooks/{path.stem}.md"] = notebook(path)
    for page, text in {**texts, "examples.md": examples()}.items():
        files.append(File.generated(config, page, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links in terms of the repository become links in terms of the site."""
    if page.file.src_uri in PAGES:
        markdown = re.sub(r"\]\((?:\./)?docs/", "](", markdown)
    markdown = re.sub(r"\]\((?:\.\./)+examples/(\w+)\.py\)", r"](examples.md#\1py)", markdown)
    markdown = re.sub(r"\]\(\.\./notebooks/(\w+)\.ipynb\)", r"](notebooks/\1.md)", markdown)
    for name, source in PAGES.items():
        markdown = re.sub(rf"\]\((?:\.\./)*{source}", f"]({name}", markdown)
    # Python-Markdown nests lists by four spaces, GitHub by two
    parts = re.split(r"(^```.*?^```)", markdown, flags=re.DOTALL | re.MULTILINE)
    parts[::2] = [
        re.sub(r"^ {2,3}(?=- )", " " * 4, part, flags=re.MULTILINE) for part in parts[::2]
    ]
    return "".join(parts)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Docstrings name pages as files, docs/engine.md; in the reference these become links."""
    if page.file.src_uri.startswith("reference/"):
        return re.sub(r"\bdocs/(\w+)\.md\b", r'<a href="../\1.html">\1</a>', html)
    return html
