"""A real browser on the page, over a pipeline that says what a test wants."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page, expect, sync_playwright

from service.api.keys import ApiKeys
from service.config import ApiSettings
from tests.api_server import WAIT_S, make_api, serving
from tests.talking_pipeline import MAX_LEN, TalkingPipeline

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)
FLAGS = ["--no-sandbox", "--disable-background-networking", "--disable-component-update"]

expect.set_options(timeout=WAIT_S * 1000)


@contextmanager
def chromium() -> Iterator[Browser]:
    """Skips where there is none."""
    if CHROMIUM is None:
        pytest.skip("no chromium here; on Debian: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@dataclass
class Site:
    """The page in a tab, and the pipeline behind it. `complaints`: what the browser's console says
    of it, and whatever it asks of other hosts."""

    page: Page
    pipeline: TalkingPipeline
    url: str
    complaints: list[str]

    def send(self, text: str) -> None:
        self.page.get_by_label("Message", exact=True).fill(text)
        self.page.keyboard.press("Enter")

    def ask(self, text: str = "Hi") -> Locator:
        """Sends a message, waits for the end of the answer, and returns it."""
        before = self.page.locator(".assistant").count()
        self.send(text)
        answer = self.page.locator(".assistant").nth(before)
        expect(answer).to_be_visible()
        self.settled()
        return answer.locator(".body")

    def settled(self) -> None:
        """Nothing runs any more."""
        expect(self.page.get_by_role("button", name="Send")).to_be_visible()

    def ready(self) -> None:
        expect(self.page.locator("#status[data-state=ready]")).to_be_visible()

    @property
    def state(self) -> Locator:
        return self.page.locator("#status")


Visit = Callable[..., Site]


@contextmanager
def visit(browser: Browser, url: str, pipeline: TalkingPipeline, **how: Any) -> Iterator[Site]:
    """The page at `url` in a browser that has never been there."""
    context = browser.new_context(**{"viewport": {"width": 1440, "height": 900}} | how)
    page = context.new_page()
    site = Site(page, pipeline, url, [])
    page.on("console", lambda m: m.type == "error" and site.complaints.append(m.text))
    page.on("pageerror", lambda error: site.complaints.append(str(error)))
    page.on("request", lambda r: r.url.startswith(url) or site.complaints.append(r.url))
    page.goto(url)
    yield site
    context.close()


@contextmanager
def site_of(
    browser: Browser, settings: ApiSettings | None = None, keys: ApiKeys | None = None, **how: Any
) -> Iterator[Site]:
    """A server of its own, and the page of it."""
    pipeline = TalkingPipeline()
    app = make_api(
        pipeline, max_len=MAX_LEN, settings=settings or ApiSettings(), keys=keys or ApiKeys()
    )
    with serving(app) as url, visit(browser, url, pipeline, **how) as site:
        try:
            yield site
        finally:
            pipeline.holds = False
