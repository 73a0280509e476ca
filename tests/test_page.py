"""The page at `/`, in a real browser."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Locator, expect

from service.api.keys import load_keys
from service.config import ApiSettings
from tests.api_server import WAIT_S, make_api, serving
from tests.browser import Site, chromium, site_of, visit
from tests.serving import free_port
from tests.talking_pipeline import MAX_LEN, TalkingPipeline

DASH, TIMES = "\u2013", "\u00d7"
PHONE = {"viewport": {"width": 390, "height": 844}, "has_touch": True, "is_mobile": True}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[TalkingPipeline, str]]:
    pipeline = TalkingPipeline()
    with serving(make_api(pipeline, max_len=MAX_LEN)) as url:
        yield pipeline, url


@pytest.fixture
def site(browser: Browser, served: tuple[TalkingPipeline, str]) -> Iterator[Site]:
    """In a browser that has never been there."""
    pipeline, url = served
    pipeline.reset()
    with visit(browser, url, pipeline) as site:
        site.ready()
        yield site
        pipeline.holds = False
    assert site.complaints == []


def focused(site: Site) -> str:
    return site.page.evaluate("document.activeElement.id || document.activeElement.textContent")


def stored(site: Site, name: str) -> object:
    return json.loads(site.page.evaluate(f"localStorage.getItem('spd.{name}')"))


# --- a chat -----------------------------------------------------------------------------------


def test_an_answer_comes_in(site: Site) -> None:
    site.pipeline.reply, site.pipeline.holds = "Hello, here I am.", True
    site.send("Hi")
    expect(site.page.locator(".user .body")).to_have_text("Hi")
    expect(site.page.locator(".assistant .body")).to_have_text("Hello, her")  # ten tokens
    expect(site.page.locator("[aria-busy=true]")).to_have_count(1)
    site.pipeline.holds = False
    expect(site.page.locator(".assistant .body")).to_have_text("Hello, here I am.")
    site.settled()
    expect(site.page.locator("#announcer")).to_have_text("Answer: Hello, here I am.")
    expect(site.page.locator("[aria-busy=true]")).to_have_count(0)


def test_the_next_message_has_those_before(site: Site) -> None:
    site.ask("One")
    site.ask("Two")
    prompt = "".join(map(chr, site.pipeline.requests[-1].prompt_ids))
    assert prompt == "<user>One<assistant>Hello.<user>Two"


def test_shift_enter_breaks_the_line(site: Site) -> None:
    field = site.page.get_by_label("Message", exact=True)
    field.fill("a")
    site.page.keyboard.press("Shift+Enter")
    site.page.keyboard.type("b")
    assert field.input_value() == "a\nb"
    assert not site.pipeline.requests
    site.page.keyboard.press("Enter")
    expect(site.page.locator(".user .body")).to_have_text("a\nb")
    assert field.input_value() == ""
    site.settled()


def test_nothing_is_not_sent(site: Site) -> None:
    site.send("  \n ")
    expect(site.page.locator(".message")).to_have_count(0)
    assert not site.pipeline.requests


@pytest.mark.parametrize("how", ["button", "Escape"])
def test_stop(site: Site, how: str) -> None:
    """The request ends at the server, and what has come stays."""
    site.pipeline.reply, site.pipeline.holds = "Hello, here I am.", True
    site.send("Hi")
    answer = site.page.locator(".assistant")
    expect(answer.locator(".body")).to_have_text("Hello, her")
    if how == "button":
        site.page.get_by_role("button", name="Stop").click()
    else:
        site.page.keyboard.press("Escape")
    site.settled()
    expect(answer).to_contain_text("Stopped.")
    deadline = time.monotonic() + WAIT_S
    while site.pipeline.open and time.monotonic() < deadline:
        site.page.wait_for_timeout(10)
    assert site.pipeline.open == 0
    assert focused(site) == "input"
    site.pipeline.holds = False
    site.ask("Go on")
    prompt = "".join(map(chr, site.pipeline.requests[-1].prompt_ids))
    assert prompt == "<user>Hi<assistant>Hello, her<user>Go on"


def test_conversations_are_kept(site: Site) -> None:
    site.ask("One")
    site.page.get_by_role("button", name="New chat").click()
    expect(site.page.locator(".message")).to_have_count(0)
    site.ask("Two")
    chats = site.page.locator("#conversations .open")
    expect(chats).to_have_text(["Two", "One"])
    site.page.reload()
    expect(chats).to_have_text(["Two", "One"])
    chats.nth(1).click()
    expect(site.page.locator(".message .body")).to_have_text(["One", "Hello."])
    expect(chats.nth(1)).to_have_attribute("aria-current", "true")
    site.page.get_by_role("button", name="Delete: One").click()
    expect(chats).to_have_text(["Two"])
    expect(site.page.locator(".message")).to_have_count(0)
    assert [chat["title"] for chat in stored(site, "chats")] == ["Two"]


def test_a_deleted_conversation_does_not_come_back(site: Site) -> None:
    """Not even with the answer that was on its way."""
    site.pipeline.reply, site.pipeline.holds = "Hello, here I am.", True
    site.send("Hi")
    expect(site.page.locator(".assistant .body")).to_have_text("Hello, her")
    site.page.get_by_role("button", name="Delete: Hi").click()
    site.settled()
    expect(site.page.locator("#conversations li")).to_have_count(0)
    assert stored(site, "chats") == []


def test_a_store_that_is_broken(site: Site) -> None:
    for rubbish in ["{", "null", "7", '[{"id": 1}]', '[{"id": "a", "messages": [0]}]']:
        site.page.evaluate("text => localStorage.setItem('spd.chats', text)", rubbish)
        site.page.evaluate("text => localStorage.setItem('spd.settings', text)", rubbish)
        site.page.reload()
        expect(site.ask()).to_have_text("Hello.")


def test_settings_are_sent_and_kept(site: Site) -> None:
    site.page.get_by_role("button", name="Settings").click()
    for label, value in {
        "System prompt": "Be brief.",
        "Temperature": "0.7",
        "Top-p": "0.9",
        "Most tokens": "3",
        "Seed": "5",
    }.items():
        site.page.get_by_label(label, exact=True).fill(value)
    site.page.get_by_role("button", name="Done").click()
    site.page.reload()
    site.ready()
    expect(site.ask()).to_have_text("Hel")
    (request,) = site.pipeline.requests
    assert "".join(map(chr, request.prompt_ids)) == "<system>Be brief.<user>Hi"
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.seeded, sampling.key) == (
        0.7,
        0.9,
        True,
        5,
    )
    assert request.max_tokens == 3
    site.page.get_by_role("button", name="Settings").click()
    site.page.get_by_role("button", name="Reset").click()
    site.page.get_by_role("button", name="Done").click()
    site.ask()
    site.ask()
    before, last = (request.sampling for request in site.pipeline.requests[-2:])
    assert (last.temperature, last.top_p, last.seeded) == (0.6, 1, True)
    assert before.key != last.key, "another seed for each message"


# --- the pipeline -----------------------------------------------------------------------------


def cells(site: Site, kind: str) -> Locator:
    return site.page.locator(f"#lanes-body .{kind}")


def figure(site: Site, name: str) -> str:
    text = site.page.locator(f"#figures div:has(dt:text-is('{name}')) dd").inner_text()
    return text.split("\n")[0]


def test_the_lanes_are_what_happened(site: Site) -> None:
    """Of "Hello!" and its end, by hand: the prompt is 0 to 7, and 9 and 12 are drafted wrong."""
    site.pipeline.reply = "Hello!"
    site.ask("Hi")
    lines = [
        "|".join(line.locator("td").all_text_contents())
        for line in site.page.locator("#lanes-body tr").all()
    ]
    assert lines == [
        "▤8 tokens prompt|· bubble|",
        "· bubble|▤8 tokens prompt|■H undrafted",
        "■H certain|· bubble|",
        "✕# rejectedpdm|■H certain|✕e rejected",
        "■e certain|· bubble|",
        "✓l acceptedpdm|■e certain|✓l accepted",
        "✓l acceptedpdm|✓l acceptedpdm|✓l accepted",
        "✕# rejectedpdm|✓l acceptedpdm|✕o rejected",
        "■o certain|· bubble|",
        "✓! acceptedpdm|■o certain|✓! accepted",
        "✓\ue000 acceptedpdm|✓! acceptedpdm|✓\ue000 accepted",
    ]
    assert figure(site, "Acceptance") == "67\u202f%"  # 4 of 6
    assert figure(site, "Tokens per cycle") == "0.67"  # 6 in 9
    expect(site.page.locator("#drafter")).to_contain_text("2 stages, drafts: pdm")


def test_void_tokens(site: Site) -> None:
    site.pipeline.stages, site.pipeline.reply = 4, "Hello, here I am."
    site.ask("Hi")
    expect(site.page.locator("#lanes-head th")).to_have_text(
        ["Cycle", "Stage 0", "Stage 1", "Stage 2", "Stage 3", "Verdict"]
    )
    assert cells(site, "void").count() > 0
    assert cells(site, "rejected.cell").count() > 0
    assert cells(site, "proposed").count() == 0, "each has a fate in the end"


def test_a_run_without_speculation(site: Site) -> None:
    site.page.get_by_role("switch", name="Speculation").uncheck()
    site.pipeline.reply = "Hello, here I am."
    site.ask("Hi")
    assert not site.pipeline.requests[0].speculates
    assert figure(site, "Acceptance") == DASH
    assert figure(site, "Tokens per cycle") == "0.50"
    site.page.reload()
    expect(site.page.get_by_role("switch", name="Speculation")).not_to_be_checked()


@pytest.mark.parametrize("first", [True, False])
def test_the_comparison_is_measured(site: Site, first: bool) -> None:
    """With each of the two runs first; what is said are the rates of these runs."""
    site.pipeline.reply, site.pipeline.pause_s = "Hello, here I am.", 0.005
    site.page.get_by_role("switch", name="Speculation").set_checked(first)
    button = site.page.locator("#compare")
    expect(button).to_be_disabled()
    site.ask("Hi")
    rate_of_answer = figure(site, "Tokens per second")
    button.click()
    expect(site.page.locator(".ratio")).to_be_visible()
    said = site.page.locator("#comparison").inner_text()
    rate_of_other = figure(site, "Tokens per second")
    rates = (rate_of_answer, rate_of_other) if first else (rate_of_other, rate_of_answer)
    assert f"{rates[0]} tokens/s with pdm, {rates[1]} without" in said
    assert said.endswith("one run each, 18 and 18 tokens. The texts are the same.")
    ratio = float(said.split(TIMES)[0])
    assert ratio == pytest.approx(float(rates[0]) / float(rates[1]), abs=0.02)
    assert [request.speculates for request in site.pipeline.requests] == [first, not first]
    assert site.pipeline.requests[1].max_tokens == 18
    assert len({(r.prompt_ids, r.sampling) for r in site.pipeline.requests}) == 1
    expect(site.page.locator(".message")).to_have_count(2)  # the second run is no answer
    site.pipeline.holds = True
    site.send("And now?")
    expect(site.page.locator(".ratio")).to_have_count(0)
    expect(button).to_be_disabled()


def test_a_comparison_that_is_not_allowed(browser: Browser) -> None:
    with site_of(browser, ApiSettings(speculation_switch=False)) as site:
        site.ready()
        site.pipeline.reply = "Hello, here I am."
        site.ask("Hi")
        site.page.locator("#compare").click()
        expect(site.page.locator("#comparison")).to_have_text(
            "speculation: This server does not let requests turn it off."
        )


# --- what goes wrong --------------------------------------------------------------------------


def test_an_error_is_shown(browser: Browser) -> None:
    with site_of(browser) as site:
        site.ready()
        site.pipeline.error = "The pipeline is not there; try again."
        site.send("Hi")
        alert = site.page.get_by_role("alert")
        expect(alert).to_contain_text("The pipeline is not there; try again.")
        expect(site.page.locator(".assistant")).to_have_count(0)
        site.pipeline.error = None
        alert.get_by_role("button", name="Try again").click()
        expect(site.page.locator(".assistant .body")).to_have_text("Hello.")
        expect(alert).to_have_count(0)
        assert stored(site, "chats")[0]["messages"] == [
            {"role": "user", "content": "Hi"},
            {"role": "assistant", "content": "Hello."},
        ]


def test_an_error_in_mid_text(site: Site) -> None:
    site.pipeline.reply, site.pipeline.breaks = "Hello, here I am.", True
    site.send("Hi")
    expect(site.page.get_by_role("alert")).to_contain_text("The pipeline failed; try again.")
    expect(site.page.locator(".assistant")).to_contain_text("Hello, her")
    expect(site.page.locator(".assistant")).to_contain_text("Broken off.")
    site.pipeline.breaks = False
    site.page.get_by_role("button", name="Try again").click()
    expect(site.page.locator(".assistant .body")).to_have_text("Hello, here I am.")
    expect(site.page.locator(".message")).to_have_count(2)


def test_a_setting_that_is_refused(browser: Browser) -> None:
    with site_of(browser) as site:
        site.ready()
        site.page.evaluate("localStorage['spd.settings'] = JSON.stringify({temperature: '9'})")
        site.page.reload()
        site.ready()
        site.send("Hi")
        expect(site.page.get_by_role("alert")).to_contain_text("temperature: Input should be less")


def test_a_server_that_starts(browser: Browser) -> None:
    with site_of(browser) as site:
        site.ready()
        site.pipeline.is_ready = False
        site.page.reload()
        expect(site.state).to_have_text("starting")
        site.pipeline.is_ready = True
        site.ready()
        expect(site.state).to_have_text("ready, drafts: pdm")


def test_an_api_key_is_asked_for(browser: Browser) -> None:
    keys = load_keys(None, {"SPD_API_KEYS": "sk-one"})
    with site_of(browser, keys=keys) as site:
        field = site.page.get_by_label("This server asks for an API key.")
        expect(field).to_be_visible()
        field.fill("sk-wrong")
        site.page.get_by_role("button", name="Use it").click()
        expect(site.page.locator("#key-hint")).to_contain_text("This API key is not known here.")
        field.fill("sk-one")
        site.page.keyboard.press("Enter")
        site.ready()
        expect(field).to_be_hidden()
        expect(site.ask()).to_have_text("Hello.")
        assert "sk-one" not in json.dumps(site.page.evaluate("({...localStorage})"))


@contextmanager
def server(port: int, *options: str) -> Iterator[subprocess.Popen]:
    """A process that serves; killed in the end."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.talking_pipeline", str(port), *options]
    )
    try:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            try:
                httpx.get(f"http://127.0.0.1:{port}/health")
                break
            except httpx.HTTPError:
                time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.wait()


def test_a_server_that_is_killed_and_comes_back(browser: Browser) -> None:
    port = free_port()
    with server(port, "holds"):
        context = visit(browser, f"http://127.0.0.1:{port}", TalkingPipeline())
        site = context.__enter__()
        site.ready()
        site.send("Hi")
        expect(site.page.locator(".assistant .body")).to_have_text("Hello, her")
    expect(site.page.get_by_role("alert")).to_contain_text(
        "The connection to the server broke off."
    )
    expect(site.page.locator(".assistant")).to_contain_text("Broken off.")
    expect(site.state).to_have_text("The server can't be reached; trying again")
    site.send("Are you there?")
    expect(site.page.get_by_role("alert")).to_contain_text("The server can't be reached.")
    with server(port):
        site.ready()
        site.page.get_by_role("button", name="Try again").click()
        expect(site.page.locator(".assistant .body").last).to_have_text("Hello, here I am.")
        expect(site.ask("And now?")).to_have_text("Hello, here I am.")
    context.__exit__(None, None, None)


# --- what a model may write -------------------------------------------------------------------

ATTACKS = [
    "<script>window.hit = 1</script>",
    "<img src=x onerror='window.hit = 1'>",
    "<svg onload=window.hit=1>",
    "[a](javascript:window.hit=1)",
    "[a](JaVaScRiPt:window.hit=1)",
    "[a](&#106;avascript:window.hit=1)",
    "[a]( data:text/html,<script>window.hit=1</script>)",
    '[a](https://example.com" onmouseover="window.hit=1)',
    "[<img src=x onerror=window.hit=1>](https://example.com)",
    "![a](https://example.com/x.png)",
    "```html\n<script>window.hit = 1</script>\n```",
    '```"><script>window.hit=1</script>\nx\n```',
    "`<script>window.hit = 1</script>`",
    "# <iframe src='javascript:window.hit=1'></iframe>",
    "| <b onclick=window.hit=1>a</b> | b |\n|-|-|\n| <a href=javascript:window.hit=1>x</a> |",
    "- <style>body { display: none }</style>",
    "<form action=https://example.com><button>x</button></form>",
    "<base href=https://example.com/>",
    "{{constructor.constructor('window.hit=1')()}}",
]


def test_no_text_is_markup(site: Site) -> None:
    """Of a model, of a user, from the store, and as a title."""
    for attack in ATTACKS:
        site.page.get_by_role("button", name="New chat").click()
        site.pipeline.reply = attack
        site.ask(attack)
        assert attack.split("\n")[0] in site.page.locator(".user .body").inner_text()
        check_text(site)
    site.page.reload()
    chats = site.page.locator("#conversations .open")
    expect(chats).to_have_count(len(ATTACKS))
    for chat in chats.all():
        chat.click()
        expect(site.page.locator(".message")).to_have_count(2)
        check_text(site)


def check_text(site: Site) -> None:
    for link in site.page.locator("#messages a").all():
        assert link.get_attribute("href").startswith("https://example.com")
        assert link.get_attribute("rel") == "noopener noreferrer"
        assert set(link.evaluate("a => a.getAttributeNames()")) == {"href", "target", "rel"}
    outside = "script, img, svg, iframe, style, form, base, b, [onclick], [onerror], [onload]"
    assert site.page.locator("#messages").locator(outside).count() == 0
    assert site.page.locator("#history").locator(outside).count() == 0
    assert site.page.evaluate("window.hit") is None


STREAM = (
    ": hello\r\n\r\ndata: é😀\n\ndata:a\r\ndata: b\r\n\r\ndata: x\r\rid: 7\n\ndata: never ended\n"
)


def test_events_split_anywhere(site: Site) -> None:
    """Ends of lines, characters and events may fall between two reads."""
    found = site.page.evaluate(
        """async text => {
            const { eventData } = await import("/page/sse.js");
            const bytes = new TextEncoder().encode(text);
            const results = [];
            for (let at = 0; at <= bytes.length; at += 1) {
                const body = new ReadableStream({ start(controller) {
                    controller.enqueue(bytes.slice(0, at));
                    controller.enqueue(bytes.slice(at));
                    controller.close();
                } });
                results.push(await Array.fromAsync(eventData(body)));
            }
            return results;
        }""",
        STREAM,
    )
    assert found == [["é😀", "a\nb", "x"]] * (len(STREAM.encode()) + 1)


def rendered(site: Site, text: str) -> str:
    """The structure that a text becomes."""
    return site.page.evaluate(
        """async text => {
            const { markdown } = await import("/page/markdown.js");
            const tree = node => node.nodeType === 3 ? node.data :
                node.tagName === undefined ? node : `${node.tagName.toLowerCase()}(${
                [...node.childNodes].map(tree).join("")})`;
            return markdown(text).map(tree).join("");
        }""",
        text,
    )


MARKDOWN = [
    ("a\nb\n\nc", "p(abr()b)p(c)"),
    ("# a\n## b ##\n####### c", "h3(a)h4(b)p(####### c)"),
    ("a **b** *c* ~~d~~ __e__ _f_", "p(a strong(b) em(c) del(d) strong(e) em(f))"),
    ("**a *b* c**", "p(strong(a em(b) c))"),
    ("2 * 3 * 4 and snake_case_name", "p(2 * 3 * 4 and snake_case_name)"),
    ("**open and `open", "p(**open and `open)"),
    ("\\*a\\* \\x", "p(*a* \\x)"),
    ("`a*b*` ``c`d``", "p(code(a*b*) code(c`d))"),
    ("```python\na\n\n  b\n```\nc", "pre(code(a\n\n  b))p(c)"),
    ("```\nopen", "pre(code(open))"),
    ("~~~\n```\n~~~", "pre(code(```))"),
    ("- a\n- b\n  - c\n- d", "ul(li(a)li(bul(li(c)))li(d))"),
    ("3. a\n4. b", "ol(li(a)li(b))"),
    ("1. a\n\n2. b", "ol(li(a)li(b))"),
    ("1. a\n   ```\n   x\n   ```\n2. b", "ol(li(apre(code(x)))li(b))"),
    ("* a\n\nb", "ul(li(a))p(b)"),
    ("> a\n> > b\n\nc", "blockquote(p(a)blockquote(p(b)))p(c)"),
    ("---\n***", "hr()hr()"),
    (
        "| a | b |\n|--|:-:|\n| 1 | **2** |\nc",
        "div(table(thead(tr(th(a)th(b)))tbody(tr(td(1)td(strong(2))))))p(c)",
    ),
    ("a | b\nc", "p(a | bbr()c)"),
    ("[a](https://b.c/d_e_f) [g](h)", "p(a(a) [g](h))"),
    ("", ""),
    ("\n \n", ""),
    ("-", "ul(li())"),
    ("é 😀 \u2028 x", "p(é 😀 \u2028 x)"),
]


def test_markdown(site: Site) -> None:
    assert [(text, rendered(site, text)) for text, _ in MARKDOWN] == MARKDOWN


def test_markdown_of_anything_comes_to_an_end(site: Site) -> None:
    """Neither too deep nor too long."""
    pieces = ["> ", "- ", "**", "*", "[", "`", "_a", "[a](", "# ", "\\", "~~~\n", "1. "]
    for piece in [*pieces, "|", "|a"]:
        began = time.monotonic()
        rendered(site, piece * 3000)
        rendered(site, "".join(" " * (2 * depth) + piece + "x\n" for depth in range(60)))
        assert time.monotonic() - began < 5, piece


# --- how it is used and how it looks ----------------------------------------------------------


def test_by_keyboard_alone(site: Site) -> None:
    site.pipeline.reply = "Hello, here I am."
    assert focused(site) == "input", "one can write at once"
    site.page.keyboard.type("Hi")
    site.page.keyboard.press("Enter")
    expect(site.page.locator(".assistant .body")).to_have_text("Hello, here I am.")
    site.settled()
    site.page.evaluate(
        "document.activeElement.blur(); document.body.tabIndex = -1; document.body.focus()"
    )
    order = []
    for _ in range(11):
        site.page.keyboard.press("Tab")
        order.append(focused(site))
    assert order == [
        "Skip to the message",
        "settings-open",
        "theme",
        "new-chat",
        "Hi",
        TIMES,
        "input",
        "speculation",
        "send",
        "compare",
        "lanes-scroll",
    ]
    site.page.locator("#settings-open").focus()
    site.page.keyboard.press("Enter")
    assert focused(site) == "system"
    site.page.keyboard.type("never")
    site.page.keyboard.press("Escape")
    expect(site.page.locator("#settings")).to_be_hidden()
    assert focused(site) == "settings-open"
    site.page.keyboard.press("Enter")
    assert site.page.get_by_label("System prompt").input_value() == "", "Esc saves nothing"


def colours(site: Site) -> tuple[int, int]:
    """How bright paper and ink are."""
    style = "getComputedStyle(document.body)"
    found = site.page.evaluate(f"[{style}.backgroundColor, {style}.color]")
    paper, ink = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in found)
    return paper, ink


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(browser: Browser, scheme: str) -> None:
    """As the system has it, until the switch is used; that is kept."""
    with site_of(browser, color_scheme=scheme) as site:
        paper, ink = colours(site)
        assert (paper > ink) is (scheme == "light")
        other = "Dark" if scheme == "light" else "Light"
        button = site.page.get_by_role("button", name=f"{other} colours")
        button.click()
        paper, ink = colours(site)
        assert (paper > ink) is (scheme == "dark")
        site.page.reload()
        assert colours(site) == (paper, ink)


def test_on_a_phone(browser: Browser) -> None:
    with site_of(browser, **PHONE) as site:
        site.ready()
        site.pipeline.reply = (
            "Hello, here I am: " + "a_very_long_word" * 20 + "\n\n```\n" + "x" * 300 + "\n```"
        )
        site.page.get_by_label("Message", exact=True).fill("Hi")
        site.page.get_by_role("button", name="Send").tap()
        expect(site.page.locator(".assistant .body")).to_contain_text("here I am")
        site.settled()
        assert not site.page.get_by_role("heading", name="Pipeline").is_visible()
        width = "document.documentElement.scrollWidth"
        assert site.page.evaluate(width) == 390
        site.page.get_by_role("button", name="Pipeline").tap()
        expect(site.page.locator("#lanes")).to_be_visible()
        expect(site.page.locator("#input")).to_be_hidden()
        assert site.page.evaluate(width) == 390
        site.page.get_by_role("button", name="Chat", exact=True).tap()
        site.page.get_by_role("button", name="Chats").tap()
        expect(site.page.get_by_role("button", name="New chat")).to_be_focused()
        site.page.keyboard.press("Escape")
        expect(site.page.locator("#history")).to_be_hidden()
        for name in ("Send", "Settings", "Chats"):
            assert site.page.get_by_role("button", name=name).bounding_box()["height"] >= 40
        bottom = site.page.locator("#composer").bounding_box()
        assert bottom["y"] + bottom["height"] <= 844
        assert site.complaints == []


LOOKS = [("wide", "light"), ("phone", "dark"), ("settings", "light"), ("error", "dark")]
OTHER_LOOKS = [("wide", "dark"), ("phone", "light"), ("settings", "dark"), ("error", "light")]


@pytest.mark.parametrize(
    ("where", "scheme"),
    [*LOOKS, *(pytest.param(*look, marks=pytest.mark.full) for look in OTHER_LOOKS)],
)
def test_accessibility(browser: Browser, where: str, scheme: str) -> None:
    """axe-core's rules: names, roles, contrast."""
    with site_of(browser, color_scheme=scheme, **(PHONE if where == "phone" else {})) as site:
        site.ready()
        site.pipeline.stages = 4
        site.pipeline.reply = (
            "Hello, **here** I am.\n\n```\nx\n```\n\n> a `b`\n\n| a | b |\n|-|-|\n| c | d |"
        )
        site.ask("Hi")
        if where == "phone":
            site.page.get_by_role("button", name="Pipeline").tap()
        elif where == "settings":
            site.page.get_by_role("button", name="Settings").click()
        elif where == "error":
            site.pipeline.error = "The pipeline is not there."
            site.send("Hi")
            expect(site.page.get_by_role("alert")).to_be_visible()
        found = Axe().run(site.page)
        assert found.violations_count == 0, found.generate_report()
