"""What every page must be: well formed, self-contained, and without sideways scrolling."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
HOSTILE = '<script>alert("1")</script>&\'x'


class Page(HTMLParser):
    """Fails on a tag that is closed out of order, an id that occurs twice and what is elsewhere.

    Keeps tags, attributes, and the text that a reader sees.
    """

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.attributes, self.text = [], [], [], ""
        self.feed(html)
        self.close()
        assert self.open == []
        assert len(self.all("id")) == len(set(self.all("id")))
        assert all(source.startswith("data:image/png;base64,") for source in self.all("src"))
        assert all(link.startswith("#") for link in self.all("href"))
        assert not re.search(r"https?://|@import|url\((?!#)", html)

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag
        self.text += " " if tag in ("dt", "dd", "th", "td", "span", "p") else ""

    def handle_data(self, data):
        if not {"script", "style"} & set(self.open):
            self.text += data

    def all(self, name):
        """The values of an attribute, of all tags."""
        return [value for key, value in self.attributes if key == name]


def opened(html, folder, width):
    """The page in a browser, which must not complain nor scroll sideways."""
    from report.headless import Browser

    (folder / "index.html").write_text(html, encoding="utf-8")
    browser = Browser(folder / "profile")
    browser.open(folder / "index.html", width)
    for details in ("false", "true"):
        browser.value(f"document.querySelectorAll('details').forEach(d => d.open = {details})")
        assert browser.value("document.documentElement.scrollWidth - innerWidth") <= 0
    assert browser.errors == []
    return browser
