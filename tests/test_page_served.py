"""The page of the default deployment, served for real."""

from pathlib import Path

import pytest
from playwright.sync_api import expect

from tests.browser import chromium, visit
from tests.serving import serve
from tests.talking_pipeline import TalkingPipeline

ANSWER_MS = 120_000


@pytest.mark.full
@pytest.mark.usefixtures("default_model")
def test_a_chat_with_the_default_model(tmp_path: Path) -> None:
    """It answers, the lanes say how, and the text without speculation is the same."""
    with (
        chromium() as browser,
        serve(tmp_path / "serve.log") as served,
        visit(browser, served.url, TalkingPipeline()) as site,
    ):
        page = site.page
        expect(site.state).to_have_text("ready, drafts: lookup+pdm")
        expect(page.locator("#model")).to_have_text("smollm2-135m-instruct")
        site.send("What is the capital of France?")
        expect(page.locator("#announcer")).to_contain_text("Paris", timeout=ANSWER_MS)
        site.settled()
        outcomes = page.locator("#lanes-body .said")
        assert outcomes.count() > 5
        assert page.locator("#lanes-body .accepted.cell").count() > 0
        page.get_by_role("button", name="Measure without it").click()
        expect(page.locator(".ratio")).to_be_visible(timeout=ANSWER_MS)
        expect(page.locator("#comparison")).to_contain_text("The texts are the same.")
        assert site.complaints == []
