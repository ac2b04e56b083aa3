"""What every page must be: well formed, self-contained, and without sideways scrolling."""

import re
from html.parser import HTMLParser

VOID = {"meta", "link", "br", "hr", "img", "input", "wbr"}
HOSTILE = '<script>alert("1")</script>&\'x'


class Page(HTMLParser):
    """Fails on a tag that is closed out of order, on an id that occurs twice and on a link."""

    def __init__(self, html):
        super().__init__()
        self.open, self.tags, self.ids = [], [], []
        self.feed(html)
        self.close()
        assert self.open == []
        assert len(self.ids) == len(set(self.ids))
        outside = r"https?://|//[a-z]|@import|url\((?!#)|\bsrc="
        assert not re.search(outside, html.replace("\n// ", ""))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.ids += [value for name, value in attributes if name == "id"]
        assert not {"src", "href"} & {name for name, _ in attributes}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


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
